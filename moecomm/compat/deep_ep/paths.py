"""Import paths of deep_ep, and what moecomm answers at each of them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from moecomm.compat.deep_ep.pool import not_here

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


def modules(package: ModuleType, answers: Mapping[str, Any]) -> dict[str, ModuleType]:
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
                setattr(module, name, answers[name] if name in answers else not_here(whole))
    for path in PATHS:
        parent, _, last = path.rpartition(".")
        if not hasattr(below[parent], last):  # else a module of the package, or comm.barrier, which is a function
            setattr(below[parent], last, below[path])
    del below[""]
    return below
