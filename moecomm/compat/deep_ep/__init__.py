"""deep_ep's interface over moecomm: see `moecomm.compat.install_as_deep_ep`.

What deep_ep has and this has not; each raises Unsupported, or differs as it says:

| not supported | instead |
| --- | --- |
| `Buffer(comm=)` | a torch.distributed group |
| `Buffer.internode_dispatch`, `internode_combine` | `dispatch` and `combine` serve every rank |
| `get_local_buffer_tensor(size=)`, `(offset=)` | nothing; without them an empty tensor |
| `low_latency_dispatch(dispatch_wait_recv_cost_stats=)` | nothing |
| `low_latency_combine(combine_wait_recv_cost_stats=)` | nothing |
| `low_latency_combine(use_logfmt=True)` | bfloat16 rows, added in float32 |
| `low_latency_update_mask_buffer(mask=True)` | `PeerLost` on every rank that is left |
| handles taken apart | a handle is passed back as it is: `BadInput` for a tuple of its items |
| `rank_prefix_matrix`: columns of other ranks | -1 |
| `combine(topk_weights=)` beside `recv_topk_idx == -1` | such entries are not added |
"""

from __future__ import annotations

import torch

from moecomm.compat.deep_ep import buffer, event
from moecomm.compat.deep_ep.buffer import Buffer
from moecomm.compat.deep_ep.config import Config
from moecomm.compat.deep_ep.event import EventHandle, EventOverlap

__version__ = "2.1.0"  # of the interface
topk_idx_t = torch.int64
utils = event  # deep_ep.utils has the events
MODULES = {"buffer": buffer, "utils": event, "utils.event": event}  # import paths below deep_ep

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
