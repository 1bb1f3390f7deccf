"""Time of a round of few tokens between domains: its rows go direct, without a forwarder."""

from __future__ import annotations

from dataclasses import dataclass

TERMS = ("start_us", "row_ns", "block_gbs", "copy_gbs", "overlap")


@dataclass(frozen=True)
class Crossing:
    """The load of the busiest rank in such a round.

    Attributes:
        rows: rows that its blocks put, and take to their places.
        row_bytes: bytes of such a row.
        copied: bytes of rows that its blocks copy or add in their own memory.
        blocks: blocks that have a token.
        links_us: time of its rows over NVLink, inside the domain.
        wire_us: time of the busiest NIC, without latency.
        latency_us: latency of the NIC.
        agreement_us: time in which every block reads the words of all ranks.
        early: True if rows leave before the words of other ranks have come.
        nvlink_bytes: bytes over NVLink.
        slow_bytes: bytes of the busiest NIC.
        slow_messages: its messages.
    """

    rows: float
    row_bytes: float
    copied: float
    blocks: float
    links_us: float
    wire_us: float
    latency_us: float
    agreement_us: float
    early: bool
    nvlink_bytes: float = 0.0
    slow_bytes: float = 0.0
    slow_messages: float = 0.0


@dataclass(frozen=True)
class DirectLine:
    """The fitted terms of an operation whose rows go direct.

    `start_us` is a chain of steps whose time does not depend on the number of tokens: counting, send slots, fences of
    signals, and the steps after the last row. Headers take one latency of the NIC. Rows that leave early travel during
    this latency and the agreement; other rows leave after both, and take a second latency. A block has so few rows that
    it handles them one after the other:
        (rows * (row_ns + row_bytes / block_gbs) + copied / copy_gbs) / blocks.
    The blocks' time and the wire's time overlap by the fraction `overlap` of the shorter one: the first row leaves only
    when it is written, and a block handles the last row only when it has come.
    """

    start_us: float
    row_ns: float
    block_gbs: float
    copy_gbs: float
    overlap: float

    def latencies_us(self, load: Crossing) -> float:
        """Return the time of the steps, without rows."""
        after = 0.0 if load.early else load.agreement_us + load.latency_us
        return self.start_us + load.latency_us + after

    def blocks_us(self, load: Crossing) -> float:
        """Return the time of the blocks, or that of NVLink inside the domain if it is longer."""
        handled = load.rows * (self.row_ns + load.row_bytes / self.block_gbs) + load.copied / self.copy_gbs
        return max(handled / load.blocks / 1e3, load.links_us)

    def us(self, load: Crossing) -> float:
        """Return the microseconds of a load."""
        wire = max(load.wire_us, load.agreement_us) if load.early else load.wire_us
        shorter, longer = sorted((self.blocks_us(load), wire))
        return self.latencies_us(load) + longer + (1 - self.overlap) * shorter


EXPECTED = DirectLine(35.0, 700.0, 17.0, 12.0, 0.3)
