"""vLLM's all2all managers: what a communicator makes once a process, and layers get their Buffers from."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from moecomm.compat.deep_ep.pool import Pool
from moecomm.errors import Unsupported
from moecomm.ranks.opening import gather

# Ranks drift apart by whatever one of them does alone: loading weights, compiling kernels.
_TIMEOUT_S = 600.0


class OpenedBuffers:
    """The result of get_handle(): the Buffers of a manager, opened by the first layer with their sizes.

    Attributes:
        pool: of the Buffers.
        num_sms: multiprocessors of a round; None: the table of the backend.
        layers: what layers keep of their last dispatches: see steps.Slots.
    """

    def __init__(self, group: Any) -> None:
        self.pool = Pool(group, timeout_s=_TIMEOUT_S, uneven=True)
        self.layers: WeakSet[Any] = WeakSet()
        self.num_sms: int | None = None
        self._alike: Any = WeakTensorKeyDictionary()

    def is_alike(self, scale: torch.Tensor) -> bool:
        """Return whether all ranks have the same scale.

        Collective, on the host, when it is first asked of a tensor: in vLLM's profiling run.
        """
        found: bool | None = self._alike.get(scale)
        if found is None:
            here = scale.detach().double().cpu().numpy().tobytes()
            found = self._alike[scale] = len(set(gather(self.pool.ranks, here, _TIMEOUT_S))) == 1
        return found


class _VllmManager(All2AllManagerBase):  # type: ignore[misc]
    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self._rounds = OpenedBuffers(cpu_group)

    def get_handle(self, kwargs: dict[str, Any]) -> OpenedBuffers:
        """Return one object for every layer; the first round of a layer sets the sizes."""
        return self._rounds

    def set_num_sms(self, num_sms: int) -> None:
        """Limits the multiprocessors of every round from now on; with all of them there is no limit."""
        self._rounds.num_sms = num_sms if num_sms < _multiprocessors() else None

    def dispatch(self, *args: Any, **named: Any) -> Any:
        """Unsupported: layers go through prepare and finalize."""
        raise Unsupported("all2all_manager.dispatch: layers of moecomm go through prepare and finalize")

    def dispatch_router_logits(self, *args: Any, **named: Any) -> Any:
        """Unsupported, likewise."""
        raise Unsupported(
            "all2all_manager.dispatch_router_logits: experts that route by themselves need another backend"
        )

    def combine(self, *args: Any, **named: Any) -> Any:
        """Unsupported, likewise."""
        raise Unsupported("all2all_manager.combine: layers of moecomm go through prepare and finalize")

    def query_active_mask(self) -> Any:
        """Unsupported, as query_fault() and clean_buffers(): vLLM masks and unmasks on each rank alone."""
        raise Unsupported("all2all_manager.query_active_mask: moecomm's ranks agree on masks, see Buffer.mask")

    def query_fault(self) -> Any:
        """Unsupported: a rank that is lost is an error of all others."""
        raise Unsupported("all2all_manager.query_fault: a rank that is lost is an error of all others")

    def clean_buffers(self) -> None:
        """Unsupported, as query_active_mask()."""
        raise Unsupported("all2all_manager.clean_buffers: moecomm's ranks agree on masks, see Buffer.unmask")

    def checkpoint_prepare(self) -> None:
        """Give the memory of the Buffers' outputs back, between two steps.  Collective.

        Raises:
            BadInput: a tensor of an earlier step is still alive on some rank.
            Unsupported: windows of NCCL or NVSHMEM.
        """
        for slots in self._rounds.layers:
            slots.clear()
        self._rounds.pool.release_memory()

    def checkpoint_restore(self) -> None:
        """Take the memory again, at the same addresses: captured graphs replay.  Collective."""
        self._rounds.pool.restore()

    def destroy(self) -> None:
        """Close the Buffers.  Idempotent."""
        self._rounds.pool.close()


def _multiprocessors() -> int:
    if not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


class StandardManager(_VllmManager):
    """Manager of the standard activation format."""


class BatchedManager(_VllmManager):
    """Manager of the batched activation format."""
