"""Rounds of CPU ranks: every rank publishes tensors in its own memory, signals each peer once, and reads theirs.

A rank's memory has two halves, and round n uses half n % 2.  A rank writes to a half again in round n + 2.  It has then
seen the signals of round n + 1 of all peers, which have read what they needed of round n before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch

from moecomm.errors import BadInput, Mismatch, MoecommError
from moecomm.overlap import agreement
from moecomm.overlap.sizes import Sizes
from moecomm.window import Window

_UNIT = 256  # bytes, of a half


class HostRounds:
    """The rounds of a rank over a Window of CPU ranks.  Opening is collective.

    Args:
        window: whose memory and first `num_ranks` signals nothing else uses from now on.
    """

    def __init__(self, window: Window) -> None:
        self.window, self.rank, self.num_ranks = window, window.rank, window.num_ranks
        if window.num_signals < self.num_ranks:
            raise BadInput("signals", window.num_signals, f"at least {self.num_ranks}, one for each rank")
        self.half_bytes = half_bytes(window.nbytes)
        self.memory = [window.peer(rank) for rank in range(self.num_ranks)]
        window.barrier()  # earlier signals of all ranks have come
        self.signaled = [window.signal_value(rank) for rank in range(self.num_ranks)]
        window.barrier()  # no rank signals before all have read
        self.count = 0
        self.failed_calls = 0  # that have not reached the other ranks
        self.of = agreement.FORWARD  # of the call under way: see Workspace.call

    def begin(self, sizes: Sizes, nbytes: int) -> Round:
        """Begin a round that publishes `nbytes` on each rank.

        Raises:
            BadInput: there is no room.
            Closed, Timeout, PeerLost, Aborted: the Window is closed, or has failed.
        """
        if nbytes > self.half_bytes:
            need = 2 * -(-(nbytes + agreement.BYTES) // _UNIT) * _UNIT
            raise BadInput("nbytes", self.window.nbytes, f"at least {need} for this {sizes.operator}")
        self.window.check()
        self.count += 1
        return Round(self, sizes)


class Round:
    """One round, as a context.  An error in it, but for those of all ranks, ends the waits of all ranks."""

    def __init__(self, rounds: HostRounds, sizes: Sizes) -> None:
        self._rounds, self._sizes = rounds, sizes
        self._offset = rounds.count % 2 * (rounds.half_bytes + agreement.BYTES)
        self._header = agreement.header(sizes, rounds.failed_calls, of=rounds.of)
        self._header_of(rounds.rank).copy_(torch.tensor(self._header))
        self._pending = [(rounds.rank + step) % rounds.num_ranks for step in range(1, rounds.num_ranks)]
        self._errors: list[tuple[int, Mismatch]] = []

    def _header_of(self, rank: int) -> torch.Tensor:
        return self._rounds.memory[rank][self._offset : self._offset + agreement.BYTES].view(torch.int64)

    def published(self, rank: int, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor of the result's dtype that a rank publishes, of this shape."""
        return self._view(rank, shape, self._sizes.dtype, 0)

    def published_like(self, rank: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that a rank publishes one behind the other, of these shapes and dtypes."""
        ends = itertools.accumulate(of.nbytes for of in tensors)
        return [self._view(rank, of.shape, of.dtype, end - of.nbytes) for of, end in zip(tensors, ends, strict=True)]

    def _view(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
        begin = self._offset + agreement.BYTES + offset
        nbytes = math.prod(shape) * dtype.itemsize
        return self._rounds.memory[rank][begin : begin + nbytes].view(dtype).view(tuple(shape))

    def signal(self, rank: int) -> None:
        """Tell a peer that everything it reads is published.  Once for each peer; not for this rank."""
        self._rounds.window.signal(rank, self._rounds.rank)

    def signal_all(self) -> None:
        """Tell all peers."""
        for rank in list(self._pending):
            self.signal(rank)

    def arrivals(self) -> Iterator[int]:
        """Yield each peer whose call is the same, once it has signaled: in the order of arrival.

        When none has, wait for the next of the rotation.  Peers whose calls differ are waited for and left out.
        """
        window, wanted = self._rounds.window, self._rounds.signaled
        while self._pending:
            come = [rank for rank in self._pending if window.signal_value(rank) > wanted[rank]]
            if not come:
                window.wait(self._pending[0], wanted[self._pending[0]] + 1, peer=self._pending[0])
                come = self._pending[:1]
            for rank in come:
                self._pending.remove(rank)
                wanted[rank] += 1
                theirs = self._header_of(rank).tolist()
                error = agreement.difference(self._sizes, self._header, theirs, rank)
                if error is None:
                    yield rank
                else:
                    self._errors.append((rank, error))

    def wait_for_all(self) -> None:
        """Wait for every peer.

        Raises:
            Mismatch: a call differs; the first such rank.  Raised on all ranks.
        """
        for _ in self.arrivals():
            pass
        self.raise_mismatch()

    def raise_mismatch(self) -> None:
        """Raise the error of the first rank whose call differs, if any.  All arrivals() have come."""
        if self._errors:
            raise min(self._errors, key=lambda found: found[0])[1]

    def __enter__(self) -> Round:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, MoecommError):
            self._rounds.window.abort()  # peers would wait for what this rank does not publish


def half_bytes(nbytes: int) -> int:
    """Bytes that a call can publish in a Window of `nbytes`."""
    return max(nbytes // 2 // _UNIT * _UNIT - agreement.BYTES, 0)
