"""The operators on CPU ranks: plain torch for each piece, this rank's first, then those of peers as they arrive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from moecomm.overlap import bags, sizes
from moecomm.overlap.host_rounds import HostRounds
from moecomm.overlap.products import product, sum_in_order
from moecomm.window import Window


class HostExecutor:
    """See moecomm.overlap.executors.Executor."""

    def __init__(self, window: Window) -> None:
        self.rounds = HostRounds(window)
        self._rank, self._ranks = window.rank, window.num_ranks

    def all_gather_matmul(self, x: torch.Tensor, w: torch.Tensor, gather: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See Executor."""
        call = sizes.all_gather_matmul(self._ranks, x, w)
        rows, whole = x.shape[0], (self._ranks, *x.shape)
        y, wide = x.new_empty(call.result), w.float()
        gathered = x.new_empty(whole if gather else 0)

        def compute(rank: int, piece: torch.Tensor) -> None:
            y[rank * rows : (rank + 1) * rows] = product(piece, wide)
            if gather:
                gathered[rank] = piece

        with self.rounds.begin(call, x.nbytes) as now:
            now.published(self._rank, x.shape).copy_(x)
            now.signal_all()
            compute(self._rank, x)
            for rank in now.arrivals():
                compute(rank, now.published(rank, x.shape))
            now.raise_mismatch()
        return y, gathered.flatten(0, 1) if gather else gathered

    def matmul_reduce_scatter(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        call = sizes.matmul_reduce_scatter(self._ranks, x, w)
        shards, wide = x.view(self._ranks, call.result[0], x.shape[1]), w.float()
        return sum_in_order(self._exchanged(call, call.result, lambda rank: product(shards[rank], wide)))

    def matmul_all_reduce(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        call = sizes.matmul_all_reduce(self._ranks, x, w)
        with self.rounds.begin(call, call.bytes_of("M", "N")) as now:
            now.published(self._rank, call.result).copy_(product(x, w))
            now.signal_all()
            now.wait_for_all()
            return sum_in_order(now.published(rank, call.result) for rank in range(self._ranks))

    def matmul_all_to_all(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        call = sizes.matmul_all_to_all(self._ranks, x, w)
        wide = w.float()
        return torch.stack(self._exchanged(call, call.result[1:], lambda rank: product(x[:, rank], wide)))

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
