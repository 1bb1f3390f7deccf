"""The fused operators as torch and NCCL have them: a product and a collective, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from moecomm.bench.operator_cases import Case

Call = Callable[[], Any]


def alone(case: Case, x: torch.Tensor, w: torch.Tensor, ranks: int) -> Call:
    """Return the product of this rank without communication, or its lookups."""
    if case.operator == "embedding_all_to_all":
        return lambda: [embedding_bag(of, table, mode="sum") for table, of in zip(x, w, strict=True)]
    if case.operator == "matmul_all_to_all":
        rows = x.flatten(1, 2)
        return lambda: torch.bmm(rows, w.mT)
    rows = x.repeat(ranks, 1) if case.operator == "all_gather_matmul" else x
    return lambda: torch.mm(rows, w.mT)


def nccl(case: Case, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> Call:
    """Return the operator by collectives of `group`."""
    return _NCCL[case.operator](x, w, group)


def _gather(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> Call:
    rows = x.new_empty(group.size() * len(x), x.shape[1])

    def call() -> torch.Tensor:
        dist.all_gather_into_tensor(rows, x, group=group)
        return torch.mm(rows, w.mT)

    return call


def _scatter(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> Call:
    out = x.new_empty(len(x) // group.size(), len(w))

    def call() -> torch.Tensor:
        dist.reduce_scatter_tensor(out, torch.mm(x, w.mT), group=group)
        return out

    return call


def _reduce(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> Call:
    def call() -> torch.Tensor:
        out = torch.mm(x, w.mT)
        dist.all_reduce(out, group=group)
        return out

    return call


def _experts(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> Call:
    experts, ranks, count, _ = x.shape
    out = x.new_empty(ranks, experts, count, w.shape[1])
    rows = x.flatten(1, 2)

    def call() -> torch.Tensor:
        made = torch.bmm(rows, w.mT).view(experts, ranks, count, -1).transpose(0, 1).contiguous()
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


_NCCL: dict[str, Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], Call]] = {
    "all_gather_matmul": _gather,
    "matmul_reduce_scatter": _scatter,
    "matmul_all_reduce": _reduce,
    "matmul_all_to_all": _experts,
    "embedding_all_to_all": _lookups,
}


def symmetric_memory(case: Case, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> Call | None:
    """Return the operator by torch's symmetric memory; None where torch has none."""
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
