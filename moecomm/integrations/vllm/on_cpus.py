"""`deepep_high_throughput` in CPU builds of vLLM, whose communicator and experts know another backend alone."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config

from moecomm.dispatch.routed import Routed
from moecomm.integrations.vllm.managers import BatchedManager, StandardManager
from moecomm.integrations.vllm.standard import StandardPrepareAndFinalize

_MANAGERS = {"deepep_high_throughput": StandardManager, "deepep_low_latency": BatchedManager}


class PrepareAndFinalizeOnCpus(StandardPrepareAndFinalize):
    """The standard format as experts on CPUs read it: they have no map of experts, so ids are of this rank's experts.

    An id of another rank's expert is 0, with a weight of 0.
    """

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int32."""
        return torch.int32

    def _receive(
        self, routed: Routed, cast_to: torch.dtype | None, num_experts: int, quant_config: Any, defer_input_quant: bool
    ) -> Any:
        *received, _, weights = super()._receive(routed, cast_to, num_experts, quant_config, defer_input_quant)
        assert routed.topk_idx is not None
        return *received, routed.topk_idx.clamp(min=0).int(), weights


class ManagerOnCpus:
    """The factory that a CPU communicator finds as AgRsAll2AllManager, the only manager that it makes.

    Args:
        theirs: AgRsAll2AllManager, for all other backends.
    """

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(self, cpu_group: Any, tcp_store_group: Any = None) -> Any:
        """Return moecomm's manager of the backend that was asked for, if it has one."""
        asked = get_current_vllm_config().parallel_config.all2all_backend
        return _MANAGERS.get(asked, self.theirs)(cpu_group, tcp_store_group)
