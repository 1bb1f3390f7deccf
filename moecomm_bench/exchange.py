"""Dispatch and combine by torch.distributed: all_to_all_single, over NCCL between GPUs, over gloo between CPUs."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property, partial

import torch
import torch.distributed as dist

from moecomm_bench.case import RoundsCase
from moecomm_bench.clock import Timed
from moecomm_bench.ours import Input, Ours

_CPU_BLOCK = 16  # tokens added at once on CPUs, to stay in cache (measured: faster than index_add_ of full tensors)


class TorchExchange:
    """The fastest use of all_to_all_single: rows gathered once, splits known in advance, preallocated buffers.

    Args:
        x: tokens [T, H].
        target: [T, S], the rank that slot s of each token goes to; -1 for none.
        weights: [T, S], or None (all 1).
        group: the ranks.
    """

    def __init__(
        self, x: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None, group: dist.ProcessGroup
    ) -> None:
        self.group, self.x, self.weights = group, x, weights
        ranks, (tokens, slots) = group.size(), target.shape
        entry = target.flatten().argsort(stable=True)[int((target < 0).sum()) :]  # ordered by (rank, token, slot)
        self.token = entry // slots
        sent = torch.bincount(target.flatten()[entry], minlength=ranks)
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent, group=group)
        self.sent, self.arriving = sent.tolist(), arriving.tolist()
        self.outgoing = x.new_empty(len(entry), x.shape[1])
        self.arrived = x.new_empty(sum(self.arriving), x.shape[1])
        self.home = x.new_zeros(len(entry) + 1, x.shape[1])  # empty slots add the last row, zeros
        self.row_of = torch.full((tokens * slots,), len(entry), device=x.device)
        self.row_of[entry] = torch.arange(len(entry), device=x.device)
        self.row_of = self.row_of.view(tokens, slots)

    def dispatch(self) -> torch.Tensor:
        """Return the rows that arrive at this rank."""
        torch.index_select(self.x, 0, self.token, out=self.outgoing)
        self._exchange(self.arrived, self.outgoing, self.arriving, self.sent)
        return self.arrived

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """Return rows to their source ranks and add them, weighted, in float32."""
        self._exchange(self.home[:-1], y, self.sent, self.arriving)
        out = torch.empty_like(self.x)
        block = len(out) if out.is_cuda else _CPU_BLOCK
        for begin in range(0, len(out), block):
            some = slice(begin, begin + block)
            rows = self.row_of[some]
            parts = torch.index_select(self.home, 0, rows.flatten()).view(*rows.shape, -1)
            if self.weights is None:
                out[some] = parts.sum(dim=1, dtype=torch.float32)
            else:
                out[some] = torch.bmm(self.weights[some].unsqueeze(1), parts.float()).squeeze(1)
        return out

    def _exchange(self, out: torch.Tensor, rows: torch.Tensor, out_splits: list[int], splits: list[int]) -> None:
        # Moved as float32, because some versions of gloo lack bfloat16.
        wide = torch.float32
        dist.all_to_all_single(out.view(wide), rows.view(wide), out_splits, splits, group=self.group)


def by_rank(topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """Return [T, R]: every rank that owns an expert of the token, once, in its own column; -1 elsewhere."""
    owner, to = _owner(topk_idx, experts, ranks), torch.arange(ranks, device=topk_idx.device)
    return torch.where((owner.unsqueeze(1) == to.unsqueeze(1)).any(dim=2), to, -1)


def by_expert(topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """Return [T, K]: the rank that owns each expert of the token."""
    return _owner(topk_idx, experts, ranks)


def _owner(topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    return torch.where(topk_idx >= 0, topk_idx // (experts // ranks), -1)


def nccl_group() -> dist.ProcessGroup:
    """Create an NCCL group of all ranks. Collective."""
    seconds = timedelta(seconds=60)  # the default is ten minutes
    made: dist.ProcessGroup | None = dist.new_group(backend="nccl", timeout=seconds)
    assert made is not None
    return made


class Collective:
    """The operations of torch.distributed. Collective. `name` is the name of its library."""

    def __init__(self, case: RoundsCase, group: dist.ProcessGroup, device: torch.device) -> None:
        self._case, self._ranks = case, group
        self.name = "nccl" if device.type == "cuda" else "gloo"

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        return nccl_group() if self.name == "nccl" else self._ranks

    def calls(self, ours: Ours) -> list[Timed]:
        """Return the timed calls for the size of `ours`."""
        found = []
        for layout in self._case.layouts:
            if layout == "batched":
                continue  # sends the rows of expert, but does not place them
            exchanges, by_expert = [self._exchange(given, layout) for given in ours.inputs], layout != "flat"
            about = {"layout": layout, "sms": 0}
            dispatches = [exchange.dispatch for exchange in exchanges]
            found.append(Timed({"what": "dispatch", "payload": "bf16", **about}, dispatches, by_expert=by_expert))
            combines = [partial(exchange.combine, exchange.arrived) for exchange in exchanges]
            found.append(Timed({"what": "combine", "payload": "", **about}, combines, by_expert=by_expert))
        return found

    def _exchange(self, given: Input, layout: str) -> TorchExchange:
        sizes = (self._case.experts, self._case.ranks)
        if layout == "flat":
            return TorchExchange(given.x, by_rank(given.topk_idx, *sizes), None, self._group)
        return TorchExchange(given.x, by_expert(given.topk_idx, *sizes), given.topk_weights, self._group)
