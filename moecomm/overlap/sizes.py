"""Checks of the arguments of each operator, and the sizes that follow from them.

The checks read shapes and dtypes alone, so that fake kernels run them too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from moecomm.errors import BadInput

DTYPES = (torch.bfloat16, torch.float16)  # of matrices
TABLE_DTYPES = (torch.float32, *DTYPES)  # of embedding tables


class Sizes(NamedTuple):
    """Sizes of a call.

    Attributes:
        operator: its name.
        dtype: of the result.
        dims: every size, by the name that the operator's docstring has for it.
        agreed: names of those that must be the same on all ranks.
        result: shape of the result.
    """

    operator: str
    dtype: torch.dtype
    dims: dict[str, int]
    agreed: tuple[str, ...]
    result: tuple[int, ...]

    def bytes_of(self, *names: str) -> int:
        """Bytes of a tensor of the dtype with these sizes."""
        return math.prod(self.dims[name] for name in names) * self.dtype.itemsize


def all_gather_matmul(ranks: int, x: torch.Tensor, w: torch.Tensor) -> Sizes:
    """Check x `[M, K]` and w `[N, K]`.  Raises BadInput."""
    _check("x", x, "[M, K]")
    _check_weight(w, x, "[N, K]")
    (m, k), n = x.shape, w.shape[0]
    return Sizes("all_gather_matmul", x.dtype, {"M": m, "N": n, "K": k}, ("M", "K"), (ranks * m, n))


def matmul_reduce_scatter(ranks: int, x: torch.Tensor, w: torch.Tensor) -> Sizes:
    """Check x `[M, K]`, with M a multiple of `ranks`, and w `[N, K]`.  Raises BadInput."""
    _check("x", x, "[M, K]")
    _check_weight(w, x, "[N, K]")
    (m, k), n = x.shape, w.shape[0]
    if m % ranks:
        raise BadInput("x", f"{m} rows", f"a multiple of {ranks}, the number of ranks")
    return Sizes("matmul_reduce_scatter", x.dtype, {"M": m, "N": n, "K": k}, ("M", "N"), (m // ranks, n))


def matmul_all_reduce(ranks: int, x: torch.Tensor, w: torch.Tensor) -> Sizes:
    """Check x `[M, K]` and w `[N, K]`.  Raises BadInput."""
    _check("x", x, "[M, K]")
    _check_weight(w, x, "[N, K]")
    (m, k), n = x.shape, w.shape[0]
    return Sizes("matmul_all_reduce", x.dtype, {"M": m, "N": n, "K": k}, ("M", "N"), (m, n))


def matmul_all_to_all(ranks: int, x: torch.Tensor, w: torch.Tensor) -> Sizes:
    """Check x `[E, R, C, K]` and w `[E, N, K]`.  Raises BadInput."""
    _check("x", x, "[E, R, C, K]")
    _check_weight(w, x, "[E, N, K]")
    (e, r, c, k), n = x.shape, w.shape[1]
    if r != ranks:
        raise BadInput("x", f"shape {tuple(x.shape)}", f"[E, {ranks}, C, K] on {ranks} ranks")
    if w.shape[0] != e:
        raise BadInput("w", f"{w.shape[0]} experts", f"{e}, as x has")
    return Sizes("matmul_all_to_all", x.dtype, {"E": e, "C": c, "N": n, "K": k}, ("E", "C", "N"), (ranks, e, c, n))


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
        raise BadInput(argument, str(tensor.dtype), " or ".join(map(str, dtypes)))


def _check_weight(w: torch.Tensor, x: torch.Tensor, shape: str) -> None:
    _check("w", w, shape, (x.dtype,))
    if w.shape[-1] != x.shape[-1]:
        raise BadInput("w", f"{w.shape[-1]} columns", f"{x.shape[-1]}, as x has")
