"""Arguments and results of HybridEPBuffer's calls besides rows: deep_ep's handle, and maps of ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.validation import check_same_device
from moecomm.compat.deep_ep.lazy import LazyTuple
from moecomm.compat.deep_ep.pool import check_dimensions
from moecomm.dispatch.routed import Handle
from moecomm.dispatch.tables import kept

_PROBS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class HybridEPHandle(LazyTuple):
    """The routing of a dispatch_with_permute, for combine_with_unpermute and to repeat it.

    It has deep_ep's eleven items.  The last is `overflow_flag`, int32 `[1]` on the device: 1 if tokens were dropped
    here because num_permuted_tokens has no room for them.  Before it come tokens_per_expert int32 `[E/R]`,
    num_of_tokens_per_rank and the config; the seven maps of deep_ep's kernels are None.
    """

    makers = (
        *(7 * (lambda self: None,)),
        lambda self: kept(self.native, "tokens_per_expert"),
        lambda self: self.native.num_tokens,
        lambda self: self.config,
        lambda self: self.overflow_flag,
    )

    native: Handle
    ids: torch.Tensor
    num_experts: int
    tokens_per_expert: torch.Tensor
    rows: int
    overflow_flag: torch.Tensor
    config: SimpleNamespace


class HybridEPDispatchHandle(LazyTuple):
    """The routing of a dispatch without a permutation, for combine and to repeat it.

    It has deep_ep's seven items: three maps of its kernels, which are None, the rows that came int32 `[1]`,
    local_expert_routing_map bool `[rows, E/R]`, num_of_tokens_per_rank and the config.
    """

    makers = (
        *(3 * (lambda self: None,)),
        lambda self: kept(self.native, "num_rows"),
        lambda self: self.local_expert_routing_map(),
        lambda self: self.native.num_tokens,
        lambda self: self.config,
    )

    native: Handle
    ids: torch.Tensor
    num_experts: int
    config: SimpleNamespace

    @property
    def experts(self) -> torch.Tensor:
        """`[rows, K]`: the experts of each row that are here, -1 elsewhere."""
        local = kept(self.native, "topk_idx")
        return torch.where(local >= 0, local + self.native.rounds.local_experts.start, -1)

    def local_expert_routing_map(self) -> torch.Tensor:
        """Return which experts here a row is for."""
        local, experts = kept(self.native, "topk_idx"), self.native.plan.local_experts
        found = torch.zeros((len(local), experts + 1), dtype=torch.bool, device=local.device)
        return found.scatter_(1, torch.where(local >= 0, local, experts).long(), True)[:, :experts]


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """routing_map bool `[T, E]` and probs float32 `[T, E]` (None without weights) of ids; -1 is none."""
    check_dimensions("topk_idx", topk_idx, "tokens", "topk")
    check_tensor(
        "topk_idx",
        topk_idx,
        device=topk_idx.device,
        dtypes=(torch.int64, torch.int32),
        shape=(num_of_tokens, None),
    )
    at = torch.where(topk_idx >= 0, topk_idx, num_of_experts).long()
    shape = (num_of_tokens, num_of_experts + 1)
    routing_map = torch.zeros(shape, dtype=torch.bool, device=at.device).scatter_(1, at, True)
    routing_map = routing_map[:, :num_of_experts].contiguous()
    if topk_weights is None:
        return routing_map, None
    check_tensor("topk_weights", topk_weights, device=at.device, dtypes=(torch.float32,), shape=tuple(at.shape))
    probs = torch.zeros(shape, dtype=torch.float32, device=at.device).scatter_(1, at, topk_weights)
    return routing_map, probs[:, :num_of_experts].contiguous()


def as_number(value: Any) -> Any:
    """The number in a tensor of one, as Megatron's backward pass passes it; anything else as it is."""
    return value.item() if type(value) is torch.Tensor and value.ndim == 0 else value


def check_map(hidden: torch.Tensor, routing_map: Any, probs: Any) -> None:
    """Raise BadInput unless these are a map of the rows, and its probabilities or None."""
    try:
        device, (tokens, _) = hidden.device, routing_map.shape
        fine = type(routing_map) is torch.Tensor and routing_map.layout is torch.strided
        fine = fine and routing_map.dtype is torch.bool and routing_map.device == device
        fine = fine and tokens == hidden.shape[0] and device.type != "meta"
        if probs is not None:
            fine = fine and type(probs) is torch.Tensor and probs.layout is torch.strided
            fine = fine and probs.shape == routing_map.shape and probs.device == device
            fine = fine and probs.is_floating_point()
    except (AttributeError, TypeError, ValueError):
        fine = False
    if not fine:  # which takes longer to say
        check_dimensions("routing_map", routing_map, "tokens", "experts")
        shape = (hidden.shape[0], routing_map.shape[1])
        check_tensor("routing_map", routing_map, device=hidden.device, dtypes=(torch.bool,), shape=shape)
        check_same_device(hidden=hidden, routing_map=routing_map, probs=probs)
        if probs is not None:
            check_dimensions("probs", probs, "tokens", "experts")
            check_tensor("probs", probs, device=hidden.device, dtypes=_PROBS, shape=shape)
