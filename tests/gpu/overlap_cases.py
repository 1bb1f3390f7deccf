"""Fused operators on GPUs: the calls of test_overlap.py, and what they must return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moecomm.fused import Fp8
from moecomm.overlap.gpu import GpuExecutor
from moecomm.overlap.reference import in_float64
from moecomm.overlap.sizes import FP8
from moecomm.overlap.unfused import UnfusedExecutor
from moecomm_bench import operator_cases


@dataclass(frozen=True)
class Case:
    """A call.  `first`, `second`: sizes of x of a rank and of w, or of tables and indices.  FP8: with scales."""

    operator: str
    first: tuple[int, ...]
    second: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def empty(self) -> tuple[Any, Any]:
        """Return tensors of these sizes on the CPU, with any values."""
        return operator_cases.empty(self.operator, self.first, self.second, self.dtype)

    def inputs(self, rank: int, turn: int, device: str) -> tuple[Any, Any]:
        """Small whole numbers, and powers of two: float32 sums are exact in any order, so bits are compared."""
        g = torch.Generator().manual_seed(1000 * turn + rank)
        first = torch.randint(-3, 4, self.first, generator=g).to(self.dtype)
        if self.dtype == FP8:
            values = first, torch.randint(-1, 2, self.second, generator=g).to(FP8)
            shapes = [scales.shape for _, scales in self.empty()]
            scales = [torch.exp2(torch.randint(-2, 3, shape, generator=g).float()) for shape in shapes]
            x, w = (Fp8(data.to(device), of.to(device)) for data, of in zip(values, scales, strict=True))
            return x, w
        if self.operator == "embedding_all_to_all":
            return first.to(device), torch.randint(-1, self.first[1], self.second, generator=g).to(device)
        return first.to(device), torch.randint(-1, 2, self.second, generator=g).to(self.dtype).to(device)

    def call(
        self, executor: GpuExecutor | UnfusedExecutor, first: Any, second: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Enqueue it.  Gathered rows, and in FP8 their scales, are returned beside the product."""
        if self.operator == "all_gather_matmul":
            y, gathered = executor.all_gather_matmul(first, second, True)
            return (y, *gathered) if isinstance(gathered, Fp8) else (y, gathered)
        if self.operator == "embedding_all_to_all":
            return executor.embedding_all_to_all(first, second, None)
        result: torch.Tensor = getattr(executor, self.operator)(first, second)
        return result

    def wanted(self, rank: int, inputs: Sequence[tuple[Any, Any]]) -> Any:
        """Return the result of a rank from the inputs of all."""
        ranks = len(inputs)
        if self.dtype == FP8:
            wide = replace(self, dtype=torch.bfloat16)
            found = wide.wanted(rank, [in_float64(x, w) for x, w in inputs])
            if self.operator != "all_gather_matmul":
                return found
            return found[0], *(torch.cat(parts) for parts in zip(*(x for x, _ in inputs), strict=True))
        if self.operator == "all_gather_matmul":
            rows = torch.cat([x for x, _ in inputs])
            return self._product(rows, inputs[rank][1]), rows
        if self.operator == "matmul_all_to_all":
            return torch.stack([self._product(x[:, rank], w) for x, w in inputs])
        if self.operator == "embedding_all_to_all":
            return torch.stack([_bags(tables, of.chunk(ranks, dim=1)[rank]) for tables, of in inputs])
        total = torch.zeros(len(inputs[0][0]), len(inputs[0][1]), device=inputs[0][0].device)
        for x, w in inputs:
            total += self._product(x, w).float()
        return (
            total.to(self.dtype).chunk(ranks)[rank]
            if self.operator == "matmul_reduce_scatter"
            else total.to(self.dtype)
        )

    def _product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.double() @ w.double().mT).to(self.dtype)


def same(found: Any, wanted: Any) -> bool:
    """Return whether results have these bits."""
    pairs = zip(*(of if isinstance(of, tuple) else (of,) for of in (found, wanted)), strict=True)
    return all(torch.equal(got.view(torch.uint8), want.view(torch.uint8)) for got, want in pairs)


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
        Case("all_gather_matmul", (1024 // ranks, 1024), (1024, 1024), FP8),
        Case("all_gather_matmul", (301, 384), (1096, 384), FP8),
        Case("all_gather_matmul", (1, 128), (8, 128), FP8),
        Case("all_gather_matmul", (1024, 2048), (4096, 2048), FP8),
        Case("matmul_reduce_scatter", (512 * ranks, 1024), (2048, 1024), fp16),
        Case("matmul_reduce_scatter", (100 * ranks, 264), (1096, 264)),
        Case("matmul_reduce_scatter", (1024 * ranks, 2048), (4096, 2048)),
        Case("matmul_reduce_scatter", (101 * ranks, 384), (1096, 384), FP8),
        Case("matmul_reduce_scatter", (1024 * ranks, 2048), (4096, 2048), FP8),
        Case("matmul_all_reduce", (1500, 1032), (2056, 1032), fp16),
        Case("matmul_all_reduce", (40, 512), (1024, 512)),
        Case("matmul_all_reduce", (17, 64), (8, 64)),  # split over more blocks than it has steps
        Case("matmul_all_reduce", (100, 4096), (2056, 4096)),
        Case("matmul_all_reduce", (128, 3584), (8192, 3584), fp16),
        Case("matmul_all_reduce", (4096, 1024), (4096, 1024)),
        Case("matmul_all_reduce", (1, 4096), (8192, 4096), fp16),
        Case("matmul_all_reduce", (13, 1032), (1096, 1032)),
        Case("matmul_all_reduce", (1500, 1024), (2056, 1024), FP8),
        Case("matmul_all_reduce", (3, 128), (1096, 128), FP8),
        Case("matmul_all_reduce", (4096, 1024), (4096, 1024), FP8),
        Case("matmul_all_to_all", (1, ranks, 1024, 1024), (1, 2048, 1024), fp16),
        Case("matmul_all_to_all", (5, ranks, 100, 264), (5, 1096, 264)),
        Case("matmul_all_to_all", (1, ranks, 1024, 1024), (1, 2048, 1024), FP8),
        Case("matmul_all_to_all", (5, ranks, 101, 384), (5, 1096, 384), FP8),
        Case("embedding_all_to_all", (3, 1000, 128), (3, 512 * ranks, 20), torch.float32),
        Case("embedding_all_to_all", (5, 777, 40), (5, 33 * ranks, 7)),
        Case("embedding_all_to_all", (2, 100, 520), (2, 100 * ranks, 1), fp16),
    ]


def exact_cases(ranks: int) -> list[Case]:
    """Cases whose sums over up to four ranks have no rounding, so that NCCL's order does not matter."""
    without = [case for case in cases(ranks) if case.operator not in ("matmul_reduce_scatter", "matmul_all_reduce")]
    fp16 = torch.float16
    return [
        *without,
        Case("matmul_reduce_scatter", (100 * ranks, 128), (1096, 128), fp16),
        Case("matmul_all_reduce", (3, 128), (1096, 128), fp16),
        Case("matmul_all_reduce", (1500, 128), (2056, 128), fp16),
    ]
