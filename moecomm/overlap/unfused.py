"""The operators without fusion, on GPUs: a product of torch and an exchange, one after the other.

Exchanges are copies through the Window, except an all-reduce of at most a few MB, which is a kernel (all_reduce.cuh).

Each exchange by copies has two barriers: before peers read a rank's memory, and after they have read it.  Every call, a
fused one too, ends its use of the memory so, which is why none comes first.  A graph can capture it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from moecomm.errors import BadInput
from moecomm.fused.fp8 import Fp8
from moecomm.overlap import bags, sizes
from moecomm.overlap.products import product, sum_in_order
from moecomm.overlap.sizes import Matrix
from moecomm.window import Window

_ONE_SHOT_BYTES = 256 << 10  # up to this size an all-reduce reads whole tensors, in one exchange instead of two


class UnfusedExecutor:
    """See moecomm.overlap.executors.Executor.

    Args:
        window: of all ranks; CPU ranks will do as well.
        staging: bytes of its memory that copies use, from a multiple of 16 on.
        all_reduce: see moecomm.overlap.executors.FusedOperators; None: there is none.
    """

    def __init__(
        self,
        window: Window,
        staging: range,
        all_reduce: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        self._window, self._staging, self._all_reduce = window, staging, all_reduce
        self._rank, self._ranks = window.rank, window.num_ranks

    def all_gather_matmul(self, x: Matrix, w: Matrix, gather: bool) -> tuple[torch.Tensor, Matrix | None]:
        """See Executor."""
        whole = [of.flatten(0, 1) for of in self._all_gather(*(x if isinstance(x, Fp8) else (x,)))]
        gathered = Fp8(*whole) if isinstance(x, Fp8) else whole[0]
        return product(gathered, w), gathered if gather else None

    def matmul_reduce_scatter(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """See Executor."""
        call = sizes.matmul_reduce_scatter(self._ranks, x, w)
        return sum_in_order(self.all_to_all(product(x, w).view(self._ranks, *call.result)))

    def matmul_all_reduce(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """See Executor."""
        mine = product(x, w)
        if self._all_reduce is not None and (found := self._all_reduce(mine)) is not None:
            return found
        if mine.nbytes <= _ONE_SHOT_BYTES:
            return sum_in_order(self._all_gather(mine)[0])
        flat = mine.flatten()
        part = -(-len(flat) // self._ranks)
        padded = torch.nn.functional.pad(flat, (0, part * self._ranks - len(flat)))
        reduced = sum_in_order(self.all_to_all(padded.view(self._ranks, part)))
        return self._all_gather(reduced)[0].flatten()[: len(flat)].view_as(mine).clone()

    def matmul_all_to_all(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """See Executor."""
        ranks, experts, rows, columns = sizes.matmul_all_to_all(self._ranks, x, w).result
        flat = Fp8(*(of.flatten(1, 2) for of in x)) if isinstance(x, Fp8) else x.flatten(1, 2)
        y = product(flat, w).view(experts, ranks, rows, columns)
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
        self._exchange([x], [out], self._rank * x[0].nbytes)
        return out

    def _all_gather(self, *mine: torch.Tensor) -> list[torch.Tensor]:
        """Return each tensor of all ranks, `[R, ...]`."""
        found = [x.new_empty((self._ranks, *x.shape)) for x in mine]
        self._exchange(mine, found, 0)
        return found

    def _exchange(self, mine: Sequence[torch.Tensor], found: Sequence[torch.Tensor], offset: int) -> None:
        """Publish tensors, one behind the other; read `found[i][rank]` from byte `offset` of tensor i of each rank."""
        if self._ranks == 1:
            for x, of in zip(mine, found, strict=True):
                of.view(x.shape).copy_(x)
            return
        ends = list(itertools.accumulate(x.nbytes for x in mine))
        if (more := ends[-1] - len(self._staging)) > 0:
            raise BadInput("nbytes", self._window.nbytes, f"at least {self._window.nbytes + more} for these sizes")
        window = self._window
        begins = [self._staging.start + end - x.nbytes for x, end in zip(mine, ends, strict=True)]
        for x, begin in zip(mine, begins, strict=True):
            window.tensor(x.shape, x.dtype, offset=begin).copy_(x)
        window.barrier()
        for step in range(self._ranks):
            rank = (self._rank + step) % self._ranks
            for of, begin in zip(found, begins, strict=True):
                of[rank].copy_(window.tensor(of[rank].shape, of.dtype, rank=rank, offset=begin + offset))
        window.barrier()
