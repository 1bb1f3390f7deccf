"""The operators on CPU ranks: plain torch for each piece, this rank's first, then those of peers as they arrive.

In a round every rank publishes tensors in its own memory, signals each peer once, and reads theirs.  A rank's memory
has two halves, and round n uses half n % 2.  A rank writes to a half again in round n + 2.  It has then seen the
signals of round n + 1 of all peers, which have read what they needed of round n before.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moecomm import _native
from moecomm.errors import BadInput, Mismatch
from moecomm.fused.fp8 import Fp8, widen
from moecomm.overlap import agreement
from moecomm.overlap.local import bag_sums, check_bags, multiply, sum_in_order, wide_weights
from moecomm.overlap.plans import CallNumbers, Operators
from moecomm.overlap.sizes import GROUP, Matrix, Sizes
from moecomm.window import Window

_UNIT = 256  # bytes, of a half
_Views = list[list[torch.Tensor]]  # by half and rank


class HostExecutor(Operators):
    """The operators of a CPU rank."""

    def __init__(self, window: Window, numbers: CallNumbers) -> None:
        self.rounds = HostRounds(window, numbers)
        self._rank, self.num_ranks = window.rank, window.num_ranks

    def plan(self, call: Sizes, gather: bool = False) -> Callable[..., Any]:
        if call.operator == "all_gather_matmul":
            return self._all_gather_matmul(call, gather)
        if call.operator == "matmul_all_reduce":
            return self._matmul_all_reduce(call)
        return self._exchange(call)

    def _all_gather_matmul(self, call: Sizes, gather: bool) -> Callable[..., Any]:
        rank, ranks, rows, depth = self._rank, self.num_ranks, call.dims["M"], call.dims["K"]
        parts: list[tuple[tuple[int, ...], torch.dtype]] = [((rows, depth), call.given)]
        if call.fp8:
            parts.append(((rows, depth // GROUP), torch.float32))
        begins = [0, rows * depth * call.given.itemsize][: len(parts)]
        views = [self.rounds.views(*part, begin) for part, begin in zip(parts, begins, strict=True)]
        published = [list(zip(*of_half, strict=True)) for of_half in zip(*views, strict=True)]  # by half, rank and part
        this = HostRound(self.rounds, call, sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts))

        def run(x: Matrix, w: Matrix) -> tuple[torch.Tensor, Matrix | None]:
            mine = x if isinstance(x, Fp8) else (x,)
            y, wide = mine[0].new_empty(call.result, dtype=call.dtype), wide_weights(w)
            gathered = [of.new_empty((ranks, *of.shape)) for of in mine] if gather else []
            with this.call():
                half = this.begin()
                for to, of in zip(published[half][rank], mine, strict=True):
                    to.copy_(of)
                this.signal_all()
                come: Sequence[int] = (rank,)
                while come:
                    for peer in come:
                        piece = mine if peer == rank else tuple(published[half][peer])
                        of_peer = Fp8(*piece) if call.fp8 else piece[0]
                        y[peer * rows : (peer + 1) * rows] = multiply(of_peer, wide, call.dtype)
                        for to, of in zip(gathered, piece, strict=False):
                            to[peer] = of
                    come = this.arrived()
                this.end()
            if not gather:
                return y, None
            whole = [of.flatten(0, 1) for of in gathered]
            return y, Fp8(*whole) if call.fp8 else whole[0]

        return run

    def _matmul_all_reduce(self, call: Sizes) -> Callable[..., Any]:
        views = self.rounds.views(call.result, call.dtype)
        this = HostRound(self.rounds, call, call.bytes_of("M", "N"))

        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            with this.call():
                half = this.begin()
                views[half][self._rank].copy_(multiply(x, wide_weights(w), call.dtype))
                this.signal_all()
                this.arrived(all_of_them=True)
                found = sum_in_order(views[half])
                this.end()
            return found

        return run

    def _exchange(self, call: Sizes) -> Callable[..., Any]:
        """Plan an operator that sends a part to each rank."""
        shape = call.result if call.operator == "matmul_reduce_scatter" else call.result[1:]
        whole = (self.num_ranks, *shape)
        published = self.rounds.views(whole, call.dtype)
        arriving = [[of[self._rank] for of in by_rank] for by_rank in published]
        this = HostRound(self.rounds, call, math.prod(whole) * call.dtype.itemsize)
        rotation = [(self._rank + step) % self.num_ranks for step in range(1, self.num_ranks)]

        signal = self.rounds.handle.signal

        def send(parts: torch.Tensor, wide: torch.Tensor | None = None) -> list[torch.Tensor]:
            """Send `parts[rank]`, times a weight, to each rank; return those for this rank, in memory of this round.

            Parts for peers come first, in rotation, so that peers can go on.
            """
            with this.call():
                half = this.begin()
                mine = published[half][self._rank]
                for peer in (*rotation, self._rank):
                    mine[peer] = parts[peer] if wide is None else multiply(parts[peer], wide, call.dtype)
                    if peer != self._rank:
                        signal(peer, self._rank, 1)
                this.arrived(all_of_them=True)
                this.end()
            return arriving[half]

        return getattr(self, f"_{call.operator}")(call, send)  # type: ignore[no-any-return]

    def _matmul_reduce_scatter(self, call: Sizes, send: Callable[..., list[torch.Tensor]]) -> Callable[..., Any]:
        shards = self.num_ranks, call.result[0], call.dims["K"]

        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            rows = widen(*x, 1) if isinstance(x, Fp8) else x.float()
            return sum_in_order(send(rows.view(shards), wide_weights(w)))

        return run

    def _matmul_all_to_all(self, call: Sizes, send: Callable[..., list[torch.Tensor]]) -> Callable[..., Any]:
        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            rows = widen(*x, 1) if isinstance(x, Fp8) else x.float()  # all of them: bits depend on a part's strides
            return torch.stack(send(rows.transpose(0, 1), wide_weights(w)))

        return run

    def _embedding_all_to_all(self, call: Sizes, send: Callable[..., list[torch.Tensor]]) -> Callable[..., Any]:
        batch, rows = call.dims["B"], call.dims["V"]

        def run(tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
            check_bags(indices, offsets, rows)
            everybody = bag_sums(tables, indices, offsets, self.num_ranks * batch)
            parts = everybody.view(len(tables), self.num_ranks, batch, tables.shape[2])
            return torch.stack(send(parts.transpose(0, 1)))

        return run

    def _all_to_all(self, call: Sizes, send: Callable[..., list[torch.Tensor]]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.stack(send(x))

        return run


class HostRounds:
    """The rounds of a rank over a Window of CPU ranks.  Opening is collective.

    Args:
        window: whose memory and first `num_ranks` signals nothing else uses from now on.
        numbers: of the Workspace.
    """

    def __init__(self, window: Window, numbers: CallNumbers) -> None:
        self.window, self.numbers, self.rank, self.num_ranks = window, numbers, window.rank, window.num_ranks
        if window.num_signals < self.num_ranks:
            raise BadInput("signals", window.num_signals, f"at least {self.num_ranks}, one for each rank")
        self.handle = window._opened.handle
        self.half_bytes = half_bytes(window.nbytes)
        self._memory = [window.peer(rank) for rank in range(self.num_ranks)]
        self.headers: list[list[Any]] = [  # by half and rank
            [(ctypes.c_int64 * agreement.WORDS).from_address(of.data_ptr() + begin) for of in self._memory]
            for begin in self._begins
        ]
        window.barrier()  # earlier signals of all ranks have come
        self.signaled = [window.signal_value(rank) for rank in range(self.num_ranks)]
        window.barrier()  # no rank signals before all have read

    @property
    def _begins(self) -> tuple[int, int]:
        return 0, self.half_bytes + agreement.BYTES

    def views(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> _Views:
        """Return the tensors of this shape that ranks publish, `offset` bytes behind the first; none without room."""
        nbytes = math.prod(shape) * dtype.itemsize
        if offset + nbytes > self.half_bytes:
            return [[], []]
        begins = [begin + agreement.BYTES + offset for begin in self._begins]
        return [[of[at : at + nbytes].view(dtype).view(tuple(shape)) for of in self._memory] for at in begins]


class HostRound:
    """The rounds of a plan; one at a time, in a call() from begin() to end().

    An error in a call, but for those of all ranks, ends the waits of all ranks.

    Args:
        rounds: of this rank.
        sizes: of the call.
        nbytes: that each rank publishes.
    """

    def __init__(self, rounds: HostRounds, sizes: Sizes, nbytes: int) -> None:
        self._rounds, self._sizes, self._nbytes = rounds, sizes, nbytes
        self._header = agreement.header(sizes)
        self._peers = [(rounds.rank + step) % rounds.num_ranks for step in range(1, rounds.num_ranks)]

    def call(self) -> _native.Call:
        """Return the context of a round.

        Raises, at its begin:
            BadInput: there is no room.
            Closed, Timeout, PeerLost, Aborted: the Window is closed, or has failed.
        """
        rounds = self._rounds
        if self._nbytes > rounds.half_bytes:
            need = 2 * -(-(self._nbytes + agreement.BYTES) // _UNIT) * _UNIT
            raise BadInput("nbytes", rounds.window.nbytes, f"at least {need} for this {self._sizes.operator}")
        return rounds.window._call(1)

    def begin(self) -> int:
        """Number the round; return its half of the memory."""
        rounds, numbers = self._rounds, self._rounds.numbers
        numbers.made += 1
        half = numbers.made % 2
        self._header[agreement.FAILED], self._header[agreement.OF] = numbers.failed, numbers.of
        self._headers = rounds.headers[half]
        self._headers[rounds.rank][:] = self._header
        self._pending = [*self._peers]
        self._errors: list[tuple[int, Mismatch]] = []
        return half

    def signal_all(self) -> None:
        """Tell all peers that everything they read is published."""
        for rank in self._peers:
            self._rounds.handle.signal(rank, self._rounds.rank, 1)

    def arrived(self, *, all_of_them: bool = False) -> list[int]:
        """Return peers whose calls are the same, and that have signaled since; none: all have come.

        When none has, wait for the next of the rotation.  Peers whose calls differ are waited for and left out.

        Args:
            all_of_them: wait for all peers.

        Raises:
            Mismatch: all peers have come, and a call differs; the first such rank.  Raised on all ranks.
        """
        rounds, found = self._rounds, list[int]()
        handle, wanted = rounds.handle, rounds.signaled
        while self._pending and (all_of_them or not found):
            come = []
            for rank in self._pending:
                if handle.signal_value(rank) > wanted[rank]:
                    come.append(rank)
            if not come:
                come = self._pending[:1]
                if not handle.wait(come[0], wanted[come[0]] + 1, come[0]):
                    rounds.window._raise_failure()
            for rank in come:
                self._pending.remove(rank)
                wanted[rank] += 1
                theirs = self._headers[rank][:]
                error = None
                if theirs != self._header:
                    error = agreement.difference(self._sizes, self._header, theirs, rank)
                if error is None:
                    found.append(rank)
                else:
                    self._errors.append((rank, error))
        if self._errors and not self._pending and (all_of_them or not found):
            errors, self._errors = self._errors, []
            raise min(errors, key=lambda found: found[0])[1]
        return found

    def end(self) -> None:
        """End the round: peers have all that they wait for, and this rank has theirs."""
        self._rounds.window.turn.made += 1


def half_bytes(nbytes: int) -> int:
    """Bytes that a call can publish in a Window of `nbytes`."""
    return max(nbytes // 2 // _UNIT * _UNIT - agreement.BYTES, 0)
