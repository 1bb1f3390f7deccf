"""The standard activation format, `[tokens, hidden]`: for prefill, and whatever runs without graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.v1.worker.ubatching import (
    dbo_enabled,
    dbo_switch_to_comm,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)

from moecomm import combine as combining
from moecomm.base.experts import experts_of
from moecomm.compat.deep_ep.buffer import Payload, route
from moecomm.dispatch.routed import Routed
from moecomm.integrations.vllm.managers import OpenedBuffers
from moecomm.integrations.vllm.quantization import Cast, cast, for_experts, is_cast_first
from moecomm.integrations.vllm.steps import PrepareAndFinalize, Sent, apart, in_window, weighted_input
from moecomm.rounds.call_count import CountedCall


class StandardPrepareAndFinalize(PrepareAndFinalize):
    """A row for each (token, rank), with the ids and weights of its experts; experts' rows are added up on each rank
    before they go home.  As many rows as come: the host waits for their number.

    Args:
        buffer: of StandardManager.get_handle().
        num_dispatchers: ranks.
        dp_size: not used.
        rank_expert_offset: not used: where experts do not divide, it is not that of this rank's first expert.
    """

    def __init__(self, buffer: OpenedBuffers, num_dispatchers: int, dp_size: int, rank_expert_offset: int) -> None:
        super().__init__(buffer, num_dispatchers)

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int, dtype: torch.dtype) -> int:
        """Round up to rows of a multiple of 16 bytes."""
        unit = 16 // dtype.itemsize
        return -(-hidden_size // unit) * unit

    @property
    def activation_format(self) -> Any:
        """Standard."""
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        """None: any number; a larger Buffer is opened for more than there were before."""
        return None

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
    ) -> Callable[[], Any]:
        """Dispatch; return a function that returns the result of prepare().

        Rows, scales, counts, global ids int64 `[rows, K]` and weights float32 `[rows, K]`.  Where an id is of another
        rank's expert, some expert of another rank stands: vLLM's kernels know no -1.
        """
        with CountedCall(self._rounds.pool.calls):  # no longer than until another micro-batch runs
            rows = weighted_input(a1, topk_weights, apply_router_weight_on_input)
            is_cast = not defer_input_quant and is_cast_first(self._rounds, quant_config)
            sent = cast(rows, quant_config) if is_cast else Cast(rows)
            ids, weights = topk_ids.contiguous(), topk_weights.float().contiguous()
            given = Payload(sent.rows.contiguous(), sent.scales, combined=(a1.shape[1], a1.dtype))
        dbo_yield_and_switch_from_compute_to_comm()
        with CountedCall(self._rounds.pool.calls):
            routed = route(self._rounds.pool, given, ids, weights, num_experts, 0, self._rounds.num_sms)
        self._slots.put(Sent(routed.handle, (given.rows, given.scales, ids, weights)))
        dbo_switch_to_compute_sync()
        return lambda: self._receive(routed, sent.dtype, num_experts, quant_config, defer_input_quant)

    def _receive(
        self, routed: Routed, cast_to: torch.dtype | None, num_experts: int, quant_config: Any, defer_input_quant: bool
    ) -> Any:
        x, scales = routed.x, None
        if cast_to is not None:
            x, scales = for_experts(x, routed.scales, cast_to, quant_config)
        local, weights = routed.topk_idx, routed.topk_weights
        assert local is not None
        first = experts_of(routed.handle.rounds.rank, num_experts, self._num_dispatchers).start
        elsewhere = num_experts - 1 if first == 0 else 0
        ids = torch.where(local < 0, elsewhere, local + first)
        counts = routed.tokens_per_expert
        meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=counts.cpu())
        if cast_to is None and not defer_input_quant and x.numel() != 0:
            # A scale for all of a tensor is found after the rows have come together.
            x, scales = moe_kernel_quantize_input(
                x,
                quant_config.a1_gscale if quant_config.quant_dtype == "nvfp4" else quant_config.a1_scale,
                quant_dtype=quant_config.quant_dtype,
                per_act_token_quant=False,
                block_shape=quant_config.block_shape,
                is_scale_swizzled=quant_config.is_scale_swizzled,
            )
        return x, scales, meta, ids, weights

    def allocate_fused_expert_output(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, weight_and_reduce_impl: Any
    ) -> torch.Tensor | None:
        """Rows in the window, where experts write reduced rows: then nothing copies them there."""
        handle = self._slots.get()
        return in_window(handle, dtype) if tuple(shape) == handle.y_shape else None

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """Add up the rows of each token here and send; the returned function waits for `output`."""
        with CountedCall(self._rounds.pool.calls):
            handle = self._slots.get()
            y = fused_expert_output
            if y.numel() == 0:
                y = y.reshape(handle.y_shape)
            else:
                if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                    weight_and_reduce_impl = TopKWeightAndReduceContiguous()
                y = weight_and_reduce_impl.apply(
                    output=None if y.shape == handle.y_shape else in_window(handle, y.dtype),
                    fused_expert_output=y,
                    topk_weights=topk_weights,
                    topk_ids=topk_ids,
                    apply_router_weight_on_input=apply_router_weight_on_input,
                )
            held = [apart(y, output)]
        dbo_yield_and_switch_from_compute_to_comm()
        options = combining.Options(num_sms=self._rounds.num_sms)
        wait = self._beside.start(
            y.device, lambda: combining.combine(handle.rounds, combining.Request(options), held[0], handle, out=output)
        )
        dbo_switch_to_compute()

        def receive() -> None:
            wait()
            if dbo_enabled():
                dbo_switch_to_comm()
                dbo_yield_and_switch_from_comm_to_compute()
            held.clear()  # not before: another stream has been reading it

        return receive
