"""The operators on CPU ranks: plain torch for each piece, this rank's first, then those of peers as they arrive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from moecomm.fused.fp8 import Fp8
from moecomm.overlap import bags, sizes
from moecomm.overlap.host_rounds import HostRounds
from moecomm.overlap.products import multiply, sum_in_order, wide_rows, wide_weights
from moecomm.overlap.sizes import Matrix
from moecomm.window import Window


class HostExecutor:
    """See moecomm.overlap.executors.Executor."""

    def __init__(self, window: Window) -> None:
        self.rounds = HostRounds(window)
        self._rank, self._ranks = window.rank, window.num_ranks

    def all_gather_matmul(self, x: Matrix, w: Matrix, gather: bool) -> tuple[torch.Tensor, Matrix | None]:
        """See Executor."""
        call = sizes.all_gather_matmul(self._ranks, x, w)
        mine = x if isinstance(x, Fp8) else (x,)
        rows, y, wide = call.dims["M"], mine[0].new_empty(call.result, dtype=call.dtype), wide_weights(w)
        gathered = [of.new_empty((self._ranks, *of.shape)) for of in mine] if gather else []

        def compute(rank: int, piece: Sequence[torch.Tensor]) -> None:
            wide_x = wide_rows(Fp8(*piece) if call.fp8 else piece[0])
            y[rank * rows : (rank + 1) * rows] = multiply(wide_x, wide, call.dtype)
            for to, of in zip(gathered, piece, strict=False):
                to[rank] = of

        with self.rounds.begin(call, sum(of.nbytes for of in mine)) as now:
            for to, of in zip(now.published_like(self._rank, mine), mine, strict=True):
                to.copy_(of)
            now.signal_all()
            compute(self._rank, mine)
            for rank in now.arrivals():
                compute(rank, now.published_like(rank, mine))
            now.raise_mismatch()
        whole = [of.flatten(0, 1) for of in gathered]
        return y, None if not gather else Fp8(*whole) if call.fp8 else whole[0]

    def matmul_reduce_scatter(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """See Executor."""
        call = sizes.matmul_reduce_scatter(self._ranks, x, w)
        shards, wide = wide_rows(x).view(self._ranks, call.result[0], call.dims["K"]), wide_weights(w)
        return sum_in_order(self._exchanged(call, call.result, lambda rank: multiply(shards[rank], wide, call.dtype)))

    def matmul_all_reduce(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """See Executor."""
        call = sizes.matmul_all_reduce(self._ranks, x, w)
        with self.rounds.begin(call, call.bytes_of("M", "N")) as now:
            now.published(self._rank, call.result).copy_(multiply(wide_rows(x), wide_weights(w), call.dtype))
            now.signal_all()
            now.wait_for_all()
            return sum_in_order(now.published(rank, call.result) for rank in range(self._ranks))

    def matmul_all_to_all(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """See Executor."""
        call = sizes.matmul_all_to_all(self._ranks, x, w)
        rows, wide = wide_rows(x), wide_weights(w)

        def part(rank: int) -> torch.Tensor:
            return multiply(rows[:, rank], wide, call.dtype)

        return torch.stack(self._exchanged(call, call.result[1:], part))

    def embedding_all_to_all(
        self, tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        """See Executor.  Raises BadInput for values of indices and offsets that are none."""
        call = sizes.embedding_all_to_all(self._ranks, tables, indices, offsets)
        bags.check_values(indices, offsets, tables.shape[1])
        batch = call.dims["B"]
        everybody = bags.sums(tables, indices, offsets, self._ranks * batch)

        def part(rank: int) -> torch.Tensor:
            return everybody[:, rank * batch : (rank + 1) * batch]

        return torch.stack(self._exchanged(call, call.result[1:], part))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        return torch.stack(self._exchanged(sizes.all_to_all(self._ranks, x), x.shape[1:], lambda rank: x[rank]))

    def _exchanged(
        self, call: sizes.Sizes, shape: Sequence[int], part: Callable[[int], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Send `part(rank)` of this shape to each rank; return the parts from all ranks, in memory of this round.

        Parts for peers come first, in rotation, so that peers can go on.
        """
        whole = (self._ranks, *shape)
        with self.rounds.begin(call, math.prod(whole) * call.dtype.itemsize) as now:
            mine = now.published(self._rank, whole)
            for step in range(1, self._ranks):
                peer = (self._rank + step) % self._ranks
                mine[peer] = part(peer)
                now.signal(peer)
            mine[self._rank] = part(self._rank)
            now.wait_for_all()
            return [now.published(rank, whole)[self._rank] for rank in range(self._ranks)]
