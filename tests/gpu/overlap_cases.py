"""Fused operators on GPUs: the calls of test_overlap.py, and what they must return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moecomm.overlap.gpu import GpuExecutor


@dataclass(frozen=True)
class Case:
    """A call.  `sizes`: of x of a rank and w, or of tables and indices."""

    operator: str
    first: tuple[int, ...]
    second: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, rank: int, turn: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Small whole numbers: float32 sums are exact in any order, so bits are compared."""
        g = torch.Generator().manual_seed(1000 * turn + rank)
        first = torch.randint(-3, 4, self.first, generator=g).to(self.dtype)
        if self.operator == "embedding_all_to_all":
            return first.to(device), torch.randint(-1, self.first[1], self.second, generator=g).to(device)
        return first.to(device), torch.randint(-1, 2, self.second, generator=g).to(self.dtype).to(device)

    def call(self, executor: GpuExecutor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Enqueue it."""
        if self.operator == "all_gather_matmul":
            return executor.all_gather_matmul(first, second, True)[0]
        if self.operator == "embedding_all_to_all":
            return executor.embedding_all_to_all(first, second, None)
        result: torch.Tensor = getattr(executor, self.operator)(first, second)
        return result

    def wanted(self, rank: int, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return the result of a rank from the inputs of all."""
        ranks = len(inputs)
        if self.operator == "all_gather_matmul":
            return _product(torch.cat([x for x, _ in inputs]), inputs[rank][1])
        if self.operator == "matmul_all_to_all":
            return torch.stack([_product(x[:, rank], w) for x, w in inputs])
        if self.operator == "embedding_all_to_all":
            return torch.stack([_bags(tables, of.chunk(ranks, dim=1)[rank]) for tables, of in inputs])
        total = torch.zeros(len(inputs[0][0]), len(inputs[0][1]), device=inputs[0][0].device)
        for x, w in inputs:
            total += _product(x, w).float()
        return (
            total.to(self.dtype).chunk(ranks)[rank]
            if self.operator == "matmul_reduce_scatter"
            else total.to(self.dtype)
        )


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.double() @ w.double().mT).to(x.dtype)


def _bags(tables: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    rows = [table.double()[of.clamp(min=0)] * (of >= 0)[..., None] for table, of in zip(tables, indices, strict=True)]
    return torch.stack([row.sum(dim=-2) for row in rows]).to(tables.dtype)


def cases(ranks: int) -> list[Case]:
    """Return the cases for so many ranks."""
    fp16 = torch.float16
    return [
        Case("all_gather_matmul", (1024 // ranks, 1024), (1024, 1024), fp16),
        Case("all_gather_matmul", (300, 520), (1096, 520)),
        Case("all_gather_matmul", (1, 64), (8, 64)),
        Case("all_gather_matmul", (1024, 2048), (4096, 2048)),
        Case("matmul_reduce_scatter", (512 * ranks, 1024), (2048, 1024), fp16),
        Case("matmul_reduce_scatter", (100 * ranks, 264), (1096, 264)),
        Case("matmul_reduce_scatter", (1024 * ranks, 2048), (4096, 2048)),
        Case("matmul_all_reduce", (1500, 1032), (2056, 1032), fp16),
        Case("matmul_all_reduce", (40, 512), (1024, 512)),
        Case("matmul_all_reduce", (4096, 1024), (4096, 1024)),
        Case("matmul_all_reduce", (1, 4096), (8192, 4096), fp16),
        Case("matmul_all_reduce", (13, 1032), (1096, 1032)),
        Case("matmul_all_to_all", (1, ranks, 1024, 1024), (1, 2048, 1024), fp16),
        Case("matmul_all_to_all", (5, ranks, 100, 264), (5, 1096, 264)),
        Case("embedding_all_to_all", (3, 1000, 128), (3, 512 * ranks, 20), torch.float32),
        Case("embedding_all_to_all", (5, 777, 40), (5, 33 * ranks, 7)),
        Case("embedding_all_to_all", (2, 100, 520), (2, 100 * ranks, 1), fp16),
    ]
