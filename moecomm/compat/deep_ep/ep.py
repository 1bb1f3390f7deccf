"""deep_ep.EPBuffer, the interface of deep_ep 2.5, which has neither ElasticBuffer nor the classes of V1.

Redundant experts are copies of experts of other ranks, in memory that all ranks reach.  A mapping says which expert
each redundant slot of each rank has.  Owners write weights to these slots, and read gradients from them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.validation import check_dense, check_flags, check_integer, check_shape
from moecomm.compat.deep_ep.arguments import check_dimensions, described, refuse
from moecomm.compat.deep_ep.comm import check_context
from moecomm.compat.deep_ep.elastic import ElasticRounds
from moecomm.compat.deep_ep.event import EventOverlap, finished, uses_cuda, wait_for
from moecomm.compat.deep_ep.handles import EPHandle
from moecomm.compat.deep_ep.pool import counted_by_pool
from moecomm.errors import BadInput, Unsupported
from moecomm.weights.exchange import SharedTensor
from moecomm.window import Window

_ALLOCATION, _RDMA, _TMA = 2 << 20, 64, 32  # bytes


class BufferAllocator:
    """Plan of tensors that get their memory when a buffer opens.

    Attributes:
        alignment: alignment of a tensor, in bytes.
        num_bytes: bytes of all tensors, each aligned.
        allocations: tensors and their offsets in bytes.
        materialized: True once the tensors have memory.
    """

    def __init__(self) -> None:
        self.alignment = _ALLOCATION
        self.allocations: list[tuple[torch.Tensor, int]] = []
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the device "meta", which materialize() gives memory.

        Raises:
            BadInput: the plan is materialized; a shape or dtype that can't be.
        """
        self._require_plan()
        if not isinstance(dtype, torch.dtype):
            raise BadInput("dtype", repr(dtype), "a dtype of torch")
        tensor = torch.empty(check_shape("shape", shape), dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        self.num_bytes += -(-tensor.nbytes // self.alignment) * self.alignment
        return tensor

    def materialize(self, storage: torch.Tensor) -> None:
        """Give the tensors their memory in `storage`, uint8 `[num_bytes]`.

        Raises:
            BadInput: the plan is materialized, or the storage is another one.
        """
        self._require_plan()
        check_dimensions("storage", storage, "num_bytes")
        check_tensor("storage", storage, device=storage.device, dtypes=(torch.uint8,), shape=(self.num_bytes,))
        if not storage.is_contiguous() or storage.is_meta:
            raise BadInput("storage", "a tensor with gaps, or without memory", "a contiguous one")
        for tensor, offset in self.allocations:
            memory = storage.narrow(0, offset, tensor.nbytes)
            torch.utils.swap_tensors(tensor, memory.view(tensor.dtype).view(tensor.shape))  # type: ignore[no-untyped-call]
        self.materialized = True

    def _require_plan(self) -> None:
        if self.materialized:
            raise BadInput("BufferAllocator", "a plan whose tensors have memory", "another plan")


def planned(argument: str, plan_or_num_bytes: BufferAllocator | int) -> tuple[BufferAllocator | None, int]:
    """Return the plan, None for a number of bytes, and the bytes.

    Raises:
        BadInput: a plan whose tensors have memory, or a size that is no multiple of the allocation alignment.
    """
    if isinstance(plan_or_num_bytes, BufferAllocator):
        if plan_or_num_bytes.materialized:
            raise BadInput(argument, "a plan whose tensors have memory", "another plan")
        return plan_or_num_bytes, plan_or_num_bytes.num_bytes
    check_integer(argument, plan_or_num_bytes, 0)
    if plan_or_num_bytes % _ALLOCATION:
        raise BadInput(argument, plan_or_num_bytes, f"a multiple of {_ALLOCATION}")
    return None, plan_or_num_bytes


def get_num_allocation_alignment() -> int:
    """Bytes that sizes of buffers are multiples of."""
    return _ALLOCATION


def get_num_rdma_alignment() -> int:
    """Bytes that deep_ep aligns the tensors of a bucket to."""
    return _RDMA


def get_num_tma_alignment() -> int:
    """Bytes that the weights of an expert are a multiple of, in `lb_prefetch_weights` and `lb_reduce_grads`."""
    return _TMA


_NONE = -1


class CheckedExchange(NamedTuple):
    """Arguments of an exchange that have been checked, and their text, alike on all ranks that pass the same.

    Attributes:
        pairs: tensors of the redundant slots of all ranks, each with that of this rank's experts.
        held: rank, slot and local expert of the redundant slots that hold experts of this rank.
        adds: gradients are added to those of this rank's experts; weights go to the slots.
    """

    pairs: list[tuple[SharedTensor, torch.Tensor]]
    held: list[tuple[int, int, int]]
    adds: bool
    text: str


def checked_exchange(
    region: Window, kind: Literal["weights", "grads"], redundant: Sequence[Any], own: Sequence[Any], mapping: Any
) -> CheckedExchange:
    """Check the arguments of an exchange.  Waits for the device if the mapping is there.

    Args:
        region: of the redundant experts of each rank.
        kind: of which the names of arguments are made; gradients are float32 of two dimensions.
        redundant: `[num_redundant_experts, ...]` each, in the region.
        own: `[num_local_experts, ...]` each, with as many bytes of an expert.
        mapping: int32 `[ranks, num_redundant_experts]`: the expert of each slot, or -1.

    Raises:
        BadInput: names the argument.
        Unsupported: a CUDA graph is being captured.
    """
    if uses_cuda() and torch.cuda.is_current_stream_capturing():
        raise Unsupported(f"redundant experts' {kind} in a CUDA graph: the host reads redundancy_mapping")
    name, device, ranks = f"expert_{kind}", region.device, region.num_ranks
    if not own or len(own) != len(redundant):
        raise BadInput(name, f"{len(own)} beside {len(redundant)} redundant tensors", "as many, and at least one")
    if not isinstance(mapping, torch.Tensor) or mapping.ndim != 2 or len(mapping) != ranks:
        raise BadInput("redundancy_mapping", described(mapping), f"int32 [{ranks}, num_redundant_experts]")
    check_tensor("redundancy_mapping", mapping, device=mapping.device, dtypes=(torch.int32,), shape=mapping.shape)
    pairs, places = [], []
    slots = mapping.shape[1]
    experts = len(own[0]) if isinstance(own[0], torch.Tensor) and own[0].ndim else 0
    for slots_tensor, experts_tensor in zip(redundant, own, strict=True):
        for argument, tensor, first in ((f"redundant_{name}", slots_tensor, slots), (name, experts_tensor, experts)):
            if not isinstance(tensor, torch.Tensor) or not tensor.ndim or len(tensor) != first or not first:
                raise BadInput(argument, described(tensor), f"a tensor [{first or 'experts'}, ...]")
            check_dense(argument, tensor)
            dtype, shape = (torch.float32, (None, None)) if kind == "grads" else (tensor.dtype, tensor.shape)
            check_tensor(argument, tensor, device=device, dtypes=(dtype,), shape=shape)
            if not tensor.is_contiguous():
                raise BadInput(argument, "a tensor with gaps", "a contiguous one")
        size, offset = experts_tensor.nbytes // experts, slots_tensor.data_ptr() - region.local.data_ptr()
        if not size or size % get_num_tma_alignment():
            raise BadInput(name, f"{size} bytes an expert", f"a multiple of {get_num_tma_alignment()}")
        if slots_tensor.nbytes != slots * size:
            raise BadInput(f"redundant_{name}", f"{slots_tensor.nbytes // slots} bytes an expert", f"{size}, as {name}")
        if not 0 <= offset <= region.nbytes - slots_tensor.nbytes:
            raise BadInput(f"redundant_{name}", "memory elsewhere", "a tensor in the region of redundant experts")
        shared = SharedTensor(region, (slots, *experts_tensor.shape[1:]), experts_tensor.dtype, offset)
        pairs.append((shared, experts_tensor.detach()))
        places.append((offset, size))
    rows, held = mapping.tolist(), []
    for rank, row in enumerate(rows):
        for slot, expert in enumerate(row):
            if not _NONE <= expert < ranks * experts or expert // experts == rank:
                want = f"-1 or an expert of 0 to {ranks * experts - 1} that is not of rank {rank}"
                raise BadInput("redundancy_mapping", f"expert {expert} on rank {rank}", want)
            if expert // experts == region.rank:
                held.append((rank, slot, expert % experts))
    text = f"num_local_experts={experts}, redundancy_mapping={zlib.crc32(repr(rows).encode()):08x}"
    text += f", {kind} at={[begin for begin, _ in places]}, bytes={[size for _, size in places]}"
    return CheckedExchange(pairs, held, kind == "grads", text)


def exchange(region: Window, checked: CheckedExchange) -> None:
    """Write this rank's experts to the redundant slots that have them (on GPUs by copy engines), or add gradients.

    Gradients are added in the order of ranks and slots.  Collective.

    Raises:
        As Window.barrier().
    """
    region.barrier()  # ranks have read, or written, what is in their slots
    for rank, slot, expert in checked.held:
        for shared, own in checked.pairs:
            slot_values = shared.of(rank)[slot]
            if checked.adds:
                own[expert].add_(slot_values)
            else:
                slot_values.copy_(own[expert])
    region.barrier()


Tensors = torch.Tensor | Sequence[torch.Tensor]


class EPBuffer(ElasticRounds):
    """Dispatch and combine of deep_ep 2.5, and its exchange of redundant experts; see the package for differences.

    As ElasticBuffer.  With `lb_allocation_plan_or_num_bytes` the constructor is collective: it opens a region for
    redundant experts, which `lb_storage` and the tensors of a plan are views of.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: BufferAllocator | int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        plan, self.num_lb_bytes = planned("lb_allocation_plan_or_num_bytes", lb_allocation_plan_or_num_bytes)
        super().__init__(
            group,
            num_bytes,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            deterministic,
            allow_hybrid_mode,
            allow_multiple_reduction,
            prefer_overlap_with_compute,
            num_allocated_qps,
            num_gpu_timeout_secs,
            explicitly_destroy,
        )
        self._redundant: Window | None = None
        if self.num_lb_bytes:
            self._redundant = Window(group, self.num_lb_bytes, timeout_s=float(num_gpu_timeout_secs))
            if plan is not None:
                plan.materialize(self._redundant.local)

    def destroy(self) -> None:
        """Give the memory back.  Idempotent, and allowed without `explicitly_destroy` too."""
        super().destroy()
        if self._redundant is not None:
            self._redundant.close()

    @property
    def lb_storage(self) -> torch.Tensor | None:
        """uint8 `[num_lb_bytes]`: this rank's region of redundant experts; None without one."""
        return None if self._redundant is None else self._redundant.local

    @counted_by_pool
    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """Return when the work before it is done on every rank: see `comm.barrier`."""
        check_context(context_idx)
        self._barrier()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Return few or many SMs, as `prefer_overlap_with_compute` asks; num_sms=0 lets moecomm's own table decide."""
        return self._theoretical_num_sms()

    @counted_by_pool
    def dispatch(
        self,
        x: Any,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
        borrow_recv: bool = False,
    ) -> Any:
        """recv_x or (recv_x, recv_sf), recv_topk_idx, recv_topk_weights, handle, event.

        With `defer_epilogue` an event alone, whose wait returns the other four.  The rows have been received when this
        returns, with and without it.
        """
        _check_deferred(defer_epilogue, async_with_compute_stream)
        refuse("deep_ep", borrow_recv=borrow_recv)
        if do_handle_copy is not False:
            raise BadInput("do_handle_copy", do_handle_copy, "False: a handle has the caller's topk_idx")
        wait_for(previous_event)
        results = self._dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            async_with_compute_stream,
            handle,
            do_handle_copy,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        return _deferred(results) if defer_epilogue else results

    @counted_by_pool
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """combined_x, combined_topk_weights (None without `topk_weights`), event.  Rows are added without weights.

        With `defer_epilogue` an event alone, whose wait returns the other two.  The rows have been added up when this
        returns, with and without it.
        """
        _check_deferred(defer_epilogue, async_with_compute_stream)
        wait_for(previous_event)
        results = self._combine(x, handle, topk_weights, bias, num_sms, async_with_compute_stream)
        return _deferred(results) if defer_epilogue else results

    def lb_get_theoretical_num_sms(self) -> int:
        """0: weights travel by copy engines, and torch's additions choose their own SMs."""
        return 0

    @counted_by_pool
    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Tensors,
        expert_weights: Tensors,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: Any = None,
    ) -> EventOverlap:
        """Write this rank's expert weights to the redundant slots that have them, on the current stream.  Collective.

        Args:
            redundant_expert_weights: contiguous `[num_redundant_experts, ...]`, one or several, in the region of this
                buffer, at the same place on all ranks.
            expert_weights: contiguous `[num_local_experts, ...]` each, with as many bytes of an expert, a multiple of
                get_num_tma_alignment().
            redundancy_mapping: int32 `[ranks, num_redundant_experts]`: the expert of each slot, or -1; no expert on
                its own rank.  The host reads it, so one on the CPU saves a wait for the device.
            num_sms: changes nothing.

        Raises:
            BadInput: an argument of any rank, on all ranks; names it.
            Mismatch: ranks passed other mappings or sizes.
            Timeout, PeerLost, Aborted: a rank did not come.
        """
        redundant, own = _listed(redundant_expert_weights), _listed(expert_weights)
        return self._exchange(
            "weights", "lb_prefetch_weights", redundant, own, redundancy_mapping, num_sms, previous_event
        )

    @counted_by_pool
    def lb_reduce_grads(
        self,
        redundant_expert_grads: torch.Tensor,
        expert_grads: torch.Tensor,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: Any = None,
    ) -> EventOverlap:
        """Add the gradients of redundant slots to those of this rank's experts, on the current stream.  Collective.

        They are added in float32, in the order of ranks and slots.

        Args:
            redundant_expert_grads: float32 `[num_redundant_experts, n]`, in the region of this buffer; unchanged.
            expert_grads: float32 `[num_local_experts, n]`, which is added to.
            redundancy_mapping, num_sms: see lb_prefetch_weights().

        Raises:
            As lb_prefetch_weights().
        """
        redundant, own = [redundant_expert_grads], [expert_grads]
        return self._exchange("grads", "lb_reduce_grads", redundant, own, redundancy_mapping, num_sms, previous_event)

    def _exchange(
        self,
        kind: Literal["weights", "grads"],
        call: str,
        redundant: list[Any],
        own: list[Any],
        mapping: Any,
        num_sms: Any,
        previous_event: Any,
    ) -> EventOverlap:
        self._pool.require_open()
        if (region := self._redundant) is None:
            raise BadInput("lb_allocation_plan_or_num_bytes", 0, f"a region for redundant experts, for {call}")
        agreed: list[CheckedExchange] = []

        def checked() -> str:
            check_integer("num_sms", num_sms, 0)
            wait_for(previous_event)
            agreed.append(checked_exchange(region, kind, redundant, own, mapping))
            return agreed[0].text

        self._pool.calls.agree(f"EPBuffer.{call}", checked)
        exchange(region, agreed[0])
        return finished(True)

    def _memory(self) -> dict[str, int]:
        return {**super()._memory(), "redundant experts": self.num_lb_bytes}


def _check_deferred(defer_epilogue: bool, async_with_compute_stream: bool) -> None:
    if defer_epilogue is False:
        return
    check_flags(defer_epilogue=defer_epilogue, async_with_compute_stream=async_with_compute_stream)
    if defer_epilogue and not async_with_compute_stream:
        raise BadInput("defer_epilogue", True, "async_with_compute_stream=True beside it")


def _deferred(outputs: tuple[Any, ...]) -> EventOverlap:
    """The event of a call, which hands out its other results."""
    event: EventOverlap
    *results, event = outputs
    event.register_hook_after_wait(lambda: tuple(results))
    return event


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
