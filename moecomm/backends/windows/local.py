"""Windows of ranks that are threads of one process, on one GPU or several: an allocation a rank, known to all."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch

from moecomm.backends.windows.vmm import Mapping, create, mappable, parts_of
from moecomm.gpu.cuda_driver import driver
from moecomm.ranks.collective import NoRoom, all_or_none
from moecomm.ranks.group import Rendezvous

_mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()  # by address


class LocalWindow:
    """A Window of ranks of one process, which can be released and extended.

    Every rank refers to the memory of all: the last one to close frees it.
    """

    kind = "local"

    def __init__(self, rank: int, device: torch.device, mappings: list[Mapping], nbytes: int, more: int) -> None:
        self._own, self._device = mappings[rank], device
        self.more, self._limit = more, nbytes + more
        self.owner: object = self._own
        self.address = self._own.address
        self.peers = [mapping.address for mapping in mappings]
        self._mappings = mappings

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self._own.nbytes

    def release(self) -> None:
        self._own.unmap_rest()

    def restore(self, ranks: Rendezvous) -> tuple[int, int]:
        with ExitStack() as undo:
            with all_or_none(ranks):
                with ExitStack() as temporary:
                    self._own.map_rest(_created(self._own.end - self._own.rest, self._device, temporary))
                undo.callback(self._own.unmap_rest)
            undo.pop_all()
        return self._own.rest, self._own.end - self._own.rest

    def extend(self, nbytes: int, kept: ExitStack) -> tuple[int, int, int | None]:
        """Map more memory, which no peer has to map."""
        size, begin = mappable(nbytes, self._device, "NONE"), self._own.end - self.address
        if begin + size > self._limit:
            raise NoRoom("the window has no more addresses")
        with ExitStack() as temporary:
            self._own.extend(size, _created(size, self._device, temporary))
        return begin, size, None

    def take(self, end: int) -> None:
        self._own.end = self.address + end

    def extend_peer(self, rank: int, begin: int, nbytes: int, descriptor: int) -> None:
        """Do nothing: every rank refers to the same memory."""

    def extent(self, rank: int) -> int:
        return self._mappings[rank].end - self._mappings[rank].address

    def close(self) -> None:
        """Drop the peers' memory."""
        self._mappings = []


def open_window(ranks: Rendezvous, nbytes: int, device: torch.device, *, resident: int, more: int = 0) -> LocalWindow:
    """Open a window.  Collective among threads.  `more`: addresses behind the memory, for extensions.

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: the driver of some rank refuses.
    """
    devices = sorted({int.from_bytes(data, "little") for data in ranks.all_gather(device.index.to_bytes(4, "little"))})
    with all_or_none(ranks):
        parts = parts_of(nbytes, resident, device, "NONE", more=more)
        own = Mapping(parts, [device.index, *(other for other in devices if other != device.index)], more)
        with ExitStack() as temporary:
            own.map(*(_created(size, device, temporary) for size in parts))
        _mappings[own.address] = own
    addresses = [int.from_bytes(data, "little") for data in ranks.all_gather(own.address.to_bytes(8, "little"))]
    with all_or_none(ranks):  # nobody lets go of its memory before all have found it
        mappings = [_mappings[address] for address in addresses]
    return LocalWindow(ranks.rank, device, mappings, nbytes, more)


def _created(nbytes: int, device: torch.device, temporary: ExitStack) -> Any:
    """Create memory; return its handle, which is released with `temporary`, or None for no bytes."""
    if nbytes == 0:
        return None
    handle = create(nbytes, device, "NONE")
    temporary.callback(driver().cuMemRelease, handle)
    return handle
