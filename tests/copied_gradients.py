"""Gradients of layers with balance="replicate", beside those of a Buffer that has the copies all along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import moecomm
from moecomm import ExpertWeights, Placement, ops
from moecomm.base.placement import NONE, replicated

NAMES = ("w13", "w2", "w13_bias", "w2_bias")
Gradients = list[torch.Tensor]  # of x, of topk_weights and of the weights of each slot, on the CPU


@dataclass(frozen=True)
class CopiedGradients:
    """A layer of some ranks.

    Attributes:
        placement: with empty slots, and replicas by load.
        ids: `[T, 2]` of each rank.
        inner: columns inside an expert.
        biased: experts have biases.
        sizes: arguments of a Buffer, `hidden` and `num_experts` among them.
        device: of all tensors.
    """

    placement: Placement
    ids: list[torch.Tensor]
    inner: int
    biased: bool
    sizes: dict[str, Any]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    @property
    def after(self) -> Placement:
        """The placement with the copies."""
        experts = self.placement.num_experts
        return replicated(
            self.placement, torch.stack([torch.bincount(one[one >= 0], minlength=experts) for one in self.ids])
        )

    def run(self, group: Any) -> tuple[Gradients, Gradients]:
        """Return the gradients of this rank with copies, and with the placement that has them.  Collective."""
        return self._of(group, self.placement, balance="replicate"), self._of(group, self.after)

    def _of(self, group: Any, placement: Placement, **how: Any) -> Gradients:
        hidden, experts, g = self.sizes["hidden"], placement.num_experts, torch.Generator().manual_seed(self.seed)
        shapes = {"w13": (2 * self.inner, hidden), "w2": (hidden, self.inner)}
        shapes |= {"w13_bias": (2 * self.inner,), "w2_bias": (hidden,)}
        whole = {name: torch.randn(experts, *shape, generator=g).to(self.dtype) for name, shape in shapes.items()}
        with moecomm.Buffer(group, **self.sizes, dtype=self.dtype, placement=placement) as buffer:
            g.manual_seed(1000 * self.seed + buffer.rank + 1)
            ids = self.ids[buffer.rank]
            x = torch.randn(len(ids), hidden, generator=g).to(self.device, self.dtype).requires_grad_()
            scale = torch.rand(len(ids), 2, generator=g).to(self.device).requires_grad_()
            weights = ExpertWeights(buffer, shapes, dtype=self.dtype)
            held = torch.tensor(list(buffer.local_experts))
            for name, value in whole.items():
                empty = (held < 0).view(-1, *[1] * (value.dim() - 1))
                weights[name].copy_(value[held].masked_fill(empty, torch.nan))
            leaves = [torch.nn.Parameter(weights[name]) for name in (NAMES if self.biased else NAMES[:2])]
            biases = dict(zip(NAMES[2:], leaves[2:], strict=False))
            out = ops.moe(buffer, x, ids.to(self.device), scale, *leaves[:2], **biases, **how)
            found = torch.autograd.grad(out.float().square().sum(), [x, scale, *leaves])
            buffer.check()
            grads = [grad.cpu() for grad in found]
            weights.close()
        return grads

    def check(self, results: list[tuple[Gradients, Gradients]]) -> None:
        """An owner's slot has the sum of those of its copies, in the order of slots; copies have 0."""
        experts, after = self.placement.experts, self.after.experts
        ranks, slots = experts.shape
        for rank, (got, want) in enumerate(results):
            for nth, (mine, plain) in enumerate(zip(got, want, strict=True)):
                if nth < 2:  # of x and of topk_weights
                    assert torch.equal(mine, plain)
                    continue
                for slot, expert in enumerate(experts[rank].tolist()):
                    there = [(rank, slot)] * (expert != NONE)
                    if expert != NONE and self.placement.slots_by_expert[expert][0] == rank * slots + slot:
                        there = [
                            (r, s)
                            for r in range(ranks)
                            for s in range(slots)
                            if after[r, s] == expert and (experts[r, s] == NONE or (r, s) == (rank, slot))
                        ]
                    total = torch.zeros_like(plain[slot], dtype=torch.float32)
                    for of, at in there:
                        total = total + results[of][1][nth][at].float()
                    assert torch.equal(mine[slot], total.to(mine.dtype)), (rank, slot, nth)
