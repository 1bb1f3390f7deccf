"""Checks of the arguments of each operator, and the sizes that follow from them.

The checks read shapes and dtypes alone, so that fake kernels run them too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from moecomm.errors import BadInput
from moecomm.fused.fp8 import Fp8

DTYPES = (torch.bfloat16, torch.float16)  # of matrices
TABLE_DTYPES = (torch.float32, *DTYPES)  # of embedding tables
FP8, OF_FP8 = torch.float8_e4m3fn, torch.bfloat16  # matrices with scales, and the dtype of their product
GROUP = 128  # columns, and of weights rows, that share a scale

Matrix = torch.Tensor | Fp8


class Sizes(NamedTuple):
    """Sizes of a call.

    Attributes:
        operator: its name.
        dtype: of the result.
        dims: every size, by the name that the operator's docstring has for it.
        agreed: names of those that must be the same on all ranks.
        result: shape of the result.
        fp8: the matrices are float8_e4m3fn with scales.
        gradient: the backward pass of the call has a round, which all ranks make or none; None: not known.
    """

    operator: str
    dtype: torch.dtype
    dims: dict[str, int]
    agreed: tuple[str, ...]
    result: tuple[int, ...]
    fp8: bool = False
    gradient: bool | None = None

    @property
    def given(self) -> torch.dtype:
        """Dtype of the matrices or tables."""
        return FP8 if self.fp8 else self.dtype

    def bytes_of(self, *names: str) -> int:
        """Bytes of a tensor of the result's dtype with these sizes."""
        return math.prod(self.dims[name] for name in names) * self.dtype.itemsize


def all_gather_matmul(ranks: int, x: Matrix, w: Matrix) -> Sizes:
    """Check x `[M, K]` and w `[N, K]`.  Raises BadInput."""
    (m, k), (n, _), dtype, fp8 = _matrices(x, "[M, K]", w, "[N, K]")
    return Sizes("all_gather_matmul", dtype, {"M": m, "N": n, "K": k}, ("M", "K"), (ranks * m, n), fp8)


def matmul_reduce_scatter(ranks: int, x: Matrix, w: Matrix) -> Sizes:
    """Check x `[M, K]`, with M a multiple of `ranks`, and w `[N, K]`.  Raises BadInput."""
    (m, k), (n, _), dtype, fp8 = _matrices(x, "[M, K]", w, "[N, K]")
    if m % ranks:
        raise BadInput("x", f"{m} rows", f"a multiple of {ranks}, the number of ranks")
    return Sizes("matmul_reduce_scatter", dtype, {"M": m, "N": n, "K": k}, ("M", "N"), (m // ranks, n), fp8)


def matmul_all_reduce(ranks: int, x: Matrix, w: Matrix) -> Sizes:
    """Check x `[M, K]` and w `[N, K]`.  Raises BadInput."""
    (m, k), (n, _), dtype, fp8 = _matrices(x, "[M, K]", w, "[N, K]")
    return Sizes("matmul_all_reduce", dtype, {"M": m, "N": n, "K": k}, ("M", "N"), (m, n), fp8)


def matmul_all_to_all(ranks: int, x: Matrix, w: Matrix) -> Sizes:
    """Check x `[E, R, C, K]` and w `[E, N, K]`.  Raises BadInput."""
    (e, r, c, k), (experts, n, _), dtype, fp8 = _matrices(x, "[E, R, C, K]", w, "[E, N, K]")
    if r != ranks:
        raise BadInput("x", f"{r} ranks", f"[E, {ranks}, C, K] on {ranks} ranks")
    if experts != e:
        raise BadInput("w", f"{experts} experts", f"{e}, as x has")
    dims = {"E": e, "C": c, "N": n, "K": k}
    return Sizes("matmul_all_to_all", dtype, dims, ("E", "C", "N"), (ranks, e, c, n), fp8)


def embedding_all_to_all(
    ranks: int, tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None
) -> Sizes:
    """Check tables `[T, V, D]` and indices `[T, R*B, L]`, or `[total]` with offsets `[T*R*B + 1]`.  Raises BadInput."""
    _check("tables", tables, "[T, V, D]", TABLE_DTYPES)
    t, v, d = tables.shape
    if offsets is None:
        _check("indices", indices, "[T, R*B, L]", (torch.int64,))
        if indices.shape[0] != t:
            raise BadInput("indices", f"{indices.shape[0]} tables", f"{t}, as tables has")
        batch = indices.shape[1]
    else:
        _check("indices", indices, "[total]", (torch.int64,))
        _check("offsets", offsets, "[T*R*B + 1]", (torch.int64,))
        bags = offsets.shape[0] - 1
        if bags < 0 or (bags % t if t else bags):
            raise BadInput("offsets", f"{bags + 1} offsets", f"1 more than a multiple of the {t} tables")
        batch = bags // t if t else 0
    if batch % ranks:
        argument = "indices" if offsets is None else "offsets"
        raise BadInput(argument, f"a batch of {batch}", f"a multiple of {ranks}, the number of ranks")
    dims = {"T": t, "B": batch // ranks, "D": d, "V": v}
    result = (ranks, t, batch // ranks, d)
    return Sizes("embedding_all_to_all", tables.dtype, dims, ("T", "B", "D"), result)


def all_to_all(ranks: int, x: torch.Tensor) -> Sizes:
    """Check x `[R, ...]`, whose part q goes to rank q.  Raises BadInput."""
    if x.ndim == 0 or x.shape[0] != ranks or x.dtype not in TABLE_DTYPES:
        raise BadInput("x", f"{x.dtype} {tuple(x.shape)}", f"[{ranks}, ...] of {' or '.join(map(str, TABLE_DTYPES))}")
    part = math.prod(x.shape[1:])
    return Sizes("all_to_all", x.dtype, {"R": ranks, "part": part}, ("part",), tuple(x.shape))


def _check(argument: str, tensor: torch.Tensor, shape: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    if tensor.ndim != shape.count(",") + 1:
        raise BadInput(argument, f"shape {tuple(tensor.shape)}", shape)
    if tensor.dtype not in dtypes:
        more = " and no scales" if tensor.dtype == FP8 else ""
        raise BadInput(argument, f"{tensor.dtype}{more}", " or ".join(map(str, dtypes)))


def _matrices(x: Matrix, x_shape: str, w: Matrix, w_shape: str) -> tuple[torch.Size, torch.Size, torch.dtype, bool]:
    """Check x and w.  Return their shapes, the dtype of the product, and whether they have scales."""
    if isinstance(x, Fp8) and isinstance(w, Fp8):
        _check("x", x.data, x_shape, (FP8,))
        _check("w", w.data, w_shape, (FP8,))
        *rows, k = x.data.shape
        if k % GROUP:
            raise BadInput("x", f"{k} columns", f"a multiple of {GROUP} in FP8")
        *experts, n, of_w = w.data.shape
        _check_scales("x", x.scales, (*rows, k // GROUP))
        _check_scales("w", w.scales, (*experts, -(-n // GROUP), of_w // GROUP))
        shapes, dtype = (x.data.shape, w.data.shape), OF_FP8
    elif isinstance(x, Fp8) or isinstance(w, Fp8):
        raise BadInput("w" if isinstance(x, Fp8) else "x", "no scales", "values and scales: the other matrix has some")
    else:
        _check("x", x, x_shape)
        _check("w", w, w_shape, (x.dtype,))
        shapes, dtype = (x.shape, w.shape), x.dtype
    if shapes[1][-1] != shapes[0][-1]:
        raise BadInput("w", f"{shapes[1][-1]} columns", f"{shapes[0][-1]}, as x has")
    return *shapes, dtype, isinstance(x, Fp8)


def _check_scales(argument: str, scales: torch.Tensor, shape: tuple[int, ...]) -> None:
    if scales.shape != shape or scales.dtype != torch.float32:
        raise BadInput(argument, f"scales {tuple(scales.shape)} of {scales.dtype}", f"{shape} of torch.float32")
