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
| `EPBuffer.dispatch(borrow_recv=True)`, `DispatchRecvView` | nothing: rows are in the window without it, too |
| `BucketBuffer`, `BucketSession` | a `moecomm.Window`, or torch.distributed |
| `comm.NCCLCommHandle`, `comm.get_nccl_comm_handle` | nothing: a buffer makes no communicator of NCCL |
| `utils.envs`, but sizes of domains; `utils.find_pkgs`, `utils.gate`, `utils.math`, `utils.refs`, | nothing |
| `utils.semantic`, `utils.testing`, `check_nccl_so`, `find_cuda_home`, `find_nccl_root`, `init_jit` | nothing |
| `lb_prefetch_weights`, `lb_reduce_grads` in a CUDA graph | outside of it: the host reads the mapping |
| `HybridEPBuffer.dispatch(handle=)`, `dispatch_with_permute(handle=)` with `probs` or `topk_weights` | rows only |
| a row of `routing_map` with more than 32 experts | `BadInput`; beside `num_permuted_tokens` a call later |
"""

from __future__ import annotations

import sys

import torch

from moecomm.compat.deep_ep import comm, paths
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
from moecomm.compat.deep_ep.hybrid import HybridEPBuffer, indices_to_map

__version__ = "2.1.0"  # of the interface
topk_idx_t = torch.int64
__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "BufferBase",
    "Config",
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


MODULES = paths.modules(sys.modules[__name__], {**vars(comm), "indices_to_map": indices_to_map, **globals()})
