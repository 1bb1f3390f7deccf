"""Four CPU ranks with prepare and finalize in both formats, and experts that multiply."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import moecomm
from moecomm.base.experts import experts_of
from moecomm.ranks.rendezvous import rendezvous
from moecomm.router import random_routing
from tests.integrations import vllm_stub as stub

HIDDEN, EXPERTS, TOPK, MOST = 128, 8, 2, 12
TOKENS = (5, 0, 12, 3)


class Rank:
    """One of four: its tokens, and both formats over the managers that a communicator would have made."""

    def __init__(
        self,
        group: Any,
        dtype: torch.dtype = torch.float32,
        topk: int = TOPK,
        device: str = "cpu",
        experts: int = EXPERTS,
        **batched: Any,
    ) -> None:
        from moecomm.integrations.vllm.batched import BatchedPrepareAndFinalize
        from moecomm.integrations.vllm.managers import BatchedManager, StandardManager
        from moecomm.integrations.vllm.standard import StandardPrepareAndFinalize

        ranks = rendezvous(group)
        self.rank, self.experts = ranks.rank, experts
        mine = experts_of(self.rank, experts, ranks.ranks)
        self.first, self.local = mine.start, len(mine)
        self.managers = (StandardManager(group, None), BatchedManager(group, None))
        self.standard = StandardPrepareAndFinalize(
            self.managers[0].get_handle({}),
            num_dispatchers=ranks.ranks,
            dp_size=ranks.ranks,
            rank_expert_offset=self.rank * self.local,  # as vLLM has it, also where experts do not divide
        )
        self.batched = BatchedPrepareAndFinalize(
            self.managers[1].get_handle({"max_num_tokens_per_dp_rank": MOST}),
            max_tokens_per_rank=MOST,
            num_dispatchers=ranks.ranks,
            **batched,
        )
        g = torch.Generator().manual_seed(self.rank)
        tokens = TOKENS[self.rank]
        # Small integers: sums of products are exact, in whatever order.
        self.x = torch.randint(-8, 9, (tokens, HIDDEN), generator=g).to(dtype)
        self.ids, _ = random_routing(tokens, experts, topk, drop=0.2, generator=g)
        self.weights = torch.randint(1, 5, (tokens, topk), generator=g).float()
        self.x, self.ids, self.weights = self.x.to(device), self.ids.to(device), self.weights.to(device)

    def arguments(self, **given: Any) -> dict[str, Any]:
        return {
            "a1": self.x,
            "topk_weights": self.weights,
            "topk_ids": self.ids,
            "num_experts": self.experts,
            "expert_map": None,
            "apply_router_weight_on_input": False,
            "quant_config": stub.quant_config(),
            "defer_input_quant": False,
            **given,
        }

    def standard_experts(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`[rows, K, H]`: expert e multiplies by e + 1; others' experts give nothing."""
        mine = (ids >= self.first) & (ids < self.first + self.local)
        return x.unsqueeze(1) * torch.where(mine, ids + 1, 0).unsqueeze(2).to(x.dtype)

    def batched_experts(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        y = torch.full_like(x, torch.nan)
        for expert, count in enumerate(counts.tolist()):
            y[expert, :count] = x[expert, :count] * (self.first + expert + 1)
        return y

    def wanted(self, weighted: bool = True) -> torch.Tensor:
        scale = torch.where(self.ids < 0, 0, self.ids + 1) * (self.weights if weighted else 1)
        return (self.x.double() * scale.sum(dim=1, keepdim=True)).to(self.x.dtype)

    def close(self) -> None:
        for manager in self.managers:
            manager.destroy()


def on_ranks(body: Callable[[Rank], Any], **settings: Any) -> list[Any]:
    def run(group: Any) -> Any:
        rank = Rank(group, **settings)
        try:
            return body(rank)
        finally:
            rank.close()

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(run, moecomm.local_ranks(4)))


def everybody(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """x, ids, weights of all ranks, as Rank draws them."""
    found = []
    for rank, tokens in enumerate(TOKENS):
        g = torch.Generator().manual_seed(rank)
        x = torch.randint(-8, 9, (tokens, HIDDEN), generator=g).float()
        ids, _ = random_routing(tokens, EXPERTS, TOPK, drop=0.2, generator=g)
        found.append((x, ids, torch.randint(1, 5, (tokens, TOPK), generator=g).float()))
    return found


def finalized(
    rank: Rank, kind: str, prepared: tuple[Any, ...], reduce: Any = None, apply: bool = False
) -> torch.Tensor:
    """Experts and finalize."""
    x, _, meta, ids, weights = prepared
    out = torch.full_like(rank.x, torch.nan)
    if kind == "batched":
        y = rank.batched_experts(x, meta.expert_num_tokens)
        rank.batched.finalize(out, y, rank.weights, rank.ids, apply, stub.TopKWeightAndReduceDelegate())
    else:
        y = rank.standard_experts(x, ids)
        rank.standard.finalize(out, y, weights, ids, apply, reduce or stub.TopKWeightAndReduceDelegate())
    return out
