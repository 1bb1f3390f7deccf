"""NIXL-EP's interface over moecomm: low-latency rounds whose ranks come and go.

    import moecomm.compat.nixl_ep as nixl_ep

or, for code that imports nixl_ep itself, `moecomm.compat.install_as_nixl_ep()`.

What NIXL-EP has and this has not; each raises Unsupported, or differs as it says:

| not supported | instead |
| --- | --- |
| `Buffer(comm=)`, metadata over etcd | `tcp_store_group=`, or the store of `group=` |
| `Buffer(low_latency_mode=False)`, `get_dispatch_layout`, `ht_*` | `moecomm.compat.deep_ep.Buffer` |
| `Buffer(disable_ll_nvlink=True)` | nothing |
| `connect_ranks` by some of the ranks | all that are connected then meet in their next round |
| a graph captured while this rank masks all others | capture before or after |
| a call that loses a rank goes on | if all lose it in one call; else, and on GPUs, an error, and the next call works |
| `dispatch_wait_recv_cost_stats`, `combine_wait_recv_cost_stats` | `Buffer.stats()` of moecomm |
| `R` of shapes: the capacity | the ranks that have met last: see `connect_ranks` |
"""

from __future__ import annotations

import torch

from moecomm.compat.deep_ep import event
from moecomm.compat.deep_ep.config import Config
from moecomm.compat.deep_ep.event import EventHandle, EventOverlap
from moecomm.compat.nixl_ep import buffer
from moecomm.compat.nixl_ep.buffer import Buffer

topk_idx_t = torch.int64
MODULES = {"buffer": buffer, "utils": event}  # import paths below nixl_ep

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
