"""deep_ep 2.5's BufferAllocator and the alignments of its buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.validation import check_integer, check_shape
from moecomm.compat.deep_ep.pool import check_dimensions
from moecomm.errors import BadInput

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
