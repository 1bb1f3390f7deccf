"""The operators without fusion, on GPUs: a product of torch, and copies through the Window, one after the other.

Each exchange has three barriers: before a rank writes to its memory, before peers read it, and after they have read.
It needs nothing of earlier or later calls but that they end their use of the memory on the same stream, and a graph can
capture it.
"""

from __future__ import annotations

import torch

from moecomm.errors import BadInput
from moecomm.overlap import bags, sizes
from moecomm.overlap.products import product, sum_in_order
from moecomm.window import Window

_ONE_SHOT_BYTES = 256 << 10  # up to this size an all-reduce reads whole tensors, in one exchange instead of two


class UnfusedExecutor:
    """See moecomm.overlap.executors.Executor.

    Args:
        window: of all ranks; CPU ranks will do as well.
        staging: bytes of its memory that the exchanges use, from a multiple of 16 on.
    """

    def __init__(self, window: Window, staging: range) -> None:
        self._window, self._staging = window, staging
        self._rank, self._ranks = window.rank, window.num_ranks

    def all_gather_matmul(self, x: torch.Tensor, w: torch.Tensor, gather: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See Executor."""
        gathered = self._all_gather(x).flatten(0, 1)
        return product(gathered, w), gathered if gather else x.new_empty(0)

    def matmul_reduce_scatter(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        call = sizes.matmul_reduce_scatter(self._ranks, x, w)
        return sum_in_order(self.all_to_all(product(x, w).view(self._ranks, *call.result)))

    def matmul_all_reduce(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        mine = product(x, w)
        if mine.nbytes <= _ONE_SHOT_BYTES:
            return sum_in_order(self._all_gather(mine))
        flat = mine.flatten()
        part = -(-len(flat) // self._ranks)
        padded = torch.nn.functional.pad(flat, (0, part * self._ranks - len(flat)))
        reduced = sum_in_order(self.all_to_all(padded.view(self._ranks, part)))
        return self._all_gather(reduced).flatten()[: len(flat)].view_as(mine).clone()

    def matmul_all_to_all(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        experts, ranks, rows, _ = x.shape
        y = product(x.flatten(1, 2), w).view(experts, ranks, rows, w.shape[1])
        return self.all_to_all(y.transpose(0, 1).contiguous())

    def embedding_all_to_all(
        self, tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        """See Executor.  An index of no row counts as -1: reading the values would wait for the GPU."""
        call = sizes.embedding_all_to_all(self._ranks, tables, indices, offsets)
        batch = call.dims["B"]
        everybody = bags.sums(tables, indices, offsets, self._ranks * batch)
        parts = everybody.view(len(tables), self._ranks, batch, tables.shape[2])
        return self.all_to_all(parts.transpose(0, 1).contiguous())

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        out = torch.empty_like(x)
        self._exchange(x, [out[rank] for rank in range(self._ranks)], self._rank * x[0].nbytes)
        return out

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of all ranks, `[R, ...]`."""
        out = x.new_empty((self._ranks, *x.shape))
        self._exchange(x, [out[rank] for rank in range(self._ranks)], 0)
        return out

    def _exchange(self, mine: torch.Tensor, parts: list[torch.Tensor], offset: int) -> None:
        """Publish a tensor; read a part from byte `offset` of what each rank has published."""
        if (more := mine.nbytes - len(self._staging)) > 0:
            raise BadInput("nbytes", self._window.nbytes, f"at least {self._window.nbytes + more} for these sizes")
        window, begin = self._window, self._staging.start
        window.barrier()
        window.tensor(mine.shape, mine.dtype, offset=begin).copy_(mine)
        window.barrier()
        for step in range(self._ranks):
            rank = (self._rank + step) % self._ranks
            parts[rank].copy_(window.tensor(parts[rank].shape, mine.dtype, rank=rank, offset=begin + offset))
        window.barrier()
