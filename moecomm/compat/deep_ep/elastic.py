"""deep_ep.ElasticBuffer: the interface of deep_ep 2.0 and 2.1."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.compat.deep_ep.elastic_rounds import ElasticRounds
from moecomm.compat.deep_ep.ep_handle import EPHandle
from moecomm.compat.deep_ep.event import EventOverlap
from moecomm.compat.deep_ep.normal import check_nothing
from moecomm.compat.deep_ep.pool import counted_by_pool, not_here


class ElasticBuffer(ElasticRounds):
    """Dispatch and combine of deep_ep 2; see its documentation, and the package for differences.

    Memory is taken by the first call with new sizes, on all ranks alike.  `num_bytes`, if given, is the least that a
    window gets.  `num_gpu_timeout_secs` is how long any wait may take.  `allow_multiple_reduction` lets the sum of a
    rank's rows be rounded before it travels (do_expand).  Rows are always in the same order: `deterministic` changes
    nothing, nor do the settings for RDMA.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        check_nothing(num_cpu_bytes=num_cpu_bytes)
        super().__init__(
            group,
            num_bytes,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            deterministic,
            allow_hybrid_mode,
            allow_multiple_reduction,
            prefer_overlap_with_compute,
            num_allocated_qps,
            num_gpu_timeout_secs,
            explicitly_destroy,
        )

    @counted_by_pool
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Return when the work before it is done on every rank: the host waits, with or without `with_cpu_sync`."""
        self._barrier()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return few or many SMs, as `prefer_overlap_with_compute` asks; num_sms=0 lets moecomm's own table decide."""
        return self._theoretical_num_sms()

    @counted_by_pool
    def dispatch(
        self,
        x: Any,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """recv_x or (recv_x, recv_sf), recv_topk_idx, recv_topk_weights, handle, event.

        `do_zero_padding`, `do_handle_copy` and the statistics take a small kernel or two of their own; `topk_weights`
        beside `handle` a small round.
        """
        return self._dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            (previous_event, previous_event_before_epilogue),
            async_with_compute_stream,
            handle,
            do_handle_copy,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )

    @counted_by_pool
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """combined_x, combined_topk_weights (None without `topk_weights`), event.  Rows are added without weights.

        Two biases are added up first, in float32, by a few kernels of their own.
        """
        events = (previous_event, previous_event_before_epilogue)
        return self._combine(x, handle, topk_weights, bias, num_sms, events, async_with_compute_stream)


# Names of deep_ep's experiments: memory of others' entries, pipelines, and collectives.
EXPERIMENTS = (
    *("get_engram_storage_size_hint", "engram_write", "engram_fetch"),
    *("get_pp_buffer_size_hint", "pp_set_config", "pp_send", "pp_recv"),
    *("get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint", "agrs_set_config", "create_agrs_session"),
    *("destroy_agrs_session", "agrs_new_session", "agrs_get_inplace_tensor", "all_gather"),
)
for _name in EXPERIMENTS:
    setattr(ElasticBuffer, _name, staticmethod(not_here(_name)))
