"""Expert layers in plain torch: all_to_all_single, and grouped GEMMs.

`TorchLayer` sends one row for each (token, expert), `TorchRankLayer` one for each (token, rank).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import grouped_mm, silu


class _RowsToAll(torch.autograd.Function):
    """all_to_all_single of rows with known splits; the gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, came: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits = came, sent, group
        out = rows.new_empty(sum(came), rows.shape[1])
        exchange(out, rows.contiguous(), came, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        came, sent, group = ctx.splits
        return moved(gradient, sent, came, group), None, None, None


def moved(rows: torch.Tensor, came: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows that arrive, with gradients."""
    out: torch.Tensor = _RowsToAll.apply(rows, came, sent, group)  # type: ignore[no-untyped-call]
    return out


def exchange(out: torch.Tensor, rows: torch.Tensor, came: list[int], sent: list[int], group: dist.ProcessGroup) -> None:
    """Exchange rows with known splits, moved as float32, because some versions of gloo lack bfloat16."""
    wide = torch.float32
    dist.all_to_all_single(out.view(wide), rows.view(wide), came, sent, group=group)


class _RankExperts:
    """The experts of a rank."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._w13, self._w2, self._group = w13, w2, group
        self._ends = torch.zeros(len(w13), dtype=torch.int32, device=w13.device)

    def experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply this rank's experts to rows that are grouped by expert."""
        gate, up = grouped_mm(rows, self._w13.transpose(1, 2), offs=self._ends).chunk(2, dim=-1)
        return grouped_mm(silu(gate) * up, self._w2.transpose(1, 2), offs=self._ends)

    def _exchange(self, out: torch.Tensor, rows: torch.Tensor, came: list[int], sent: list[int]) -> None:
        exchange(out, rows, came, sent, self._group)


class TorchLayer(_RankExperts):
    """The layer for one routing, with a row for each (token, expert). Collective.

    Counts are exchanged in advance, so that the device never waits for the host.

    Args:
        x: bfloat16 `[T, H]`.
        topk_idx: int64 `[T, K]`, without -1.
        topk_weights: float32 `[T, K]`.
        w13: `[E/R, 2 I, H]`.
        w2: `[E/R, H, I]`.
        group: NCCL for GPUs, gloo for CPUs.
    """

    def __init__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(w13, w2, group)
        self._x, self._weights = x, topk_weights
        ranks, local = group.size(), len(w13)
        ids = topk_idx.flatten()
        self._order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=ranks * local)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        self._sent, self._came = (c.view(ranks, local).sum(1).tolist() for c in (counts, arriving))
        expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(arriving)
        self._by_expert = expert.argsort(stable=True)
        self._ends = torch.bincount(expert, minlength=local).cumsum(0).int()
        self._rows = x.new_empty(len(expert), x.shape[1])

    def layer(self) -> torch.Tensor:
        """Run the layer; returns [T, H]."""
        tokens, topk = self._weights.shape
        self._exchange(self._rows, self._x[self._order // topk], self._came, self._sent)
        y = self.experts(self._rows[self._by_expert])
        back = torch.empty_like(self._rows)
        back[self._by_expert] = y
        home = self._x.new_empty(tokens * topk, self._x.shape[1])
        self._exchange(home, back, self._sent, self._came)
        mine = torch.empty_like(home)
        mine[self._order] = home
        weighted = mine.view(tokens, topk, -1) * self._weights.unsqueeze(2)
        return weighted.sum(dim=1).to(self._x.dtype)

    def differentiable(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer on other tokens `[T, H]` with the same routing, with gradients of them and of the experts."""
        tokens, topk = self._weights.shape
        arrived = moved(x[self._order // topk], self._came, self._sent, self._group)
        back = self.experts(arrived[self._by_expert])[self._by_expert.argsort()]
        home = moved(back, self._sent, self._came, self._group)[self._order.argsort()]
        weighted = home.view(tokens, topk, -1) * self._weights.unsqueeze(2)
        return weighted.sum(dim=1).to(x.dtype)


class TorchRankLayer(_RankExperts):
    """The layer for one routing, with a row for each (token, rank). Collective.

    A rank adds up the weighted rows of its experts for a token, and returns one row. All that depends on the
    routing alone (counts, expert ids and weights) is exchanged in advance and not timed, in favor of torch. Rows are
    multiplied in float32 and added up in the dtype of `x`.

    Args: see TorchLayer.
    """

    def __init__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(w13, w2, group)
        self._x = x
        ranks, local = group.size(), len(w13)
        first = torch.arange(ranks, device=x.device).view(ranks, 1, 1) * local
        wanted = ((topk_idx >= first) & (topk_idx < first + local)).any(dim=2)  # [R, T]
        self._tokens = wanted.nonzero()[:, 1]  # by rank
        counts = wanted.sum(dim=1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        self._sent, self._came = counts.tolist(), arriving.tolist()
        ids, weights = (self._arrived(of[self._tokens]) for of in (topk_idx.long(), topk_weights))
        ids = ids - group.rank() * local
        row, pick = ((ids >= 0) & (ids < local)).nonzero(as_tuple=True)
        expert = ids[row, pick]
        by_expert = expert.argsort(stable=True)
        self._row = row[by_expert]  # index among the rows that arrived
        self._weights = weights[row, pick][by_expert].unsqueeze(1)
        self._ends = torch.bincount(expert, minlength=local).cumsum(0).int()
        self._rows = x.new_empty(len(ids), x.shape[1])

    def layer(self) -> torch.Tensor:
        """Run the layer; returns [T, H]."""
        self._exchange(self._rows, self._x[self._tokens], self._came, self._sent)
        y = (self.experts(self._rows[self._row]) * self._weights).to(self._x.dtype)
        sums = torch.zeros_like(self._rows).index_add_(0, self._row, y)
        home = self._x.new_empty(len(self._tokens), self._x.shape[1])
        self._exchange(home, sums, self._sent, self._came)
        return torch.zeros_like(self._x).index_add_(0, self._tokens, home)

    def _arrived(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(sum(self._came), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), self._came, self._sent, group=self._group)
        return out
