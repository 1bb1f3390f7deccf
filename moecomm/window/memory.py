"""The memory of a Window that its user reads and writes, beside the control words of csrc/window/window.h.

It is the Window's own, or torch's symmetric memory: a tensor of the caller's, or one allocated for the Window.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from moecomm import _native
from moecomm.base.arrays import has_memory, window_tensor
from moecomm.errors import BadInput
from moecomm.ranks.collective import all_or_none
from moecomm.ranks.group import Group, Rendezvous
from moecomm.ranks.peers import Peers
from moecomm.ranks.rendezvous import ProcessGroup

_UNIT = 256  # bytes; an arena hands out multiples of it
_MADE_BY = "memory of torch.distributed._symmetric_memory.empty()"


class UserMemory(Protocol):
    """Memory of the same size on every rank."""

    name: str  # of the backend, with the kind of memory where there are several: "host", "lsa/vmm", "lsa/torch"
    addresses: list[int]  # by rank, of its memory as this rank reaches it; 0: it does not

    def bytes_of(self, rank: int) -> torch.Tensor:
        """Return uint8 `[nbytes]`: the memory of a rank, which the tensor keeps mapped."""
        ...


class OwnMemory:
    """UserMemory that moecomm has made.  The control words follow it in the memory of the peers."""

    def __init__(self, peers: Peers, nbytes: int) -> None:
        self._peers, self._nbytes = peers, nbytes
        self.name, self.addresses = peers.name, list(peers.addresses)

    def bytes_of(self, rank: int) -> torch.Tensor:
        return view_of(self.addresses[rank], self._nbytes, self._peers.device, self._peers.owner(rank))


def view_of(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return uint8 `[nbytes]`: memory at an address, which `owner` keeps mapped."""
    block = _native.Arena(0, -(-nbytes // _UNIT) * _UNIT).allocate(nbytes)
    assert block is not None
    return window_tensor(block, address, (nbytes,), torch.uint8, device, owner)


class SymmetricMemory:
    """UserMemory of torch's symmetric memory.  Views of this rank's memory are views of torch's tensor."""

    def __init__(self, backend: str, tensor: torch.Tensor, handle: Any, offsets: list[int]) -> None:
        self.name = f"{backend}/torch"
        self._tensor, self._handle, self._rank = tensor, handle, int(handle.rank)
        self.addresses = [base and base + offset for base, offset in zip(handle.buffer_ptrs, offsets, strict=True)]
        # Our own memory always under one address: a GPU does not order accesses to the same bytes through two mappings.
        self.addresses[self._rank] = tensor.data_ptr()

    def bytes_of(self, rank: int) -> torch.Tensor:
        if rank == self._rank:
            return self._tensor.view(-1)
        return view_of(self.addresses[rank], len(self._tensor), self._tensor.device, (self._handle, self._tensor))


def asked_bytes(memory: Any, nbytes: Any, group: Group) -> Any:
    """Return how many bytes a caller asks for who passes `memory`: a tensor, or "torch" and `nbytes`.

    Raises:
        BadInput: torch has not made the tensor, it is not contiguous, or the group is no process group.
    """
    if not (isinstance(memory, torch.Tensor) or (isinstance(memory, str) and memory == "torch")):
        got = repr(memory) if isinstance(memory, str) else type(memory).__name__
        raise BadInput("memory", got, 'a tensor, "torch" or None')
    if not isinstance(group, ProcessGroup):
        raise BadInput("group", type(group).__name__, "a process group, as torch's symmetric memory wants it")
    if isinstance(memory, str):
        return nbytes
    if nbytes is not None:
        raise BadInput("nbytes", nbytes, "None: memory= has its own size")
    if memory.layout is not torch.strided or not has_memory(memory) or not memory.is_contiguous():
        raise BadInput("memory", "a tensor that is not contiguous or not in memory", f"contiguous {_MADE_BY}")
    if not _is_symmetric(memory):
        raise BadInput("memory", "a tensor of other memory", _MADE_BY)
    return memory.nbytes


def asked_device(memory: torch.Tensor, device: torch.device | None) -> torch.device:
    """Return the device of a tensor that is adopted.

    Raises:
        BadInput: the caller has asked for another.
    """
    if device is not None and (device.type != memory.device.type or device.index not in (None, memory.device.index)):
        raise BadInput("device", device, f"{memory.device}, where memory= is")
    return memory.device


def open_memory(ranks: Rendezvous, group: Group, peers: Peers, memory: Any, nbytes: int) -> SymmetricMemory:
    """Adopt a tensor, or allocate zeroed memory; then meet the other ranks through torch.  Collective.

    A rank that ends during torch's own rendezvous is noticed after torch's timeout.

    Raises:
        Unsupported: torch refuses on some rank.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    assert isinstance(group, ProcessGroup)
    device = peers.device
    with all_or_none(ranks):  # torch's rendezvous would wait for a rank that fails here
        if isinstance(memory, torch.Tensor):
            tensor = memory.detach().view(-1).view(torch.uint8)
        else:
            tensor = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device).zero_()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # no peer writes before it is zero
    with all_or_none(ranks):
        handle: Any = symmetric_memory.rendezvous(tensor, group.process_group)
        if handle is None:  # of torch before 2.12, which has no _is_symmetric()
            raise BadInput("memory", "a tensor of other memory", _MADE_BY)
        if (handle.rank, handle.world_size) != (ranks.rank, ranks.ranks):
            raise BadInput("memory", f"memory of a group of {handle.world_size} ranks", "that of the Window's group")
        offset = handle.offset + tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    offsets = [int.from_bytes(data, "little") for data in ranks.all_gather(offset.to_bytes(8, "little"))]
    return SymmetricMemory(peers.name.partition("/")[0], tensor, handle, offsets)


def _is_symmetric(memory: torch.Tensor) -> bool:
    """Return whether torch has made it; True where torch can't say before the rendezvous."""
    import torch.distributed._symmetric_memory as symmetric_memory

    known = getattr(symmetric_memory, "is_symm_mem_tensor", None)  # torch 2.12 or newer
    return known is None or bool(known(memory))
