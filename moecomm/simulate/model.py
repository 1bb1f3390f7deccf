"""Cost of dispatch and combine over D domains of L ranks, by stages.

HT. A token crosses the slow link once per domain, to the forwarder with the source rank's index. The forwarder sends
the token on over NVLink. On the way back the ranks of a domain are added up first. Both stages run concurrently,
pipelined by chunks: start + latencies + max(slow, NVLink) + min(slow, NVLink) / chunks. Dispatch pays two latencies:
one for the counts that determine positions, one for the last row. Combine pays one. The final sum over domains at the
source rank is left out, because HBM is much faster than the NIC through which its input arrived.

LL. Every rank puts and signals directly to every rank: max(start + NVLink, start + latency + slow).

`start` is the time of an empty load by the lines of `domain.py`.

The slow stage takes the larger of the byte time and the message time of the busiest NIC. The NVLink stage is the line
of `domain.py` for the busiest rank. One domain has no slow stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moecomm.errors import BadInput
from moecomm.simulate.domain import MOST_FEW, Domain, Load, Operation
from moecomm.simulate.nic import Nic
from moecomm.simulate.routing import Array, Spread

HT, LL, AUTO = "ht", "ll", "auto"
_MESSAGES_OF_ROW = 2  # LL: a put and its signal


@dataclass(frozen=True)
class Machine:
    """The hardware of the ranks: one domain, and the NIC between domains."""

    domain: Domain
    nic: Nic
    chunk_tokens: int = 32  # HT: tokens whose rows are signaled together

    def check(self) -> None:
        """Raise BadInput if a value is out of range."""
        self.nic.check()
        if self.chunk_tokens < 1:
            raise BadInput("chunk_tokens", self.chunk_tokens, "at least 1")


@dataclass(frozen=True)
class Cost:
    """Microseconds of one operation and its parts; bytes of the busiest NIC and rank.

    With several domains `latency_us` includes the start; `nvlink_us` always does.
    """

    algorithm: str
    us: float
    latency_us: float
    slow_us: float
    nvlink_us: float
    slow_bytes: float
    slow_messages: float
    nvlink_bytes: float

    @property
    def bound(self) -> str:
        """The largest part: "nic", "nvlink" or "latency"."""
        parts = {"nvlink": self.nvlink_us, "nic": self.slow_us, "latency": self.latency_us}
        return max(parts, key=parts.__getitem__)


def cost(
    operation: Operation,
    spread: Spread,
    tokens: int,
    row_bytes: int,
    machine: Machine,
    *,
    algorithm: str = AUTO,
    per_expert: bool = False,
    slow_row_bytes: int = 0,
    most_direct: int = MOST_FEW,
) -> Cost:
    """Return the cost of an operation.

    Args:
        operation: dispatch or combine in one layout.
        spread: expected routing of a token.
        tokens: tokens of a rank.
        row_bytes: bytes of a row on the wire.
        machine: the hardware.
        algorithm: "ht", "ll", or "auto": up to `most_direct` tokens the faster of both, else HT.
        per_expert: LL sends one row for each (token, expert), as some libraries do, instead of one for each (token,
            rank).
        slow_row_bytes: bytes of a row between domains in HT, where a domain's reduced row is wider; 0: `row_bytes`.
        most_direct: see `algorithm`.

    Raises:
        BadInput: an argument is out of range.
        NotMeasured: no line was fitted to the operation.
    """
    machine.check()
    if tokens < 0 or row_bytes < 1 or slow_row_bytes < 0:
        raise BadInput("tokens, row_bytes, slow_row_bytes", (tokens, row_bytes, slow_row_bytes), "0, 1, 0 or more")
    ways: dict[str, Callable[[], Cost]] = {
        HT: lambda: _ht(operation, spread, tokens, row_bytes, machine, slow_row_bytes or row_bytes),
        LL: lambda: _ll(operation, spread, tokens, row_bytes, machine, per_expert),
    }
    if algorithm not in (*ways, AUTO):
        raise BadInput("algorithm", repr(algorithm), "auto, ht or ll")
    if algorithm == AUTO and (len(spread.domains) == 1 or tokens > most_direct):
        algorithm = HT
    tried = ways if algorithm == AUTO else {algorithm: ways[algorithm]}
    found = [way() for way in tried.values()]
    return min(found, key=lambda one: one.us)


def fan_out(operation: Operation, spread: Spread, tokens: int, row_bytes: int) -> Load:
    """Return the load of the busiest rank inside a domain in HT, which forwards tokens of all domains."""
    everywhere = tokens * len(spread.domains)
    sent = everywhere * _busiest_nvlink(spread.by_domain) * row_bytes
    return Load(everywhere, sent, _handed_out(operation, spread, tokens))


def _ht(
    operation: Operation, spread: Spread, tokens: int, row_bytes: int, machine: Machine, slow_row_bytes: int
) -> Cost:
    domains = len(spread.domains)
    load = fan_out(operation, spread, tokens, row_bytes)
    nvlink_us = machine.domain.us(operation, load)
    if domains == 1:
        return Cost(HT, nvlink_us, 0.0, 0.0, nvlink_us, 0.0, 0.0, load.sent)
    rows = tokens * _busiest_slow(spread.domains[:, None])
    chunks = max(1.0, tokens / machine.chunk_tokens)
    messages = rows + min(rows, chunks * (domains - 1))
    slow_us = machine.nic.us(rows * slow_row_bytes, messages)
    start_us = machine.domain.us(operation, Load(load.tokens, 0, 0))
    latency_us = start_us + machine.nic.latency_us * (2 if operation.what == "dispatch" else 1)
    moving_us = nvlink_us - start_us
    us = latency_us + max(slow_us, moving_us) + min(slow_us, moving_us) / chunks
    return Cost(HT, us, latency_us, slow_us, nvlink_us, rows * slow_row_bytes, messages, load.sent)


def _ll(operation: Operation, spread: Spread, tokens: int, row_bytes: int, machine: Machine, per_expert: bool) -> Cost:
    domains = len(spread.domains)
    sent = (spread.entries if per_expert else spread.ranks).reshape(domains, -1)
    load = Load(tokens, tokens * _busiest_nvlink(sent) * row_bytes, _handed_out(operation, spread, tokens))
    nvlink_us = machine.domain.few_us(operation, load)
    if domains == 1:
        return Cost(LL, nvlink_us, 0.0, 0.0, nvlink_us, 0.0, 0.0, load.sent)
    rows = tokens * _busiest_slow(sent)
    messages = rows * _MESSAGES_OF_ROW
    slow_us = machine.nic.us(rows * row_bytes, messages)
    start_us = machine.domain.few_us(operation, Load(0, 0, 0))
    latency_us = start_us + machine.nic.latency_us
    us = max(nvlink_us, latency_us + slow_us)
    return Cost(LL, us, latency_us, slow_us, nvlink_us, rows * row_bytes, messages, load.sent)


def _busiest_nvlink(wanted: Array) -> float:
    """Return the rows over the busiest direction of a rank, for one token of every rank of a domain.

    `wanted` is [D, L]. Outgoing rows go to the peers of the domain; incoming rows arrive from them.
    """
    out = wanted.sum(axis=1, keepdims=True) - wanted
    into = (wanted.shape[1] - 1) * wanted
    return float(max(out.max(), into.max()))


def _busiest_slow(wanted: Array) -> float:
    """Return the rows over the busiest direction of a NIC, for one token of every rank.

    `wanted` is [D, 1], by domain, where rows go to the forwarder with the source's index; or [D, L], by rank, where
    rows go to every rank.
    """
    domains, ranks = wanted.shape
    out = wanted.sum() - wanted.sum(axis=1)
    into = (domains - 1) * ranks * wanted
    return float(max(np.max(out), np.max(into)))


def _handed_out(operation: Operation, spread: Spread, tokens: int) -> float:
    of_rank = spread.ranks if operation.layout == "flat" else spread.entries
    return tokens * len(spread.ranks) * float(of_rank.max())
