"""Conversion of a routing between a map of tokens x experts, as training frameworks have it, and expert ids."""

from __future__ import annotations

import torch

from moecomm.base.arrays import check_memory
from moecomm.gpu import plain_kernel, row_pass


def ids_of(
    routing_map: torch.Tensor, probs: torch.Tensor | None, topk: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the experts of each token, int64 `[T, topk]`, ascending, then -1, and their probs, float32, 0 beside -1.

    For a token with more than `topk` experts the first id is E, which no expert has: a dispatch fails on all ranks.

    Args:
        routing_map: bool `[T, E]`.
        probs: `[T, E]`; None: no weights.
    """
    tokens, experts = routing_map.shape
    if routing_map.is_cuda:
        ids = torch.empty((tokens, topk), dtype=torch.int64, device=routing_map.device)
        dense = None if probs is None else probs.float().contiguous()
        weights = None if dense is None else torch.empty((tokens, topk), dtype=torch.float32, device=ids.device)
        _run(row_pass.kernel("ids_of_map"), routing_map.contiguous(), dense, ids, weights, experts)
        return ids, weights
    first = torch.where(routing_map, torch.arange(experts), experts).sort(dim=1).values[:, :topk]
    ids = torch.where(first < experts, first, -1)
    weights = None
    if probs is not None:
        weights = torch.where(ids >= 0, probs.float().gather(1, first.clamp(max=experts - 1)), 0.0)
    if topk < experts:
        ids[:, :1] = torch.where(routing_map.sum(dim=1, keepdim=True) > topk, experts, ids[:, :1])
    return ids, weights


def weights_at(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return float32 `[T, E]`: weights at their experts, zeros elsewhere.  Weights of a repeated expert are added.

    Args:
        ids: int64 or int32 `[T, K]`, K <= 32; -1: none.
        weights: float32 `[T, K]`.
    """
    if ids.is_cuda:
        dense = torch.empty((len(ids), num_experts), dtype=torch.float32, device=ids.device)
        kernel = row_pass.kernel("weights_at_experts", row_pass.IDS[ids.dtype])
        _run(kernel, None, dense, ids.contiguous(), weights.contiguous(), num_experts)
        return dense
    dense = torch.zeros((len(ids), num_experts + 1), dtype=torch.float32)
    at = torch.where(ids >= 0, ids, num_experts).long()
    return dense.scatter_add_(1, at, weights)[:, :num_experts]


def _run(
    kernel: plain_kernel.PlainKernel,
    chosen: torch.Tensor | None,
    dense: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
) -> None:
    tokens, topk = ids.shape
    if tokens == 0:
        return
    for name, tensor in {"routing_map": chosen, "probs": dense, "topk_idx": ids, "topk_weights": weights}.items():
        if tensor is not None:
            check_memory(name, tensor)
    row_pass.run(
        kernel,
        ids.device,
        tokens * row_pass.ROW,
        map=row_pass.address(chosen),
        dense=row_pass.address(dense),
        ids=ids.data_ptr(),
        weights=row_pass.address(weights),
        tokens=tokens,
        experts=experts,
        topk=topk,
    )
