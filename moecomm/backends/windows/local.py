"""Windows of ranks that are threads of one process, on one GPU or several: an allocation a rank, known to all."""

from __future__ import annotations

import weakref
from contextlib import ExitStack

import torch

from moecomm.backends.collective import all_or_none
from moecomm.backends.cuda_driver import driver
from moecomm.backends.windows.vmm import Mapping, create
from moecomm.core.group import Rendezvous

_mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()  # by address


class LocalWindow:
    """See moecomm.backends.windows.Window.  Every rank refers to the memory of all: the last one to close frees it."""

    kind = "local"

    def __init__(self, rank: int, mappings: list[Mapping]) -> None:
        self.owner: object = mappings[rank]
        self.address, self.nbytes = mappings[rank].address, mappings[rank].nbytes
        self.peers = [mapping.address for mapping in mappings]
        self._mappings = mappings

    def close(self) -> None:
        """Drop the peers' memory."""
        self._mappings = []


def open_window(ranks: Rendezvous, nbytes: int, device: torch.device) -> LocalWindow:
    """Collective, among threads.

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: the driver of some rank refuses.
    """
    devices = sorted({int.from_bytes(data, "little") for data in ranks.all_gather(device.index.to_bytes(4, "little"))})
    with all_or_none(ranks):
        handle, total = create(nbytes, device, "NONE")
        with ExitStack() as release:
            release.callback(driver().cuMemRelease, handle)
            own = Mapping(handle, total, [device.index, *(other for other in devices if other != device.index)])
        _mappings[own.address] = own
    addresses = [int.from_bytes(data, "little") for data in ranks.all_gather(own.address.to_bytes(8, "little"))]
    with all_or_none(ranks):  # nobody lets go of its memory before all have found it
        mappings = [_mappings[address] for address in addresses]
    return LocalWindow(ranks.rank, mappings)
