"""Dispatch and combine over D domains of L ranks: which stages there are, and how long each takes.

HT.  A token crosses the slow link once a domain, to the rank with the sender's index there, which fans it out over
NVLink; on the way home the ranks of a domain add up first.  Both stages run at once, a chunk behind each other:
start + latencies + max(slow, NVLink) + min(slow, NVLink) / chunks.  Dispatch pays two latencies, one for the counts
that say where rows go, one for the last row; combine pays one.  The home's own sum over domains reads at the speed of
HBM what came at the speed of a NIC: it is left out.

LL.  Every rank puts and signals straight to every rank: max(start + NVLink, start + latency + slow).

`start` is what the line of `domain.py` says of no rows at all.

The slow stage is bytes or messages of the busiest NIC, whichever takes longer; the NVLink stage is the line of
`domain.py` for the busiest rank.  One domain has no slow stage.
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
_MESSAGES_OF_ROW = 2  # LL: a put, and the signal behind it


@dataclass(frozen=True)
class Machine:
    """What ranks run on."""

    domain: Domain
    nic: Nic
    chunk_tokens: int = 32  # HT: tokens whose rows are signalled together

    def check(self) -> None:
        """Raises BadInput."""
        self.nic.check()
        if self.chunk_tokens < 1:
            raise BadInput("chunk_tokens", self.chunk_tokens, "at least 1")


@dataclass(frozen=True)
class Cost:
    """Microseconds of one operation, and of its parts; bytes of the busiest NIC and rank.

    `latency_us` has the start in it where there are several domains; `nvlink_us` always has.
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
        """What takes most of it: nic, nvlink, or latency."""
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
    """Of `tokens` a rank whose rows have `row_bytes` on the wire.

    `auto`: up to `most_direct` tokens the faster of the two, else HT.  `per_expert`: LL sends a row a (token,
    expert), as some libraries do, not one a (token, rank).  `slow_row_bytes`: of what crosses in HT where that is
    wider, a domain's sum of rows; 0: `row_bytes`.
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
    """Of the busiest rank inside a domain, in HT: tokens of all domains come through the ranks of each."""
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
    """Rows over the busiest direction of a rank, for one token of every rank of a domain; `wanted` is [D, L].

    Out of a rank: to the others of its domain.  Into it: from the others.
    """
    out = wanted.sum(axis=1, keepdims=True) - wanted
    into = (wanted.shape[1] - 1) * wanted
    return float(max(out.max(), into.max()))


def _busiest_slow(wanted: Array) -> float:
    """Rows over the busiest direction of a NIC, for one token of every rank.

    `wanted`: [D, 1], of domains, where rows go to the sender's own index; or [D, L], of ranks, where they go to all.
    """
    domains, ranks = wanted.shape
    out = wanted.sum() - wanted.sum(axis=1)
    into = (domains - 1) * ranks * wanted
    return float(max(np.max(out), np.max(into)))


def _handed_out(operation: Operation, spread: Spread, tokens: int) -> float:
    of_rank = spread.ranks if operation.layout == "flat" else spread.entries
    return tokens * len(spread.ranks) * float(of_rank.max())
