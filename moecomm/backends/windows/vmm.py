"""Windows from CUDA's virtual memory management: physical memory whose handle goes to the peers, who map it as well."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from moecomm.backends.collective import all_or_none, share_descriptor
from moecomm.backends.cuda_driver import DriverError, call, driver, no_room
from moecomm.core.group import Rendezvous


class Mapping:
    """Physical memory mapped into our address space for `devices` to use; unmapped by close() or with the object."""

    def __init__(self, handle: Any, nbytes: int, devices: Sequence[int]) -> None:
        bindings = driver()
        self.nbytes = nbytes
        address = call("cuMemAddressReserve", nbytes, 0, 0, 0)
        self.address = int(address)
        with ExitStack() as undo:
            undo.callback(bindings.cuMemAddressFree, address, nbytes)
            call("cuMemMap", address, nbytes, 0, handle, 0)
            undo.callback(bindings.cuMemUnmap, address, nbytes)
            call("cuMemSetAccess", address, nbytes, [_access(device) for device in devices], len(devices))
            undo.pop_all()
        self.close = weakref.finalize(self, _unmap, address, nbytes, devices[0])
        self.close.atexit = False  # the driver cleans up after a process; torch may be gone by then


def _unmap(address: Any, nbytes: int, device: int) -> None:
    """Statuses are not looked at: there is nothing left to do about a failure."""
    with suppress(RuntimeError):  # work that still reads the memory may have been enqueued; a broken context has none
        torch.cuda.synchronize(device)
    driver().cuMemUnmap(address, nbytes)
    driver().cuMemAddressFree(address, nbytes)


def _access(device: int) -> Any:
    bindings = driver()
    access = bindings.CUmemAccessDesc()
    access.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def create(nbytes: int, device: torch.device, handle_type: str) -> tuple[Any, int]:
    """Physical memory of the device: its handle, for cuMemRelease, and its size, a multiple of the granularity.

    Args:
        handle_type: how it can be shared: "NONE", "POSIX_FILE_DESCRIPTOR" or "FABRIC".

    Raises:
        NoRoom: out of device memory.
        DriverError: any other failure; FABRIC needs a fabric manager and an IMEX channel, for instance.
    """
    bindings = driver()
    properties = bindings.CUmemAllocationProp()
    properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.index
    properties.requestedHandleTypes = _handle_type(handle_type)
    recommended = bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    granularity = int(call("cuMemGetAllocationGranularity", properties, recommended))
    total = -(-nbytes // granularity) * granularity
    try:
        return call("cuMemCreate", total, properties, 0), total
    except DriverError as error:
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise no_room(total, device) from error
        raise


def _handle_type(name: str) -> Any:
    return getattr(driver().CUmemAllocationHandleType, f"CU_MEM_HANDLE_TYPE_{name}")


class VmmWindow:
    """See moecomm.backends.windows.Window."""

    def __init__(self, kind: str, rank: int, mappings: list[Mapping]) -> None:
        self.kind = kind
        own = mappings[rank]
        self.owner: object = own
        self.address, self.nbytes = own.address, own.nbytes
        self.peers = [mapping.address for mapping in mappings]
        self._theirs = [mapping for mapping in mappings if mapping is not own]

    def close(self) -> None:
        """Drop the peers' memory."""
        for mapping in self._theirs:
            mapping.close()
        self._theirs = []


def open_window(ranks: Rendezvous, nbytes: int, device: torch.device, timeout_s: float, *, fabric: bool) -> VmmWindow:
    """Collective.  Handles travel as file descriptors, on one host, or as FABRIC handles, which need an IMEX channel.

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: the driver of some rank refuses; nothing is left mapped or open on any rank.
    """
    handle_type = "FABRIC" if fabric else "POSIX_FILE_DESCRIPTOR"
    with ExitStack() as temporary, ExitStack() as undo:
        with all_or_none(ranks):
            handle, total = create(nbytes, device, handle_type)
            temporary.callback(driver().cuMemRelease, handle)
            own = Mapping(handle, total, [device.index])
            undo.callback(own.close)
            exported = call("cuMemExportToShareableHandle", handle, _handle_type(handle_type), 0)
            if not fabric:
                exported = int(exported)
                temporary.callback(os.close, exported)
                os.set_inheritable(exported, False)
        received = _share(ranks, exported, timeout_s, fabric, temporary)
        with all_or_none(ranks):
            mappings = []
            for rank, theirs in enumerate(received):
                mappings.append(own if rank == ranks.rank else _map_peer(theirs, total, device, handle_type))
                undo.callback(mappings[-1].close)
        undo.pop_all()
    return VmmWindow("fabric" if fabric else "vmm", ranks.rank, mappings)


def _share(ranks: Rendezvous, exported: Any, timeout_s: float, fabric: bool, temporary: ExitStack) -> list[Any]:
    """Every rank's handle as cuMemImportFromShareableHandle takes it; file descriptors are closed with `temporary`."""
    if not fabric:
        received = share_descriptor(ranks, exported, timeout_s)
        for descriptor in received:
            if descriptor >= 0:
                temporary.callback(os.close, descriptor)
        return received
    structs = []
    for data in ranks.all_gather(bytes(exported.data)):
        structs.append(driver().CUmemFabricHandle())
        structs[-1].data = data
    return structs


def _map_peer(theirs: Any, nbytes: int, device: torch.device, handle_type: str) -> Mapping:
    # A descriptor is passed by value, a fabric handle by its address.
    shareable = theirs if isinstance(theirs, int) else int(theirs.getPtr())
    handle = call("cuMemImportFromShareableHandle", shareable, _handle_type(handle_type))
    try:
        return Mapping(handle, nbytes, [device.index])
    finally:
        driver().cuMemRelease(handle)  # the mapping keeps the memory
