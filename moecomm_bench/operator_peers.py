"""The fused operators as torch and NCCL have them: a product and a collective, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from moecomm.fused import Fp8, grouped_gemm
from moecomm.overlap.gpu import new_product, values_of
from moecomm.overlap.sizes import FP8, OF_FP8, Matrix
from moecomm_bench.operator_cases import OperatorCase

Call = Callable[[], Any]
Multiply = Callable[[Matrix, Matrix], torch.Tensor]


def alone(case: OperatorCase, x: Matrix, w: Matrix, ranks: int) -> Call:
    """Return the product of this rank without communication, or its lookups."""
    if isinstance(x, Fp8) or isinstance(w, Fp8):
        rows = Fp8(*(of.repeat(ranks, 1) for of in x)) if case.operator == "all_gather_matmul" else x
        return lambda: by_groups(flat(rows), w)
    if case.operator == "embedding_all_to_all":
        return lambda: [embedding_bag(of, table, mode="sum") for table, of in zip(x, w, strict=True)]
    whole = x.repeat(ranks, 1) if case.operator == "all_gather_matmul" else x
    return lambda: by_torch(flat(whole), w)


def nccl(case: OperatorCase, x: Matrix, w: Matrix, group: dist.ProcessGroup) -> Call:
    """Return the operator by collectives of `group`.  FP8: with moecomm's grouped GEMM, which has the same scales."""
    if isinstance(x, Fp8) or isinstance(w, Fp8):
        return _NCCL[case.operator](x, w, group, by_groups)
    if case.operator == "embedding_all_to_all":
        return _lookups(x, w, group)
    return _NCCL[case.operator](x, w, group, by_torch)


def flat(x: Matrix) -> Matrix:
    """Return x with one dimension of rows, or with that of experts before it."""
    if isinstance(x, Fp8):
        return Fp8(*(of.flatten(1, 2) if of.ndim == 4 else of for of in x))
    return x.flatten(1, 2) if x.ndim == 4 else x


def by_torch(x: Matrix, w: Matrix) -> torch.Tensor:
    """Multiply by torch."""
    assert isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor)
    return torch.bmm(x, w.mT) if x.ndim == 3 else torch.mm(x, w.mT)


def by_groups(x: Matrix, w: Matrix) -> torch.Tensor:
    """Multiply FP8 by moecomm's grouped GEMM."""
    assert isinstance(x, Fp8) and isinstance(w, Fp8)
    experts = Fp8(*w) if w.data.ndim == 3 else Fp8(w.data[None], w.scales[None])
    return grouped_gemm(x, experts, _counts(len(experts.data), x.data.shape[-2], x.data.device))


@lru_cache
def _counts(experts: int, rows: int, device: torch.device) -> torch.Tensor:
    return torch.full((experts,), rows, dtype=torch.int32, device=device)


def by_rows(x: Matrix, w: Matrix) -> torch.Tensor:
    """Multiply FP8 by torch._scaled_mm, with a scale for each row of x and of w."""
    assert isinstance(x, Fp8) and isinstance(w, Fp8)
    if x.data.ndim == 3:
        pairs = zip(*x, *w, strict=True)
        return torch.stack([by_rows(Fp8(*of[:2]), Fp8(*of[2:])) for of in pairs])
    made: torch.Tensor = torch._scaled_mm(x.data, w.data.mT, x.scales, w.scales.mT, out_dtype=OF_FP8)
    return made


def _parts(x: Matrix) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, Fp8) else (x,)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that NCCL takes: it has no FP8 on all GPUs."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def _gather(x: Matrix, w: Matrix, group: dist.ProcessGroup, multiply: Multiply) -> Call:
    parts = _parts(x)
    rows = [of.new_empty(group.size() * len(of), of.shape[1]) for of in parts]
    whole = Fp8(*rows) if isinstance(x, Fp8) else rows[0]

    def call() -> torch.Tensor:
        for to, of in zip(rows, parts, strict=True):
            dist.all_gather_into_tensor(_bytes(to), _bytes(of), group=group)
        return multiply(whole, w)

    return call


def _scatter(x: Matrix, w: Matrix, group: dist.ProcessGroup, multiply: Multiply) -> Call:
    out = new_product(x, len(values_of(x)) // group.size(), len(values_of(w)))

    def call() -> torch.Tensor:
        dist.reduce_scatter_tensor(out, multiply(x, w), group=group)
        return out

    return call


def _reduce(x: Matrix, w: Matrix, group: dist.ProcessGroup, multiply: Multiply) -> Call:
    def call() -> torch.Tensor:
        out = multiply(x, w)
        dist.all_reduce(out, group=group)
        return out

    return call


def _experts(x: Matrix, w: Matrix, group: dist.ProcessGroup, multiply: Multiply) -> Call:
    experts, ranks, count, _ = values_of(x).shape
    out = new_product(x, ranks, experts, count, values_of(w).shape[1])
    rows = flat(x)

    def call() -> torch.Tensor:
        made = multiply(rows, w).view(experts, ranks, count, -1).transpose(0, 1).contiguous()
        dist.all_to_all_single(out, made, group=group)
        return out

    return call


def _lookups(tables: torch.Tensor, indices: torch.Tensor, group: dist.ProcessGroup) -> Call:
    (count, _, columns), ranks = tables.shape, group.size()
    batch = indices.shape[1] // ranks
    out = tables.new_empty(ranks, count, batch, columns)

    def call() -> torch.Tensor:
        bags = [embedding_bag(of, table, mode="sum") for table, of in zip(tables, indices, strict=True)]
        made = torch.stack([of.view(ranks, batch, columns) for of in bags], dim=1)
        dist.all_to_all_single(out, made, group=group)
        return out

    return call


_NCCL: dict[str, Callable[[Matrix, Matrix, dist.ProcessGroup, Multiply], Call]] = {
    "all_gather_matmul": _gather,
    "matmul_reduce_scatter": _scatter,
    "matmul_all_reduce": _reduce,
    "matmul_all_to_all": _experts,
}


def of_torch(case: OperatorCase, x: Matrix, w: Matrix, group: dist.ProcessGroup) -> Call | None:
    """Return torch's operator over symmetric memory; None where torch has none.

    FP8: torch._scaled_mm and collectives of `group`.  A scale for each row is less work than one for 128 columns.
    """
    if isinstance(x, Fp8) or isinstance(w, Fp8):
        rows, weights = (Fp8(of.data, of.data.new_ones((*of.data.shape[:-1], 1), dtype=torch.float32)) for of in (x, w))
        return _NCCL[case.operator](rows, weights, group, by_rows)
    return _symmetric_memory(case, x, w, group)


def _symmetric_memory(case: OperatorCase, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> Call | None:
    from torch.distributed import _symmetric_memory as symmetric

    operators = torch.ops.symm_mem
    if case.operator == "all_gather_matmul":
        symmetric.enable_symm_mem_for_group(group.group_name)
        return lambda: operators.fused_all_gather_matmul(x, [w.mT], 0, group.group_name)
    if case.operator == "matmul_reduce_scatter":
        symmetric.enable_symm_mem_for_group(group.group_name)
        return lambda: operators.fused_matmul_reduce_scatter(x, w.mT, "sum", 0, group.group_name)
    if case.operator == "matmul_all_reduce" and 2 * len(x) * len(w) <= 1 << 20:
        staged = symmetric.empty(len(x), len(w), dtype=x.dtype, device=x.device)
        symmetric.rendezvous(staged, group.group_name)

        def call() -> torch.Tensor:
            torch.mm(x, w.mT, out=staged)
            reduced: torch.Tensor = operators.one_shot_all_reduce(staged, "sum", group.group_name)
            return reduced

        return call
    return None
