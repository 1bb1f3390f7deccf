"""Cost of dispatch and combine over D domains of L ranks, by stages.

HT. A token crosses the slow link once per domain, to the forwarder with the source rank's index. The forwarder sends
the token on over NVLink. On the way back the ranks of a domain are added up first. Both stages run concurrently,
pipelined by chunks: start + latencies + max(slow, NVLink) + min(slow, NVLink) / chunks. Dispatch pays two latencies:
one for the counts that determine positions, one for the last row. Combine pays one. The final sum over domains at the
source rank is left out, because HBM is much faster than the NIC through which its input arrived.

LL. Every rank puts and signals directly to every rank. moecomm's own rounds have the terms of `direct.py`, fitted to
rounds of few tokens between domains. For other libraries: max(start + NVLink, start + latency + slow).

`start` is the time of an empty load by the lines of `domain.py`, and the agreement of all ranks: every block reads the
counts of every rank, whatever its domain. Since it was measured, blocks of more than 16 ranks share that work.

The slow stage takes the larger of the byte time and the message time of the busiest NIC. Its rows are those of the
rank that receives most: routing is random, so each rank receives another number, and a round ends with the last rank.
The NVLink stage is the line of `domain.py` for the busiest rank on average; measured rows have their own imbalance.
One domain has no slow stage.

Messages. HT puts runs of consecutive tokens (`rows.runs`), a signal after each chunk, and a credit back; FP8 rows of a
dispatch go one by one, because their places are larger. LL puts each row, and one signal to each rank. Round headers
are one put and one signal to each rank of other domains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

from moecomm.errors import BadInput
from moecomm_bench.ours import OUTSIDE
from moecomm_bench.simulate.blocks import blocks_of, direct_blocks_of
from moecomm_bench.simulate.direct import Crossing
from moecomm_bench.simulate.domain import FEW, MOST_FEW, Domain, DomainLoad, Operation
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.routing import Array, Spread
from moecomm_bench.simulate.rows import Lines, header_bytes, runs, words_of

HT, LL, AUTO = "ht", "ll", "auto"


@dataclass(frozen=True)
class Machine:
    """The hardware of the ranks: one domain, and the NIC between domains. `num_sms` blocks run; 0: by the table."""

    domain: Domain
    nic: ModelNic
    chunk_tokens: int = 32  # HT: tokens whose rows are signaled together
    num_sms: int = 0

    def check(self) -> None:
        """Raise BadInput if a value is out of range."""
        self.nic.check()
        if self.chunk_tokens < 1:
            raise BadInput("chunk_tokens", self.chunk_tokens, "at least 1")
        if self.num_sms < 0:
            raise BadInput("num_sms", self.num_sms, "0 or more")

    def blocks(self, operation: Operation, ranks: int, tokens: int) -> int:
        """Return the blocks of a launch."""
        return self.num_sms or blocks_of(self.domain.name, ranks, operation, tokens)


@dataclass(frozen=True)
class Cost:
    """Microseconds of one operation and its parts; bytes of the busiest NIC and rank; blocks of the launch.

    With several domains `latency_us` includes the start. `nvlink_us` includes it, too, except for moecomm's LL over
    several domains: there it is the time of blocks and links alone.
    """

    algorithm: str
    us: float
    latency_us: float
    slow_us: float
    nvlink_us: float
    slow_bytes: float
    slow_messages: float
    nvlink_bytes: float
    blocks: int

    @property
    def bound(self) -> str:
        """The largest part: "nic", "nvlink" or "latency"."""
        parts = {"nvlink": self.nvlink_us, "nic": self.slow_us, "latency": self.latency_us}
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True)
class Rows:
    """The rows of an operation.

    Attributes:
        row_bytes: bytes of a row inside a domain.
        lines: those of a row of few tokens inside a domain; None: few tokens take no lines.
        slow_row_bytes: bytes of a row that a forwarder puts, where a domain's sum is wider; 0: `row_bytes`.
        head_bytes: bytes beside a row between domains.
        y_bytes: bytes of a row that combine adds up; 0: `row_bytes`.
        per_expert: LL sends one row for each (token, expert), as some libraries do, not for each (token, rank).
        joined: HT puts runs of consecutive tokens.
        headers: ranks exchange round headers and counts, as moecomm does. False: rows alone.
    """

    row_bytes: int
    lines: Lines | None = None
    slow_row_bytes: int = 0
    head_bytes: int = 0
    y_bytes: int = 0
    per_expert: bool = False
    joined: bool = True
    headers: bool = True


def cost(
    operation: Operation,
    spread: Spread,
    tokens: int,
    rows: Rows,
    machine: Machine,
    *,
    algorithm: str = AUTO,
    most_direct: int = MOST_FEW,
) -> Cost:
    """Return the cost of an operation.

    Args:
        operation: dispatch or combine in one layout.
        spread: expected routing of a token.
        tokens: tokens of a rank.
        rows: bytes of its rows.
        machine: the hardware.
        algorithm: "ht", "ll", or "auto", as moecomm does: LL up to `most_direct` tokens, for which a window has room.
        most_direct: see `algorithm`.

    Raises:
        BadInput: an argument is out of range.
        NotMeasured: no line was fitted to the operation.
    """
    machine.check()
    if tokens < 0 or rows.row_bytes < 1 or min(rows.slow_row_bytes, rows.head_bytes) < 0:
        raise BadInput("tokens, rows", (tokens, rows), "0 or more tokens, rows of 1 byte or more")
    ways: dict[str, Callable[[], Cost]] = {
        HT: lambda: _ht(operation, spread, tokens, rows, machine),
        LL: lambda: _ll(operation, spread, tokens, rows, machine),
    }
    if algorithm not in (*ways, AUTO):
        raise BadInput("algorithm", repr(algorithm), "auto, ht or ll")
    if algorithm == AUTO:
        algorithm = LL if len(spread.domains) > 1 and tokens <= most_direct else HT
    return ways[algorithm]()


def fan_out(operation: Operation, spread: Spread, tokens: int, rows: Rows, blocks: int) -> DomainLoad:
    """Return the load of the busiest rank inside a domain in HT, which forwards tokens of all domains."""
    domains, ranks = spread.by_domain.shape
    everywhere = tokens * domains
    in_packets = domains == 1 and rows.lines is not None and rows.lines.carry(tokens, spread.topk, ranks)
    return _load(operation, spread, spread.by_domain, (everywhere, tokens), rows, blocks, in_packets)


def _load(
    operation: Operation,
    spread: Spread,
    wanted: Array,
    tokens: tuple[float, float],
    rows: Rows,
    blocks: int,
    in_packets: bool,
) -> DomainLoad:
    """Return a load. `wanted` [D, L] are rows of a token by rank; `tokens` go through a rank, and are of a rank."""
    sent_bytes = rows.lines.nbytes if in_packets and rows.lines is not None else rows.row_bytes
    passing, own = tokens
    handled = max(float(wanted.sum(axis=1).max()), float((wanted.shape[1] * wanted).max()))
    return DomainLoad(
        tokens=passing,
        sent=passing * _busiest_nvlink(wanted) * sent_bytes,
        rows=passing * handled,
        row_bytes=rows.row_bytes,
        copied=0.0 if in_packets and operation.what == "combine" else _copied(operation, spread, own, rows),
        blocks=blocks,
        words=words_of(operation, spread) if rows.headers else 0,
        packets=in_packets,
    )


def _copied(operation: Operation, spread: Spread, tokens: float, rows: Rows) -> float:
    """Return the bytes that the busiest rank copies in its own memory: replicas, or rows of y that it stages."""
    everywhere = tokens * len(spread.ranks)
    if operation.what == "dispatch":
        replicas = 0.0 if operation.layout == "flat" else float((spread.entries - spread.ranks).max())
        return everywhere * replicas * rows.row_bytes
    if operation.layout != "flat":
        return everywhere * float(spread.entries.max()) * (rows.y_bytes or rows.row_bytes)
    return everywhere * float(spread.ranks.max()) * rows.row_bytes if operation.variant == OUTSIDE else 0.0


def _ht(operation: Operation, spread: Spread, tokens: int, rows: Rows, machine: Machine) -> Cost:
    domains, ranks = spread.by_domain.shape
    blocks = machine.blocks(operation, ranks, tokens)
    load = fan_out(operation, spread, tokens, rows, blocks)
    nvlink_us = machine.domain.us(operation, load)
    if domains == 1:
        return Cost(HT, nvlink_us, 0.0, 0.0, nvlink_us, 0.0, 0.0, load.sent, blocks)
    wanted = spread.domains[:, None]
    crossing = _busiest_slow(wanted, tokens, float(spread.domains.max()), domains * ranks)
    chunks = max(1.0, tokens / machine.chunk_tokens)
    size = (rows.slow_row_bytes or rows.row_bytes) + rows.head_bytes
    share = float(spread.domains.max())
    puts = (domains - 1) * runs(tokens, machine.chunk_tokens, share) if rows.joined else crossing
    signals = 2 * min(crossing, chunks * (domains - 1))
    slow_bytes, messages = _with_headers(operation, spread, crossing * size, puts + signals, rows.headers)
    slow_us = machine.nic.us(slow_bytes, messages)
    start_us = machine.domain.us(operation, DomainLoad(load.tokens, 0, 0, blocks=blocks, words=load.words))
    latency_us = start_us + machine.nic.latency_us * (2 if operation.what == "dispatch" else 1)
    moving_us = nvlink_us - start_us
    us = latency_us + max(slow_us, moving_us) + min(slow_us, moving_us) / chunks
    return Cost(HT, us, latency_us, slow_us, nvlink_us, slow_bytes, messages, load.sent, blocks)


def _ll(operation: Operation, spread: Spread, tokens: int, rows: Rows, machine: Machine) -> Cost:
    domains, ranks = spread.by_domain.shape
    if rows.headers and domains > 1:
        return _direct(operation, spread, tokens, rows, machine)
    blocks = machine.blocks(operation, ranks, tokens)
    sent = (spread.entries if rows.per_expert else spread.ranks).reshape(domains, -1)
    load = _load(operation, spread, sent, (tokens, tokens), rows, blocks, True)
    nvlink_us = machine.domain.us(operation, load)
    if domains == 1:
        return Cost(LL, nvlink_us, 0.0, 0.0, nvlink_us, 0.0, 0.0, load.sent, blocks)
    share = float(sent.max()) / (spread.entries.sum() if rows.per_expert else 1)
    crossing = _busiest_slow(sent, tokens, share, domains * ranks)
    size = rows.row_bytes + rows.head_bytes
    puts = crossing + (domains - 1) * ranks
    slow_bytes, messages = _with_headers(operation, spread, crossing * size, puts, rows.headers)
    slow_us = machine.nic.us(slow_bytes, messages)
    start_us = machine.domain.us(operation, DomainLoad(0, 0, 0, blocks=blocks, words=load.words, packets=True))
    latency_us = start_us + machine.nic.latency_us
    us = max(nvlink_us, latency_us + slow_us)
    return Cost(LL, us, latency_us, slow_us, nvlink_us, slow_bytes, messages, load.sent, blocks)


def crossing(
    operation: Operation, spread: Spread, tokens: int, rows: Rows, nic: ModelNic, domain: Domain, blocks: int
) -> Crossing:
    """Return the load of a round of moecomm whose rows go direct between domains."""
    domains, ranks = spread.by_domain.shape
    put = _busiest_slow(spread.by_domain, tokens, float(spread.ranks.max()), domains * ranks)
    signals = (domains - 1) * ranks
    size = rows.row_bytes + rows.head_bytes
    slow_bytes, messages = _with_headers(operation, spread, put * size, put + signals, True)
    inside = tokens * _busiest_nvlink(spread.by_domain) * rows.row_bytes
    return Crossing(
        rows=tokens * max(float(spread.ranks.sum()), domains * ranks * float(spread.ranks.max())),
        row_bytes=rows.row_bytes,
        copied=_copied(operation, spread, tokens, rows),
        blocks=max(1, min(blocks, tokens)),  # a block has a token or none
        links_us=inside / domain.line(operation, FEW).gbs / 1e3,
        wire_us=nic.us(slow_bytes, messages),
        latency_us=nic.latency_us,
        agreement_us=domain.agreement_us(operation, DomainLoad(tokens, 0, 0, words=words_of(operation, spread))),
        # csrc/dispatch/call.cuh, kCanLeaveEarly; csrc/combine/scaleout_direct.cuh, leaves_early.
        early=domains - 1 <= ranks if operation.what == "dispatch" else domains == 2,
        nvlink_bytes=inside,
        slow_bytes=slow_bytes,
        slow_messages=messages,
    )


def _direct(operation: Operation, spread: Spread, tokens: int, rows: Rows, machine: Machine) -> Cost:
    ranks = spread.by_domain.shape[1]
    blocks = machine.num_sms or direct_blocks_of(machine.domain.name, ranks, operation, tokens)
    load = crossing(operation, spread, tokens, rows, machine.nic, machine.domain, blocks)
    line = machine.domain.direct_line(operation)
    times = line.us(load), line.latencies_us(load), load.wire_us, line.blocks_us(load)
    return Cost(LL, *times, load.slow_bytes, load.slow_messages, load.nvlink_bytes, blocks)


def _with_headers(
    operation: Operation, spread: Spread, sent: float, messages: float, headers: bool
) -> tuple[float, float]:
    """Return bytes and messages of a NIC, with those of the round headers: one put and one signal to each rank."""
    if not headers:
        return sent, messages
    domains, ranks = spread.by_domain.shape
    others = (domains - 1) * ranks
    return sent + others * header_bytes(operation, spread), messages + 2 * others


def _busiest_nvlink(wanted: Array) -> float:
    """Return the rows over the busiest direction of a rank, for one token of every rank of a domain.

    `wanted` is [D, L]. Outgoing rows go to the peers of the domain; incoming rows arrive from them.
    """
    out = wanted.sum(axis=1, keepdims=True) - wanted
    into = (wanted.shape[1] - 1) * wanted
    return float(max(out.max(), into.max()))


def _busiest_slow(wanted: Array, tokens: int, share: float, nics: int) -> float:
    """Return the expected rows over the busiest direction of the busiest of all NICs.

    `wanted` is [D, 1], by domain, where rows go to the forwarder with the source's index; or [D, L], by rank, where
    rows go to every rank. `share` is the probability of one row: a NIC receives a binomial number of rows, and the
    largest of many such numbers is as many standard deviations above the mean as Blom's formula says.
    """
    domains, ranks = wanted.shape
    out = wanted.sum() - wanted.sum(axis=1)
    into = (domains - 1) * ranks * wanted
    mean = tokens * float(max(np.max(out), np.max(into)))
    deviations = NormalDist().inv_cdf((nics - 0.375) / (nics + 0.25))
    return mean + max(0.0, deviations) * sqrt(mean * max(0.0, 1 - share))
