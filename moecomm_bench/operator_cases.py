"""Sizes at which `moecomm bench overlap` measures the fused operators."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from moecomm.dispatch.reference import quantize
from moecomm.fused.fp8 import Fp8, quantize_weights
from moecomm.overlap.sizes import FP8, GROUP, Matrix

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": FP8}


@dataclass(frozen=True)
class OperatorCase:
    """A call of an operator on every rank.

    Attributes:
        operator: name of the method of the executor.
        name: of the case.
        dtype: of the matrices or tables, a name of DTYPES; fp8 has scales.
        shapes: of x and w; of an embedding, of the tables and indices.
    """

    operator: str
    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def flops(self) -> int:
        """Floating-point operations of the product on one rank, of all rows that it computes; 0 for an embedding."""
        x, w = self.shapes
        return 0 if self.operator == "embedding_all_to_all" else 2 * math.prod(x) * w[-2]

    def empty(self) -> tuple[Matrix, Matrix]:
        """Return tensors of the two shapes on the CPU, with any values."""
        return empty(self.operator, *self.shapes, DTYPES[self.dtype])

    def inputs(self, device: torch.device, rank: int) -> tuple[Matrix, Matrix]:
        """Return random tensors of the two shapes."""
        if self.dtype == "fp8":
            x, w = replace(self, dtype="bf16").inputs(device, rank)
            assert isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor)
            data, scales = quantize(x.flatten(0, -2))
            return Fp8(data.view(x.shape), scales.view(*x.shape[:-1], -1)), quantize_weights(w)
        g = torch.Generator(device=device).manual_seed(rank)
        dtype, (first, second) = DTYPES[self.dtype], self.shapes
        x = torch.empty(first, dtype=dtype, device=device).normal_(generator=g)
        if self.operator == "embedding_all_to_all":
            return x, torch.randint(first[1], second, device=device, generator=g)
        return x, torch.empty(second, dtype=dtype, device=device).normal_(std=second[-1] ** -0.5, generator=g)


def empty(operator: str, x: tuple[int, ...], w: tuple[int, ...], dtype: torch.dtype) -> tuple[Matrix, Matrix]:
    """Return what an operator takes, of these shapes, on the CPU, with any values."""
    if operator == "embedding_all_to_all":
        return torch.empty(x, dtype=dtype), torch.empty(w, dtype=torch.int64)
    if dtype != FP8:
        return torch.empty(x, dtype=dtype), torch.empty(w, dtype=dtype)
    of_x, of_w = (*x[:-1], x[-1] // GROUP), (*w[:-2], -(-w[-2] // GROUP), w[-1] // GROUP)
    return Fp8(torch.empty(x, dtype=FP8), torch.empty(of_x)), Fp8(torch.empty(w, dtype=FP8), torch.empty(of_w))


def cases(operator: str, ranks: int) -> list[OperatorCase]:
    """Return the cases of an operator: in FP8, those of products with many rows again."""
    found = [OperatorCase(operator, name, dtype, shapes) for name, dtype, shapes in _CASES[operator](ranks)]
    if operator == "embedding_all_to_all":
        return found
    return found + [replace(case, dtype="fp8") for case in found if math.prod(case.shapes[0][:-1]) > _FEW]


_Sizes = list[tuple[str, str, tuple[tuple[int, ...], tuple[int, ...]]]]
_TOKENS = (2048, 8192)
_FEW = 16  # rows
# hidden and feed-forward columns of Llama 3
_LLAMAS = {"llama-70b": (8192, 28672), "llama-405b": (16384, 53248)}


def _gathers(ranks: int) -> _Sizes:
    squares: _Sizes = [(f"{n}^3", "fp16", ((n // ranks, n), (n, n))) for n in (1024, 2048, 4096, 8192)]
    return squares + [
        (f"{name} gate+up, {tokens}", "bf16", ((tokens // ranks, hidden), (2 * inner // ranks, hidden)))
        for name, (hidden, inner) in _LLAMAS.items()
        for tokens in _TOKENS
    ]


def _scatters(ranks: int) -> _Sizes:
    return [
        (f"{name} {what}, {tokens}", "bf16", ((tokens, depth // ranks), (hidden, depth // ranks)))
        for name, (hidden, inner) in _LLAMAS.items()
        for what, depth in (("out", hidden), ("down", inner))
        for tokens in _TOKENS
    ]


def _reductions(ranks: int) -> _Sizes:
    few: _Sizes = [
        (f"{n} x {k}, batch {batch}", "bf16", ((batch, k // ranks), (n, k // ranks)))
        for n, k in ((4096, 4096), (8192, 8192), (8192, 28672), (16384, 16384))
        for batch in (1, 4, 16)
    ]
    many: _Sizes = [
        (f"{name} down, {rows}", "bf16", ((rows, inner // ranks), (hidden, inner // ranks)))
        for name, hidden, inner in (("llama-8b", 4096, 14336), ("llama-70b", 8192, 28672))
        for rows in (32, 64, 128, 256, 512, 1024)
    ]
    return [*few, *many, ("8192 x 8192 x 3584", "fp16", ((8192, 3584), (8192, 3584)))]


def _experts(ranks: int) -> _Sizes:
    sizes = ((1, 4096, 4096, 4096), (1, 8192, 7168, 2048), (8, 8192, 7168, 2048), (1, 8192, 4096, 14336))
    return [
        (
            f"{experts} experts, {rows} x {columns} x {depth}",
            "bf16",
            ((experts, ranks, rows // ranks // experts, depth), (experts, columns, depth)),
        )
        for experts, rows, columns, depth in sizes
    ]


def _embeddings(ranks: int) -> _Sizes:
    sizes = ((16, 128, 8192, 32), (16, 256, 4096, 64), (16, 128, 8192, 1), (64, 64, 8192, 4))
    return [
        (
            f"{tables} tables x {columns}, batch {batch}, pooling {pooling}",
            dtype,
            ((tables, 100_000, columns), (tables, batch, pooling)),
        )
        for dtype in ("fp32", "bf16")
        for tables, columns, batch, pooling in sizes
    ]


_CASES: dict[str, Any] = {
    "all_gather_matmul": _gathers,
    "matmul_reduce_scatter": _scatters,
    "matmul_all_reduce": _reductions,
    "matmul_all_to_all": _experts,
    "embedding_all_to_all": _embeddings,
}
OPERATORS = tuple(_CASES)
