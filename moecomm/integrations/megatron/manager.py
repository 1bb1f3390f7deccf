"""Managers that move the tokens of a MoEFlexTokenDispatcher, with the interface of Megatron-core's own managers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_capacity
from megatron.core.transformer.moe.token_dispatcher import _DispatchManager

from moecomm.base.choices import Quantize
from moecomm.errors import BadInput, Unsupported
from moecomm.gpu.routing_map import ids_of
from moecomm.integrations.megatron.buffers import Formats, Limits, shared
from moecomm.integrations.megatron.exchange import ExpertExchange
from moecomm.integrations.megatron.padded import PaddedExchange
from moecomm.rounds.call_count import counted


class Manager(_DispatchManager):  # type: ignore[misc]
    """Dispatch that arrives sorted by expert and padded, so that nothing is left to permute; and combine.

    Its arguments and attributes are those of Megatron-core's DeepEP manager, whose place it can take.

    Args:
        group: the ranks, of tensor and expert parallelism together.
        num_local_experts: of one rank.
        router_topk: experts a token picks, times the ranks of tensor parallelism.
        num_experts: as many times the number of ranks.
        config: TransformerConfig.
        limits: see Limits.
    """

    def __init__(
        self,
        group: Any,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any,
        limits: Limits | None = None,
    ) -> None:
        self.group, self.config = group, config
        self.num_local_experts, self.num_experts, self.router_topk = num_local_experts, num_experts, router_topk
        self.alignment = 1
        if config.moe_router_padding_for_quantization or config.fp8 or config.fp4:
            self.alignment = get_align_size_for_quantization(config)
        self.token_indices: torch.Tensor | None = None
        self.token_probs: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self.tokens_per_expert: torch.Tensor | None = None
        self.handle: Any = None
        self._padded = bool(config.moe_pad_expert_input_to_capacity)
        kind: type[ExpertExchange] | type[PaddedExchange] = PaddedExchange if self._padded else ExpertExchange
        self._exchange = shared(kind, group, num_experts, router_topk, limits or Limits())
        names = ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")  # of newer versions
        self._formats = Formats(*(_format_of(name, getattr(config, name, "bf16")) for name in names))

    def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Find the experts of each token.

        Args:
            routing_map: bool `[T, ranks, E/R]`: what was chosen, at most `router_topk` experts a token: more are bad
                input of the dispatch, on all ranks.  Of experts padded to their capacity, which choose more tokens than
                chose them, those with the largest probs count.
            probs: `[T, ranks, E/R]`.
        """
        chosen = routing_map.reshape(len(routing_map), self.num_experts)
        probs = probs.reshape(len(probs), self.num_experts)
        # By what was chosen, not by probs alone: one that is 0 has a gradient as well.
        if self._padded:
            order = torch.where(chosen, probs.detach(), float("-inf"))
            first = order.topk(self.router_topk, dim=-1).indices
            ids = torch.where(chosen.gather(1, first), first, -1)
        else:
            ids, _ = ids_of(chosen, None, self.router_topk)
        self.token_probs = torch.where(ids >= 0, probs.gather(1, ids.clamp(0, self.num_experts - 1)), 0.0)
        self.token_indices = ids

    @counted(lambda self: self._exchange.calls)
    def dispatch(
        self, hidden_states: torch.Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> torch.Tensor:
        """`[T, H]` -> `[rows, H]`, by expert.  Collective; on the current stream, whatever the flags say."""
        if self.token_indices is None or self.token_probs is None:
            raise BadInput("dispatch", "no routing", "setup_metadata first")
        sizes = self._rows_of_expert(len(hidden_states)) if self._padded else self.alignment
        found = self._exchange.dispatch(hidden_states, self.token_indices, self.token_probs, sizes, self._formats)
        self.dispatched_probs, self.tokens_per_expert, self.handle = found.weights, found.tokens_per_expert, found.way
        return found.x

    def _rows_of_expert(self, tokens: int) -> int:
        """Return the capacity of an expert for `tokens` of each rank, over all ranks."""
        config = self.config
        of_rank = get_capacity(
            num_tokens=tokens * config.moe_router_topk,
            num_experts=config.num_moe_experts,
            capacity_factor=config.moe_expert_capacity_factor,
        )
        rows: int = -(-of_rank * self.group.size() // self.alignment) * self.alignment
        return rows

    def get_permuted_hidden_states_by_experts(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows unchanged, and their probs."""
        probs = self.dispatched_probs
        if probs is not None and self.config.moe_router_dtype == "fp64":
            probs = probs.double()
        return hidden_states, probs

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        """int64 `[E/R]`, on the CPU; padding included."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the rows unchanged."""
        return hidden_states

    @counted(lambda self: self._exchange.calls)
    def combine(
        self, hidden_states: torch.Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> torch.Tensor:
        """`[rows, H]` -> `[T, H]`: the sum of each token's rows.  Collective; on the current stream."""
        if self.handle is None:
            raise BadInput("combine", "no dispatch before it", "one combine to a dispatch")
        way, self.handle = self.handle, None  # it lives on in the graph of autograd
        return self._exchange.combine(hidden_states, way)


def _format_of(name: str, value: Any) -> Quantize | None:
    """Return the format that an option of the configuration names.  Raises Unsupported."""
    if value in (None, "bf16"):
        return None
    if value != "mxfp8":
        raise Unsupported(f"{name}={value!r}: it is bf16 or mxfp8")
    return "mxfp8"
