"""vLLM's all2all managers: what a communicator makes once a process, and layers get their Buffers from."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from moecomm.base.validation import check_integer
from moecomm.compat.deep_ep.pool import Pool
from moecomm.errors import BadInput, Excluded, RoundFailed, Unsupported
from moecomm.ranks.opening import gather
from moecomm.rounds.state import CollectiveCall

# Ranks drift apart by whatever one of them does alone: loading weights, compiling kernels.
_TIMEOUT_S = 600.0
_NO_MASKS = "rounds of deepep_high_throughput mask no rank; vLLM's fault tolerance has deepep_low_latency and nixl_ep"
_ROUND_S = 100.0  # with fault tolerance: until a silent rank is masked, as in DeepEP's kernels


class OpenedBuffers:
    """The result of get_handle(): the Buffers of a manager, opened by the first layer with their sizes.

    Attributes:
        pool: of the Buffers.  `masks`: batched rounds mask ranks that are lost.
        num_sms: multiprocessors of a round; None: the table of the backend.
        layers: what layers keep of their last dispatches: see steps.Slots.
    """

    def __init__(self, group: Any, masks: bool = False) -> None:
        self.pool = Pool(group, timeout_s=_TIMEOUT_S, uneven=True, masks=masks, round_s=_ROUND_S)
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
        self.support_fault_tolerance = self._masks()
        self._rounds = OpenedBuffers(cpu_group, self.support_fault_tolerance)

    def _masks(self) -> bool:
        return False

    def get_handle(self, kwargs: dict[str, Any]) -> OpenedBuffers:
        """Return one object for every layer; the first round of a layer sets the sizes."""
        return self._rounds

    def set_num_sms(self, num_sms: int) -> None:
        """Limit the multiprocessors of every later round; all of them: no limit."""
        self._rounds.num_sms = num_sms if num_sms < _multiprocessors() else None

    def dispatch(self, *args: Any, **named: Any) -> Any:
        """Raise Unsupported: layers go through prepare and finalize."""
        raise Unsupported("all2all_manager.dispatch: layers of moecomm go through prepare and finalize")

    def dispatch_router_logits(self, *args: Any, **named: Any) -> Any:
        """Unsupported, likewise."""
        raise Unsupported(
            "all2all_manager.dispatch_router_logits: experts that route by themselves need another backend"
        )

    def combine(self, *args: Any, **named: Any) -> Any:
        """Unsupported, likewise."""
        raise Unsupported("all2all_manager.combine: layers of moecomm go through prepare and finalize")

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
    """Manager of the standard activation format.  vLLM has no fault tolerance with it."""

    def query_active_mask(self) -> Any:
        """Raise Unsupported, as query_fault() and clean_buffers() do."""
        raise Unsupported(f"all2all_manager.query_active_mask: {_NO_MASKS}")

    def query_fault(self) -> Any:
        """Raise Unsupported: a lost rank is an error on all others."""
        raise Unsupported(f"all2all_manager.query_fault: {_NO_MASKS}")

    def clean_buffers(self) -> None:
        """Raise Unsupported, as query_active_mask() does."""
        raise Unsupported(f"all2all_manager.clean_buffers: {_NO_MASKS}")


class BatchedManager(_VllmManager):
    """Manager of the batched activation format.

    With vLLM's `enable_fault_tolerance` its Buffers mask ranks that are lost, and it has the calls by which vLLM asks
    and changes masks.  Each rank makes them alone, between two steps; ranks agree on changes in their next step, as
    PendingMasks says.  Without it, they are Unsupported.
    """

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self._known: set[int] = set()  # masked at the last recovery

    def _masks(self) -> bool:
        config = get_current_vllm_config().parallel_config
        return bool(getattr(config, "enable_fault_tolerance", False))

    def query_active_mask(self) -> torch.Tensor:
        """int32 `[ranks]`, on the device of the rounds: 1 for each rank that is masked in this rank's view, else 0."""
        pool = self._masking("query_active_mask")
        masked = pool.masked()
        mask = torch.tensor([rank in masked for rank in range(pool.ranks.ranks)], dtype=torch.int32)
        opened = pool.low_latency()
        return mask.to(opened[0].device) if opened else mask

    def query_fault(self) -> torch.Tensor:
        """Return a bool tensor: a rank is masked, or a round has failed, since clean_buffers() or update_mask().

        On GPUs it does not wait for the step, so a failure may show in the next one.  A pending mask becomes agreed
        here, too: steps that replay a graph make no call of the host.

        Raises:
            As PendingMasks.agree().
        """
        pool = self._masking("query_fault")
        failed = False
        for buffer in pool.low_latency():
            pool.agree(buffer)
            try:
                with CollectiveCall(buffer.rounds, 0):
                    buffer.rounds.raise_failure()  # masks ranks that are lost
            except (RoundFailed, Excluded):
                failed = True
        return torch.tensor(failed or pool.masked() != self._known)

    def update_mask(self, rank: int, masked: bool = True) -> None:
        """Mask a rank, or take it in again, from the next step on: vLLM after 0.33 calls it as it scales down.

        Raises:
            BadInput: this rank is to be masked.
        """
        pool = self._masking("update_mask")
        check_integer("rank", rank, 0, pool.ranks.ranks - 1)
        if masked and rank == pool.ranks.rank:
            raise BadInput("rank", f"this rank, {rank}", "another one")
        for pending in pool.pending.values():
            pending.want(rank, masked)
        self._known = pool.masked()

    def clean_buffers(self) -> None:
        """Take all masked ranks in again, from the next step on, of which each makes this call.

        A rank that does not come then is masked again, and query_fault() says so.  Nothing has to be zeroed: rounds
        after an agreement see nothing of those before it.
        """
        for slots in self._rounds.layers:
            slots.clear()
        for pending in self._masking("clean_buffers").pending.values():
            pending.want_all()
        self._known = set()

    def _masking(self, call: str) -> Pool:
        if not self.support_fault_tolerance:
            raise Unsupported(f"all2all_manager.{call} without enable_fault_tolerance: no rank is masked")
        return self._rounds.pool
