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
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from moecomm.compat.deep_ep import comm
from moecomm.compat.deep_ep.arguments import not_here
from moecomm.compat.deep_ep.buffer import Buffer
from moecomm.compat.deep_ep.comm import BufferBase, destroy_all_managed_nccl_comm
from moecomm.compat.deep_ep.elastic import ElasticBuffer
from moecomm.compat.deep_ep.ep import (
    BufferAllocator,
    EPBuffer,
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
)
from moecomm.compat.deep_ep.event import Config, EventHandle, EventOverlap
from moecomm.compat.deep_ep.handles import EPHandle
from moecomm.compat.deep_ep.hybrid import HybridEPBuffer, indices_to_map

__version__ = "2.1.0"  # of the interface
topk_idx_t = torch.int64
__all__ = [
    "Buffer",
    "BufferAllocator",
    "BufferBase",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
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


_COMM = "NCCLCommHandle destroy_all_managed_nccl_comm get_nccl_comm_handle"
_SIZES = "get_logical_domain_size get_physical_domain_size"
# Public names by module, of deep_ep 1.2.1, its branch hybrid-ep (94a9f8f), 2.1.0 (dd758ca) and 2.5.0 (2578e50a).
PATHS = {
    "": "BucketBuffer BucketSession Buffer BufferAllocator BufferBase Config EPBuffer EPHandle ElasticBuffer"
    " EngramBuffer EventHandle EventOverlap HybridEPBuffer PPBuffer check_nccl_so comm destroy_all_managed_nccl_comm"
    " find_cuda_home find_nccl_root get_num_allocation_alignment get_num_rdma_alignment get_num_tma_alignment init_jit"
    f" topk_idx_t {_SIZES}",
    "buffer": "Buffer",
    "buffers": "",
    "buffers.allocator": "BufferAllocator",
    "buffers.base": "BufferBase",
    "buffers.bucket": "BucketBuffer BucketSession",
    "buffers.elastic": "EPHandle ElasticBuffer",
    "buffers.engram": "EngramBuffer",
    "buffers.ep": "EPBuffer EPHandle",
    "buffers.legacy": "Buffer",
    "buffers.pp": "PPBuffer",
    "buffers.recv_view": "DispatchRecvView",
    "comm": f"{_COMM} barrier get_comm_stream {_SIZES}",
    "comm.barrier": "barrier",
    "comm.handle": f"{_COMM} {_SIZES}",
    "comm.stream": "get_comm_stream",
    "hybrid_ep_buffer": "HybridEPBuffer indices_to_map",
    "utils": "Config EventHandle EventOverlap check_nvlink_connections",
    "utils.comm": _COMM,
    "utils.envs": "EnvOverride check_fast_rdma_atomic_support check_nvlink_connections check_torch_deterministic"
    " dist_print get_global_seed get_local_seed get_nvlink_gbs get_rdma_gbs get_sm_read_gbs get_sm_write_gbs init_dist"
    f" init_seed {_SIZES}",
    "utils.event": "EventHandle EventOverlap",
    "utils.find_pkgs": "find_nccl_root find_nvshmem_root find_pkg_root get_nccl_lib_name",
    "utils.gate": "generate_rank_count generate_topk_idx get_precise_unbalanced_scores get_random_unbalanced_scores"
    " get_scores_by_factor get_unbalanced_scores map_unbalanced_ratio_to_factor",
    "utils.math": "align calc_diff ceil_div count_bytes create_grouped_scores hash_tensor hash_tensors inplace_unique"
    " per_token_cast_back per_token_cast_to_fp8 safe_div",
    "utils.refs": "combine dispatch generate_pre_combine_data ordered_accumulate",
    "utils.semantic": "value_or weak_lru",
    "utils.testing": "bench bench_kineto empty_suppress flush_l2_cache parse_num_bytes suppress_stdout_stderr",
}


def _modules(package: ModuleType, answers: Mapping[str, Any]) -> dict[str, ModuleType]:
    """Return the modules below `package`, by path.  Calls that `answers` lacks raise Unsupported, and name themselves.

    Modules that the package has are taken as they are.
    """
    below = {"": package}
    for path, names in PATHS.items():
        module = below[path] = vars(package).get(path) or below.get(path) or ModuleType(f"deep_ep.{path}")
        if module.__spec__ is None:  # which importlib.util.find_spec asks for
            is_package = any(other.startswith(f"{path}.") for other in PATHS)
            module.__spec__ = ModuleSpec(module.__name__, None, is_package=is_package)
        for name in names.split():
            if not hasattr(module, name):
                whole = f"deep_ep.{path}.{name}" if path else f"deep_ep.{name}"
                refusal = type(name, (), {"__init__": not_here(whole)}) if name[0].isupper() else not_here(whole)
                setattr(module, name, answers.get(name, refusal))
    for path in PATHS:
        parent, _, last = path.rpartition(".")
        if not hasattr(below[parent], last):  # else a module of the package, or comm.barrier, which is a function
            setattr(below[parent], last, below[path])
    del below[""]
    return below


MODULES = _modules(sys.modules[__name__], {**vars(comm), "indices_to_map": indices_to_map, **globals()})
