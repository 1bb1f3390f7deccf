"""The batched activation format, `[experts, rows, hidden]`: for decoding, in graphs too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input, normalize_batched_scales_shape
from vllm.v1.worker.ubatching import dbo_maybe_run_recv_hook

from moecomm import combine as combining
from moecomm.base.placement import Placement
from moecomm.compat.deep_ep.low_latency import Arrival
from moecomm.dispatch.routed import Handle, Routed
from moecomm.errors import BadInput, Unsupported
from moecomm.integrations.vllm.managers import OpenedBuffers
from moecomm.integrations.vllm.quantization import Cast, cast, for_experts, is_cast_first
from moecomm.integrations.vllm.steps import (
    PrepareAndFinalize,
    Sent,
    apart,
    counted_by_pool,
    in_window,
    nothing,
    weighted_input,
)


class BatchedPrepareAndFinalize(PrepareAndFinalize):
    """A row for each (token, expert), in a place for the most rows there can be; nothing waits on the host.

    Routing weights travel with the tokens, and are applied while rows go home.  With VLLM_DEEPEPLL_NVFP4_DISPATCH rows
    of NVFP4 models travel and arrive as such.  With VLLM_BATCH_INVARIANT results return unsummed, so that their bits do
    not depend on where EPLB or the number of ranks has put experts; in one domain.

    Args:
        buffer: of BatchedManager.get_handle().
        max_tokens_per_rank: of all ranks alike.
        num_dispatchers: ranks.
        use_fp8_dispatch: rows travel and arrive as FP8 with a scale for every 128 columns.
        global_to_physical: the slot of each expert, by its id, which becomes the placement of the Buffer; None: experts
            in a row.
        physical_to_global, local_expert_global_ids: not used.
    """

    def __init__(
        self,
        buffer: OpenedBuffers,
        max_tokens_per_rank: int,
        num_dispatchers: int,
        use_fp8_dispatch: bool = False,
        global_to_physical: torch.Tensor | None = None,
        physical_to_global: torch.Tensor | None = None,
        local_expert_global_ids: torch.Tensor | None = None,
    ) -> None:
        super().__init__(buffer, num_dispatchers)
        self._most_tokens = max_tokens_per_rank
        self._fp8, self._ue8m0 = use_fp8_dispatch, False
        self._fp4 = bool(getattr(envs, "VLLM_DEEPEPLL_NVFP4_DISPATCH", False))
        self._invariant = bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))
        self._placement = None if global_to_physical is None else _placement(global_to_physical, num_dispatchers)

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int) -> int:
        """Round up to rows of a multiple of 16 bytes, in dtypes of two bytes."""
        return -(-hidden_size // 8) * 8

    def post_init_setup(self, fused_experts: Any) -> None:
        """Pack scales as powers of two, four to an int32, if the experts take them so."""
        self._ue8m0 = self._fp8 and fused_experts.supports_packed_ue8m0_act_scales()

    @property
    def activation_format(self) -> Any:
        """BatchedExperts."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        """Return the most tokens of a rank, as the Buffer was opened."""
        return self._most_tokens

    @counted_by_pool
    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        """Send rows; return a function that waits for rows, and one that returns the result of prepare().

        Rows `[E/R, R * max_tokens_per_rank, H]`, scales, counts int32 `[E/R]`, None, None.
        """
        if defer_input_quant:
            raise Unsupported("defer_input_quant: batched rows are quantized here; choose experts that take them so")
        scale = quant_config.a2_scale if quant_config.a1_scale is None else quant_config.a1_scale
        if scale is not None and scale.numel() != 1:
            raise Unsupported("scales of the caller's, one a token: batched rows have none from outside")
        rows = weighted_input(a1, topk_weights, apply_router_weight_on_input).contiguous()
        ids, weights = topk_ids.contiguous(), topk_weights.float().contiguous()
        sizes = (rows.shape[1], num_experts, ids.shape[1], self._most_tokens, rows.dtype)
        buffer = self._rounds.pool.batched(rows.device, *sizes, self._placement)
        sent, options = self._cast(rows, quant_config)
        pool = self._rounds.pool
        pool.receive(buffer)  # a dispatch of another micro-batch, whose hook has not been called yet
        pool.agree(buffer)
        options = {"layout": "batched", "scales": sent.scales, "num_sms": self._rounds.num_sms, **options}
        if pool.masks and buffer.rounds.on_cpu:  # receives at once: a call that loses a rank is then over, and repeats
            routed = buffer.dispatch(sent.rows, ids, weights, sync=False, **options)
            self._slots.put(Sent(routed.handle, (*sent, ids, weights)))
            return nothing, lambda: self._receive(routed, sent.dtype, quant_config)
        routed = buffer.dispatch_begin(sent.rows, ids, weights, **options)
        self._slots.put(Sent(routed.handle, (*sent, ids, weights)))
        arrival = Arrival(buffer, routed)
        pool.receiving[id(buffer)] = arrival.receive_early
        return arrival, lambda: self._receive(routed, sent.dtype, quant_config)

    def _cast(self, rows: torch.Tensor, quant_config: Any) -> tuple[Cast, dict[str, Any]]:
        """Return rows as they are sent, and the options of a dispatch that casts them on the way."""
        options: dict[str, Any] = {}
        if self._fp8:  # scales as grouped GEMMs load them
            options = {"quantize": "fp8", "scale_layout": "column", "scale_format": "ue8m0" if self._ue8m0 else "fp32"}
        elif quant_config.quant_dtype == "nvfp4":
            if self._fp4:
                factor = quant_config.a1_gscale.reshape(-1)[:1]  # all of them are the same
                options = {"quantize": "nvfp4", "scale_layout": "swizzled", "x_global_scale": factor}
        elif is_cast_first(self._rounds, quant_config):
            return cast(rows, quant_config), options
        return Cast(rows), options

    def _receive(self, routed: Routed, cast_to: torch.dtype | None, quant_config: Any) -> Any:
        x, scales = routed.x, routed.scales
        experts, rows, _ = x.shape
        if cast_to is not None:
            x, scales = for_experts(x, scales, cast_to, quant_config)
            scales = normalize_batched_scales_shape(scales, experts)
        elif not self._fp8 and quant_config.quant_dtype == "nvfp4":
            if scales is not None:  # as DeepEP has them, see low_latency_dispatch; else experts quantize by themselves
                scales = scales.view(experts, -(-rows // 128), -1, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
        elif not self._fp8:
            x, scales = moe_kernel_quantize_input(
                x.view(experts * rows, -1),
                quant_config.a1_scale,
                quant_config.quant_dtype,
                quant_config.per_act_token_quant,
                quant_config.block_shape,
            )
            x = x.view(experts, rows, -1)
            if quant_config.quant_dtype is not None:
                scales = normalize_batched_scales_shape(scales, experts)
        meta = mk.ExpertTokensMetadata(expert_num_tokens=routed.tokens_per_expert, expert_num_tokens_cpu=None)
        return x, scales, meta, None, None

    def allocate_fused_expert_output(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, weight_and_reduce_impl: Any
    ) -> torch.Tensor | None:
        """Rows in the window where results return unsummed: source ranks read them there."""
        handle = self._slots.get()
        return in_window(handle, dtype) if self._unsummed(handle) and tuple(shape) == handle.y_shape else None

    @counted_by_pool
    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Send results; return a function that waits for `output`, and one that does nothing."""
        if not isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            raise Unsupported("experts that add rows up: batched rows are weighted and added on their way home")
        handle, y = self._slots.get(), apart(fused_expert_output, output)
        dbo_maybe_run_recv_hook()
        options = combining.Options(
            weighted=not apply_router_weight_on_input,
            wire="rows" if self._unsummed(handle) else None,
            num_sms=self._rounds.num_sms,
        )

        def run() -> None:
            combining.combine(handle.rounds, combining.Request(options), y, handle, out=output)

        return self._beside.start(y.device, run), nothing

    def _unsummed(self, handle: Handle) -> bool:
        return self._invariant and handle.rounds.domain_ranks == handle.rounds.num_ranks


def _placement(global_to_physical: torch.Tensor, ranks: int) -> Placement:
    """Return the placement of experts by their slots.  Raises BadInput, unless each slot has one."""
    slots = global_to_physical.long().cpu()
    if not torch.equal(slots.sort().values, torch.arange(len(slots))):
        raise BadInput("global_to_physical", slots.tolist(), f"each of 0 to {len(slots) - 1} once")
    return Placement.of_plan(slots.argsort(), ranks)
