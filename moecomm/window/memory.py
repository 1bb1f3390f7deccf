"""The memory of a Window that its user reads and writes, beside the control words of csrc/window/window.h."""

from __future__ import annotations

from typing import Protocol

import torch

from moecomm import _native
from moecomm.base.arrays import window_tensor
from moecomm.ranks.peers import Peers

_UNIT = 256  # bytes; an arena hands out multiples of it


class Memory(Protocol):
    """As many bytes on every rank."""

    name: str  # of the backend, with the kind of memory where there are several: "host", "lsa/vmm", "lsa/torch"
    addresses: list[int]  # by rank, of its memory as this rank reaches it; 0: it does not

    def bytes_of(self, rank: int) -> torch.Tensor:
        """Return uint8 `[nbytes]`: the memory of a rank, which the tensor keeps mapped."""
        ...


class OwnMemory:
    """See Memory.  The control words follow it in the memory of the peers."""

    def __init__(self, peers: Peers, nbytes: int) -> None:
        self._peers, self._nbytes = peers, nbytes
        self.name, self.addresses = peers.name, list(peers.addresses)

    def bytes_of(self, rank: int) -> torch.Tensor:
        """See Memory."""
        return view_of(self.addresses[rank], self._nbytes, self._peers.device, self._peers.owner(rank))


def view_of(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return uint8 `[nbytes]`: memory at an address, which `owner` keeps mapped."""
    block = _native.Arena(0, -(-nbytes // _UNIT) * _UNIT).allocate(nbytes)
    assert block is not None
    return window_tensor(block, address, (nbytes,), torch.uint8, device, owner)
