"""Names, order and defaults of the public calls of deep_ep and nixl_ep, as their sources have them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed as dist

import moecomm
from moecomm.compat import deep_ep, nixl_ep

# deep_ep 2.1.0 (dd758ca), deep_ep/buffers/legacy.py, deep_ep/utils/event.py and the bindings; "name" or "name=default".
EVENT = "previous_event=None async_finish=False allocate_on_comm_stream=False"
LEGACY = {
    "Buffer": "group num_nvl_bytes=0 num_rdma_bytes=0 low_latency_mode=False num_qps_per_rank=24"
    " allow_nvlink_for_low_latency_mode=True allow_mnnvl=False explicitly_destroy=False enable_shrink=False comm=None",
    "Buffer.destroy": "self",
    "Buffer.is_sm90_compiled": "",
    "Buffer.set_num_sms": "new_num_sms",
    "Buffer.capture": "",
    "Buffer.get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "Buffer.get_comm_stream": "self",
    "Buffer.get_local_buffer_tensor": "self dtype size=None offset=0 use_rdma_buffer=False",
    "Buffer.get_dispatch_config": "num_ranks",
    "Buffer.get_combine_config": "num_ranks",
    "Buffer.get_dispatch_layout": f"self topk_idx num_experts {EVENT}",
    "Buffer.dispatch": "self x handle=None num_tokens_per_rank=None num_tokens_per_rdma_rank=None is_token_in_rank=None"
    " num_tokens_per_expert=None topk_idx=None topk_weights=None expert_alignment=1 num_worst_tokens=0 config=None "
    + EVENT,
    "Buffer.combine": f"self x handle topk_weights=None bias=None config=None {EVENT}",
    "Buffer.clean_low_latency_buffer": "self num_max_dispatch_tokens_per_rank hidden num_experts",
    "Buffer.low_latency_dispatch": "self x topk_idx num_max_dispatch_tokens_per_rank num_experts"
    " cumulative_local_expert_recv_stats=None dispatch_wait_recv_cost_stats=None use_fp8=True round_scale=False"
    " use_ue8m0=False async_finish=False return_recv_hook=False",
    "Buffer.low_latency_combine": "self x topk_idx topk_weights handle use_logfmt=False zero_copy=False"
    " async_finish=False return_recv_hook=False out=None combine_wait_recv_cost_stats=None",
    "Buffer.low_latency_update_mask_buffer": "self rank_to_mask mask=False",
    "Buffer.low_latency_query_mask_buffer": "self mask_status",
    "Buffer.low_latency_clean_mask_buffer": "self",
    "Buffer.get_next_low_latency_combine_buffer": "self handle",
    "Config": "num_sms=20 num_max_nvl_chunked_send_tokens=6 num_max_nvl_chunked_recv_tokens=256"
    " num_max_rdma_chunked_send_tokens=6 num_max_rdma_chunked_recv_tokens=256",
    "Config.get_nvl_buffer_size_hint": "self hidden_bytes num_ranks",
    "Config.get_rdma_buffer_size_hint": "self hidden_bytes num_ranks",
    "EventHandle": "",
    "EventHandle.current_stream_wait": "self",
    "EventOverlap": "event=None extra_tensors=None",
    "EventOverlap.current_stream_wait": "self release_handle=False",
    "EventOverlap.register_hook_after_wait": "self hook_after_wait",
    "EventOverlap.__call__": "self release_handle=False",
}
# The same, deep_ep/buffers/elastic.py.
MOE = "num_max_tokens_per_rank=0 hidden=0 num_topk=0 use_fp8_dispatch=False"
EVENTS = (
    "previous_event=None previous_event_before_epilogue=None async_with_compute_stream=False"
    " allocate_on_comm_stream=False"
)
ELASTIC = {
    "ElasticBuffer": f"group num_bytes=None num_cpu_bytes=0 {MOE} deterministic=False allow_hybrid_mode=True"
    " allow_multiple_reduction=True prefer_overlap_with_compute=True sl_idx=3 num_allocated_qps=0"
    " num_cpu_timeout_secs=300 num_gpu_timeout_secs=100 explicitly_destroy=False",
    "ElasticBuffer.destroy": "self",
    "ElasticBuffer.get_buffer_size_hint": "group num_max_tokens_per_rank hidden num_topk=0 use_fp8_dispatch=False"
    " allow_hybrid_mode=True allow_multiple_reduction=True",
    "ElasticBuffer.capture": "",
    "ElasticBuffer.barrier": "self use_comm_stream=True with_cpu_sync=False sequential=True",
    "ElasticBuffer.get_comm_stream": "self",
    "ElasticBuffer.get_physical_domain_size": "self",
    "ElasticBuffer.get_logical_domain_size": "self",
    "ElasticBuffer.get_theoretical_num_sms": "self num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0"
    " sm_read_gbs=200 sm_write_gbs=50",
    "ElasticBuffer.get_theoretical_num_qps": "self num_sms",
    "ElasticBuffer.dispatch": "self x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None"
    " num_experts=None num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 "
    + EVENTS
    + " handle=None do_handle_copy=True do_cpu_sync=None do_expand=False do_zero_padding=False"
    " use_tma_aligned_col_major_sf=False",
    "ElasticBuffer.combine": f"self x handle topk_weights=None bias=None num_sms=0 num_qps=0 {EVENTS}",
    "get_physical_domain_size": "group",
    "get_logical_domain_size": "group allow_hybrid_mode=True",
}
# The hybrid-ep branch (94a9f8f), deep_ep/hybrid_ep_buffer.py.
HYBRID = {
    "HybridEPBuffer": "group hidden_dim max_num_of_tokens_per_rank num_local_experts use_fp8=False"
    " num_sms_dispatch_api=None num_sms_combine_api=None num_sms_preprocessing_api=None num_blocks_permute=None"
    " num_blocks_unpermute=None load_cached_kernels=False use_shared_buffer=True enable_custom_allgather=False"
    " num_of_hybrid_ep_ranks_per_nvlink_domain=None use_mnnvl=None",
    "HybridEPBuffer.empty_jit_cache": "self",
    "HybridEPBuffer.update_template_config": "self hidden_dim=None num_of_tokens_per_rank=None num_local_experts=None"
    " pad_multiple=None use_fp8=None fuse_permute_dispatch=False kwargs",
    "HybridEPBuffer.dispatch": "self hidden scaling_factor=None topk_idx=None topk_weights=None num_of_experts=None"
    " probs=None routing_map=None num_dispatched_tokens_tensor=None num_dispatched_tokens=None handle=None",
    "HybridEPBuffer.combine": "self hidden probs=None handle=None",
    "HybridEPBuffer.dispatch_with_permute": "self hidden topk_idx=None topk_weights=None num_of_experts_per_rank=None"
    " num_of_experts=None use_fp8=None routing_map=None probs=None scaling_factor=None num_permuted_tokens=None"
    " pad_multiple=None handle=None non_blocking=False fuse_permute_dispatch=False num_dispatched_tokens=None"
    " use_host_meta=None",
    "HybridEPBuffer.combine_with_unpermute": "self hidden probs=None handle=None pad_multiple=None"
    " fuse_unpermute_combine=False num_dispatched_tokens=None",
}
# deep_ep 2.5.0 (2578e50a), deep_ep/buffers/{ep,allocator,base}.py, and deep_ep/comm, whose calls are methods.
DEFERRED = "previous_event=None async_with_compute_stream=False allocate_on_comm_stream=False"
EP = {
    "EPBuffer": f"group num_bytes=None {MOE} lb_allocation_plan_or_num_bytes=0 deterministic=False"
    " allow_hybrid_mode=True allow_multiple_reduction=True prefer_overlap_with_compute=True sl_idx=None"
    " num_allocated_qps=0 num_cpu_timeout_secs=300 num_gpu_timeout_secs=100 explicitly_destroy=False",
    **{
        f"EPBuffer.{name}": ELASTIC[f"ElasticBuffer.{name}"]
        for name in (
            *("destroy", "get_buffer_size_hint", "capture", "get_comm_stream", "get_physical_domain_size"),
            *("get_logical_domain_size", "get_theoretical_num_qps"),
        )
    },
    "EPBuffer.barrier": "self wait_comm_stream=True with_cpu_sync=False sequential=True context_idx=None",
    "EPBuffer.get_theoretical_num_sms": "self num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0"
    " sm_read_gbs=0 sm_write_gbs=0",
    "EPBuffer.dispatch": "self x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None"
    f" num_experts=None num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 {DEFERRED} handle=None"
    " do_handle_copy=False do_cpu_sync=None do_expand=False do_zero_padding=False use_tma_aligned_col_major_sf=False"
    " defer_epilogue=False borrow_recv=False",
    "EPBuffer.combine": f"self x handle topk_weights=None bias=None num_sms=0 num_qps=0 {DEFERRED}"
    " defer_epilogue=False",
    "EPBuffer.lb_get_theoretical_num_sms": "self",
    "EPBuffer.lb_prefetch_weights": "self redundant_expert_weights expert_weights redundancy_mapping num_sms=0"
    " previous_event=None",
    "EPBuffer.lb_reduce_grads": "self redundant_expert_grads expert_grads redundancy_mapping num_sms=0"
    " previous_event=None",
    "EPBuffer.print_memory_usage": "self",
    "BufferAllocator": "",
    "BufferAllocator.allocate": "self shape dtype",
    "BufferAllocator.materialize": "self storage",
    "comm.barrier": "buffer wait_comm_stream=True with_cpu_sync=False sequential=True context_idx=None",
    "comm.get_comm_stream": "buffer",
    "comm.get_physical_domain_size": "group_or_buffer",
    "comm.get_logical_domain_size": "group_or_buffer allow_hybrid_mode=None",
    "comm.destroy_all_managed_nccl_comm": "",
    "destroy_all_managed_nccl_comm": "",
    "get_num_allocation_alignment": "",
    "get_num_rdma_alignment": "",
    "get_num_tma_alignment": "",
}
CALLS = LEGACY | ELASTIC | HYBRID | EP
# nixl_ep (8770b655), examples/device/ep/nixl_ep/buffer.py.
NIXL = {
    "Buffer": "disable_ll_nvlink=False explicitly_destroy=False rank=0 low_latency_mode=True group=None comm=None"
    " tcp_store_group=None timeout_ms=30000",
    "Buffer.destroy": "self",
    "Buffer.is_sm90_compiled": "",
    "Buffer.set_num_sms": "new_num_sms",
    "Buffer.capture": "",
    "Buffer.get_low_latency_buffer_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "Buffer.get_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "Buffer.get_comm_stream": "self",
    "Buffer.get_local_buffer_tensor": "self dtype size=None offset=0 use_rdma_buffer=False",
    "Buffer.get_dispatch_config": "num_ranks",
    "Buffer.get_combine_config": "num_ranks",
    "Buffer.low_latency_dispatch": "self x topk_idx num_max_dispatch_tokens_per_rank num_experts=None"
    " cumulative_local_expert_recv_stats=None dispatch_wait_recv_cost_stats=None use_fp8=True round_scale=False"
    " use_ue8m0=False async_finish=False return_recv_hook=False",
    "Buffer.low_latency_combine": LEGACY["Buffer.low_latency_combine"],
    "Buffer.update_mask_buffer": "self rank_to_mask mask=False",
    "Buffer.query_mask_buffer": "self mask_status",
    "Buffer.clean_mask_buffer": "self",
    "Buffer.get_next_combine_buffer": "self handle",
    "Buffer.update_memory_buffers": "self num_ranks num_experts_per_rank num_rdma_bytes num_nvl_bytes=0",
    "Buffer.set_tcp_store_group": "self tcp_store_group",
    "Buffer.connect_ranks": "self remote_ranks activate=True",
    "Buffer.disconnect_ranks": "self remote_ranks",
    "Buffer.barrier": "self",
    "Config": LEGACY["Config"],
    "EventOverlap": LEGACY["EventOverlap"],
}
NIXL |= {f"Buffer.{name}": NIXL[f"Buffer.low_latency_{name}"] for name in ("dispatch", "combine")}
# Calls that are here to say that they are not.
REFUSED = {
    deep_ep.Buffer: "internode_dispatch internode_combine dispatch_pcie combine_pcie",
    deep_ep.ElasticBuffer: "get_engram_storage_size_hint engram_write engram_fetch get_pp_buffer_size_hint"
    " pp_set_config pp_send pp_recv get_agrs_num_max_session_bytes get_agrs_buffer_size_hint agrs_set_config"
    " create_agrs_session destroy_agrs_session agrs_new_session agrs_get_inplace_tensor all_gather",
    nixl_ep.Buffer: "get_dispatch_layout ht_dispatch ht_combine",
}
# Attributes of objects; `runtime` is None after destroy().
ATTRIBUTES = {
    deep_ep.Buffer: "group rank group_size num_nvl_bytes num_rdma_bytes low_latency_mode explicitly_destroy"
    " enable_shrink runtime num_sms",
    deep_ep.ElasticBuffer: "group num_bytes num_max_tokens_per_rank num_ranks rank_idx num_rdma_ranks num_nvlink_ranks"
    " num_scaleout_ranks num_scaleup_ranks scaleout_rank_idx scaleup_rank_idx deterministic allow_hybrid_mode"
    " allow_multiple_reduction prefer_overlap_with_compute num_allocated_qps explicitly_destroy runtime",
    deep_ep.EPBuffer: "group num_bytes num_lb_bytes num_max_tokens_per_rank num_ranks rank_idx num_rdma_ranks"
    " num_nvlink_ranks num_scaleout_ranks num_scaleup_ranks scaleout_rank_idx scaleup_rank_idx deterministic"
    " allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute num_allocated_qps explicitly_destroy"
    " runtime context main_context",
    deep_ep.HybridEPBuffer: "group rank group_size local_rank node_rank num_of_nodes configurer runtime"
    " num_of_hybrid_ep_ranks_per_nvlink_domain",
    nixl_ep.Buffer: "rank group_size low_latency_mode timeout_ms explicitly_destroy group comm tcp_store_group"
    " num_nvl_bytes num_rdma_bytes runtime num_sms",
}
OURS = {  # what deep_ep does not have, after what it has
    "Buffer": "use_fabric=False allow_nvlink_for_normal_mode=True",  # of forks, and of the hybrid-ep branch
    # Arguments of newer versions and forks come after ours, by name.
    "Buffer.low_latency_dispatch": "topk_weights=None use_nvfp4=False use_ue8m0_for_sf=False"
    " x_global_scale=None num_sms=None",
    "Buffer.low_latency_combine": "overlap=False src_signals=None src_signal_expect_value=None packed_recv_count=None"
    " comp_signal=None block_m=None threshold=None num_sms=None",
}


def written(call: Any) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    return [p.name if p.default is inspect.Parameter.empty else f"{p.name}={p.default}" for p in parameters]


def called(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.mark.parametrize(("name", "theirs"), CALLS.items(), ids=CALLS)
def test_a_call_is_written_as_there(name: str, theirs: str) -> None:
    assert written(called(deep_ep, name)) == theirs.split() + OURS.get(name, "").split()


@pytest.mark.parametrize(("name", "theirs"), NIXL.items(), ids=NIXL)
def test_a_call_of_nixl_ep_is_written_as_there(name: str, theirs: str) -> None:
    assert written(called(nixl_ep, name)) == theirs.split()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in REFUSED.items() for name in names.split()])
def test_a_call_that_is_not_here_says_so(kind: Any, name: str) -> None:
    with pytest.raises(moecomm.Unsupported, match=name):
        getattr(kind, name)(1, several=2)


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_objects_have_the_same_attributes(kind: Any) -> None:
    if kind is nixl_ep.Buffer:
        buffer = kind(rank=0, tcp_store_group=dist.HashStore())
    else:
        buffer = kind("self", 64, 4, 2) if kind is deep_ep.HybridEPBuffer else kind("self")
    missing = [name for name in ATTRIBUTES[kind].split() if not hasattr(buffer, name)]
    assert not missing
    assert buffer.runtime is not None
    if kind is deep_ep.HybridEPBuffer:
        return
    buffer.destroy()
    assert buffer.runtime is None


@pytest.mark.parametrize("kind", [deep_ep.ElasticBuffer, deep_ep.EPBuffer])
def test_a_setting_is_the_attribute_of_its_name(kind: Any) -> None:
    settings = {
        "num_max_tokens_per_rank": 9,
        "deterministic": True,
        "allow_hybrid_mode": False,
        "allow_multiple_reduction": False,
        "prefer_overlap_with_compute": False,
        "num_allocated_qps": 7,
        "explicitly_destroy": True,
    }
    usual = {name: getattr(kind("self"), name) for name in settings}
    for name, value in settings.items():
        buffer = kind("self", **{name: value})
        assert {other: getattr(buffer, other) for other in settings} == {**usual, name: value}


def test_attributes_are_those_of_deep_ep() -> None:
    assert deep_ep.Buffer.num_sms == 20
    assert str(deep_ep.topk_idx_t) == "torch.int64"
    assert set(deep_ep.__all__) == {name for name in vars(deep_ep) if name in deep_ep.__all__}
