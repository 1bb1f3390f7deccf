"""deep_ep's interface over moecomm: see `moecomm.compat.install_as_deep_ep`.

What deep_ep has and this has not; each raises Unsupported, or differs as it says:

| not supported | instead |
| --- | --- |
| `Buffer(comm=)` | a torch.distributed group |
| `Buffer.internode_dispatch`, `internode_combine` | `dispatch` and `combine` serve every rank |
| `Buffer.dispatch_pcie`, `combine_pcie` | `dispatch`, `combine` |
| `get_local_buffer_tensor(size=)`, `(offset=)` | nothing; without them an empty tensor |
| `dispatch_wait_recv_cost_stats`, `combine_wait_recv_cost_stats` in cycles | nanoseconds, of one thread |
| `low_latency_dispatch(use_ue8m0_for_sf=True)` | NVFP4 rows with scales in e4m3 |
| `low_latency_dispatch(num_sms=)`, `low_latency_combine(num_sms=)` | as many as the round takes |
| `low_latency_combine(overlap=True)`, `(src_signals=)`, `(src_signal_expect_value=)`, | nothing |
| `(packed_recv_count=)`, `(comp_signal=)`, `(block_m=)`, `(threshold=)` of the same | nothing |
| `low_latency_combine(use_logfmt=True)` | bfloat16 rows, added in float32 |
| `low_latency_update_mask_buffer`, `low_latency_clean_mask_buffer` by one rank alone | with `enable_shrink=True` |
| handles taken apart, or made by hand | a handle is passed back as it is: `BadInput` for a tuple of its items |
| `rank_prefix_matrix`: columns of other ranks | -1 |
| `ElasticBuffer(num_cpu_bytes=)` | GPU memory only |
| `ElasticBuffer.engram_*`, `pp_*`, `agrs_*`, `all_gather` | nothing |
| `ElasticBuffer.dispatch(handle=)` with another `do_expand` | the handle's |
| `ElasticBuffer`: `recv_topk_weights` beside `recv_topk_idx == -1` | 0 |
| `EngramBuffer`, `PPBuffer` | nothing |
| `BucketBuffer`, `BucketSession` | a `moecomm.Window`, or torch.distributed |
| `comm.NCCLCommHandle`, `comm.get_nccl_comm_handle` | nothing: a buffer makes no communicator of NCCL |
| `lb_prefetch_weights`, `lb_reduce_grads` in a CUDA graph | outside of it: the host reads the mapping |
| `HybridEPBuffer.dispatch(handle=)`, `dispatch_with_permute(handle=)` with `probs` or `topk_weights` | rows only |
| a row of `routing_map` with more than 32 experts | `BadInput`; beside `num_permuted_tokens` a call later |
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from moecomm.compat.deep_ep import allocator, base, buffer, comm, elastic_rounds, ep, event, hybrid, recv_view
from moecomm.compat.deep_ep.allocator import (
    BufferAllocator,
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
)
from moecomm.compat.deep_ep.base import BufferBase
from moecomm.compat.deep_ep.buffer import Buffer
from moecomm.compat.deep_ep.comm import destroy_all_managed_nccl_comm
from moecomm.compat.deep_ep.config import Config
from moecomm.compat.deep_ep.elastic_rounds import ElasticBuffer
from moecomm.compat.deep_ep.ep import BucketBuffer, BucketSession, EngramBuffer, EPBuffer, PPBuffer
from moecomm.compat.deep_ep.ep_handle import EPHandle
from moecomm.compat.deep_ep.event import EventHandle, EventOverlap
from moecomm.compat.deep_ep.hybrid import HybridEPBuffer
from moecomm.compat.deep_ep.recv_view import DispatchRecvView

__version__ = "2.1.0"  # of the interface
topk_idx_t = torch.int64
utils = event  # deep_ep.utils has the events
buffers = ModuleType("deep_ep.buffers")  # deep_ep 2's path to its classes
vars(buffers).update(legacy=buffer, elastic=elastic_rounds, ep=ep, allocator=allocator, base=base, recv_view=recv_view)
buffers.__spec__ = ModuleSpec("deep_ep.buffers", None, is_package=True)  # which importlib.util.find_spec asks for
MODULES = {  # import paths below deep_ep
    "buffer": buffer,
    "buffers": buffers,
    "buffers.legacy": buffer,
    "buffers.elastic": elastic_rounds,
    "buffers.ep": ep,
    "buffers.allocator": allocator,
    "buffers.base": base,
    "buffers.recv_view": recv_view,
    "comm": comm,
    "hybrid_ep_buffer": hybrid,
    "utils": event,
    "utils.event": event,
}

__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "BufferBase",
    "Config",
    "DispatchRecvView",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "PPBuffer",
    "comm",
    "destroy_all_managed_nccl_comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "topk_idx_t",
]


def get_physical_domain_size(group: object) -> tuple[int, int]:
    """Return the numbers of RDMA ranks (1) and NVLink ranks (all) of a group or a buffer of deep_ep 2."""
    return comm.get_physical_domain_size(group)


def get_logical_domain_size(group: object, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return the numbers of scale-out ranks (1) and scale-up ranks (all) of a group or a buffer of deep_ep 2."""
    return comm.get_logical_domain_size(group)
