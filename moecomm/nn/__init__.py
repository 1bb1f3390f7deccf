"""torch modules of a mixture-of-experts layer over several ranks."""

from moecomm.nn.buffers import shared_buffer
from moecomm.nn.expert_parallel import ExpertParallel
from moecomm.nn.experts import Experts
from moecomm.nn.gate import Gate
from moecomm.nn.state import gather_state, shard_state
from moecomm.nn.training import clip_grad_norm_, expert_parameters, mark_experts

__all__ = [
    "ExpertParallel",
    "Experts",
    "Gate",
    "clip_grad_norm_",
    "expert_parameters",
    "gather_state",
    "mark_experts",
    "shard_state",
    "shared_buffer",
]
