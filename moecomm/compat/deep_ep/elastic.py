"""deep_ep.ElasticBuffer: the interface of deep_ep 2.0 and 2.1."""

from __future__ import annotations

from typing import Any

from moecomm.compat.deep_ep.elastic_rounds import (
    COMBINE,
    DISPATCH,
    LIMITS,
    ROWS,
    SETTINGS,
    SIZES,
    SMS,
    STREAMS,
    ElasticRounds,
)
from moecomm.compat.deep_ep.ep_handle import EPHandle
from moecomm.compat.deep_ep.pool import counted_by_pool, not_here, refuse
from moecomm.compat.names import takes

__all__ = ["EPHandle", "ElasticBuffer"]


class ElasticBuffer(ElasticRounds):
    """Dispatch and combine of deep_ep 2; see its documentation, and the package for differences.

    Memory is taken by the first call with new sizes, on all ranks alike.  `num_bytes`, if given, is the least that a
    window gets.  `num_gpu_timeout_secs` is how long any wait may take.  `allow_multiple_reduction` lets the sum of a
    rank's rows be rounded before it travels (do_expand).  Rows are always in the same order: `deterministic` changes
    nothing, nor do the settings for RDMA.
    """

    @takes(f"group num_bytes=None num_cpu_bytes=0 {SIZES} {SETTINGS} sl_idx=3 {LIMITS}")
    def __init__(self, *, num_cpu_bytes: int, **given: Any) -> None:
        refuse("deep_ep", num_cpu_bytes=num_cpu_bytes)
        super().__init__(**given)

    @counted_by_pool
    @takes("use_comm_stream=True with_cpu_sync=False sequential=True")
    def barrier(self, **_: bool) -> None:
        """Return when the work before it is done on every rank: the host waits, with or without `with_cpu_sync`."""
        self._barrier()

    @takes(f"{SMS} sm_read_gbs=200 sm_write_gbs=50")
    def get_theoretical_num_sms(self, **_: float) -> int:
        """Return few or many SMs, as `prefer_overlap_with_compute` asks; num_sms=0 lets moecomm's own table decide."""
        return self._theoretical_num_sms()

    @counted_by_pool
    @takes(f"{DISPATCH} previous_event_before_epilogue=None {STREAMS} handle=None do_handle_copy=True {ROWS}")
    def dispatch(self, *, previous_event: Any, previous_event_before_epilogue: Any, **given: Any) -> Any:
        """recv_x or (recv_x, recv_sf), recv_topk_idx, recv_topk_weights, handle, event.

        `do_zero_padding`, `do_handle_copy` and the statistics take a small kernel or two of their own; `topk_weights`
        beside `handle` a small round.
        """
        return self._dispatch(events=(previous_event, previous_event_before_epilogue), **given)

    @counted_by_pool
    @takes(f"{COMBINE} previous_event_before_epilogue=None {STREAMS}")
    def combine(self, *, previous_event: Any, previous_event_before_epilogue: Any, **given: Any) -> Any:
        """combined_x, combined_topk_weights (None without `topk_weights`), event.  Rows are added without weights.

        Two biases are added up first, in float32, by a few kernels of their own.
        """
        return self._combine(events=(previous_event, previous_event_before_epilogue), **given)


# Names of deep_ep's experiments: memory of others' entries, pipelines, and collectives.
EXPERIMENTS = (
    *("get_engram_storage_size_hint", "engram_write", "engram_fetch"),
    *("get_pp_buffer_size_hint", "pp_set_config", "pp_send", "pp_recv"),
    *("get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint", "agrs_set_config", "create_agrs_session"),
    *("destroy_agrs_session", "agrs_new_session", "agrs_get_inplace_tensor", "all_gather"),
)
for _name in EXPERIMENTS:
    setattr(ElasticBuffer, _name, staticmethod(not_here(_name)))
