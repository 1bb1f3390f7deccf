"""Arrivals of dispatches: their hooks, and deep_ep's statistics of waits for peers, which DeepXTrace reads.

deep_ep adds up the cycles that its warps wait for each source rank.  Here the counters of rounds have nanoseconds, of
one thread a peer, for its round header and its rows.  DeepXTrace compares ranks with each other, and needs no unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.protocol import PEER_COUNTERS, SCALAR_COUNTERS
from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.event import EventHandle
from moecomm.compat.deep_ep.pool import check_dimensions
from moecomm.dispatch.routed import Routed
from moecomm.errors import BadInput
from moecomm.observe.stats.counters import WAITS
from moecomm.rounds.rounds import Rounds

_FIRST_WAIT = PEER_COUNTERS - len(WAITS)


class WaitCost:
    """Wait times of rounds for each peer, added to a caller's tensor on the current stream; a graph can capture it.

    Args:
        name: of the argument.
        total: int64 `[R]`.
        ranks: of the group.
        device: of the rounds.
    """

    def __init__(self, name: str, total: torch.Tensor, ranks: int, device: torch.device) -> None:
        check_dimensions(name, total, "ranks")
        check_tensor(name, total, device=device, dtypes=(torch.int64,), shape=(ranks,))
        if not total.is_contiguous():
            raise BadInput(name, "a tensor with gaps", "a contiguous one")
        self._total = total

    def before(self, rounds: Rounds, phase: Literal["dispatch", "combine"]) -> None:
        """Note the waits before a round, or a half of one."""
        self._begun = _waited(rounds, phase)

    def after(self, rounds: Rounds, phase: Literal["dispatch", "combine"]) -> None:
        """Add the waits of the round."""
        self._total.add_(_waited(rounds, phase) - self._begun)


def _waited(rounds: Rounds, phase: Literal["dispatch", "combine"]) -> torch.Tensor:
    """Return a new tensor, int64 `[R]`: the time that this rank has waited for headers, and for rows of this phase."""
    ranks = rounds.num_ranks
    peers = rounds.session.counters()[SCALAR_COUNTERS : SCALAR_COUNTERS + PEER_COUNTERS * ranks].view(-1, ranks)
    return peers[_FIRST_WAIT] + peers[_FIRST_WAIT + WAITS.index(phase)]


class Arrival:
    """Receive of the rows of a dispatch, once: when called, or ahead of the next dispatch if that begins earlier.

    Called after that, which may be on another stream, it makes the current stream wait for the rows.

    Args:
        buffer, routed: of the dispatch.
        cost: adds up the waits.
        then: called on the stream that has received the rows.
    """

    def __init__(
        self, buffer: Buffer, routed: Routed, cost: WaitCost | None = None, then: Callable[[], object] | None = None
    ) -> None:
        self._buffer, self._cost, self._then = buffer, cost, then
        self._routed: Routed | None = routed
        self._early: EventHandle | None = None  # after the rows, on the stream that received them for the hook

    def __call__(self) -> None:
        if not self._receive() and self._early is not None:
            self._early.current_stream_wait()

    def receive_early(self) -> None:
        """Receive the rows on the current stream, unless the hook has been called, which may be on another one."""
        if self._receive():
            self._early = EventHandle()

    def _receive(self) -> bool:
        """Return whether this call receives the rows."""
        routed, self._routed = self._routed, None  # so that the window has its memory back when the caller's are gone
        if routed is None:
            return False
        then, self._then = self._then, None
        if self._cost is not None:
            self._cost.before(self._buffer.rounds, "dispatch")
        self._buffer.dispatch_end(routed, sync=False)
        if self._cost is not None:
            self._cost.after(self._buffer.rounds, "dispatch")
        if then is not None:
            then()
        return True
