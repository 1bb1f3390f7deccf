"""Weights and gradients of redundant experts: copies of experts of other ranks, in memory that all ranks reach.

A mapping says which expert each redundant slot of each rank has.  Owners write weights to these slots, and read
gradients from them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.validation import check_dense
from moecomm.compat.deep_ep.allocator import get_num_tma_alignment
from moecomm.compat.deep_ep.event import uses_cuda
from moecomm.compat.deep_ep.pool import described
from moecomm.errors import BadInput, Unsupported
from moecomm.weights.exchange import SharedTensor
from moecomm.window import Window

_NONE = -1


class Checked(NamedTuple):
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


def check(
    region: Window, what: Literal["weights", "grads"], redundant: Sequence[Any], own: Sequence[Any], mapping: Any
) -> Checked:
    """Check the arguments of an exchange.  Waits for the device if the mapping is there.

    Args:
        region: of the redundant experts of each rank.
        what: of which the names of arguments are made; gradients are float32 of two dimensions.
        redundant: `[num_redundant_experts, ...]` each, in the region.
        own: `[num_local_experts, ...]` each, with as many bytes of an expert.
        mapping: int32 `[ranks, num_redundant_experts]`: the expert of each slot, or -1.

    Raises:
        BadInput: names the argument.
        Unsupported: a CUDA graph is being captured.
    """
    if uses_cuda() and torch.cuda.is_current_stream_capturing():
        raise Unsupported(f"redundant experts' {what} in a CUDA graph: the host reads redundancy_mapping")
    name, device, ranks = f"expert_{what}", region.device, region.num_ranks
    if not own or len(own) != len(redundant):
        raise BadInput(name, f"{len(own)} beside {len(redundant)} redundant tensors", "as many, and at least one")
    if not isinstance(mapping, torch.Tensor) or mapping.ndim != 2 or len(mapping) != ranks:
        raise BadInput("redundancy_mapping", described(mapping), f"int32 [{ranks}, num_redundant_experts]")
    check_tensor("redundancy_mapping", mapping, device=mapping.device, dtypes=(torch.int32,), shape=mapping.shape)
    pairs, places = [], []
    slots = mapping.shape[1]
    experts = len(own[0]) if isinstance(own[0], torch.Tensor) and own[0].ndim else 0
    for there, here in zip(redundant, own, strict=True):
        for argument, tensor, first in ((f"redundant_{name}", there, slots), (name, here, experts)):
            if not isinstance(tensor, torch.Tensor) or not tensor.ndim or len(tensor) != first or not first:
                raise BadInput(argument, described(tensor), f"a tensor [{first or 'experts'}, ...]")
            check_dense(argument, tensor)
            kind, shape = (torch.float32, (None, None)) if what == "grads" else (tensor.dtype, tensor.shape)
            check_tensor(argument, tensor, device=device, dtypes=(kind,), shape=shape)
            if not tensor.is_contiguous():
                raise BadInput(argument, "a tensor with gaps", "a contiguous one")
        size, offset = here.nbytes // experts, there.data_ptr() - region.local.data_ptr()
        if not size or size % get_num_tma_alignment():
            raise BadInput(name, f"{size} bytes an expert", f"a multiple of {get_num_tma_alignment()}")
        if there.nbytes != slots * size:
            raise BadInput(f"redundant_{name}", f"{there.nbytes // slots} bytes an expert", f"{size}, as {name}")
        if not 0 <= offset <= region.nbytes - there.nbytes:
            raise BadInput(f"redundant_{name}", "memory elsewhere", "a tensor in the region of redundant experts")
        shared = SharedTensor(region, (slots, *here.shape[1:]), here.dtype, offset)
        pairs.append((shared, here.detach()))
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
    text += f", {what} at={[at for at, _ in places]}, bytes={[size for _, size in places]}"
    return Checked(pairs, held, what == "grads", text)


def run(region: Window, checked: Checked) -> None:
    """Write this rank's experts to the redundant slots that have them (on GPUs by copy engines), or add gradients.

    Gradients are added in the order of ranks and slots.  Collective.

    Raises:
        As Window.barrier().
    """
    region.barrier()  # ranks have read, or written, what is in their slots
    for rank, slot, expert in checked.held:
        for shared, own in checked.pairs:
            there = shared.of(rank)[slot]
            if checked.adds:
                own[expert].add_(there)
            else:
                there.copy_(own[expert])
    region.barrier()
