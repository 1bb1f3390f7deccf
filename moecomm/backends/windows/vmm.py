"""Windows from CUDA's virtual memory management: physical memory whose handle goes to the peers, who map it as well.

A window is one range of addresses with two pieces of physical memory, so that one of them can be released.  Further
pieces follow when it is extended.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch

from moecomm.gpu.cuda_driver import DriverError, call, driver, no_room
from moecomm.ranks.collective import NoRoom, all_or_none, close_descriptors, share_descriptor
from moecomm.ranks.group import Rendezvous


class Parts(NamedTuple):
    """Bytes of the two parts of a window: the one that stays, and the one that can be released, which may be empty."""

    resident: int
    rest: int


class Mapping:
    """Addresses in our address space, and the physical memory that is mapped there for `devices` to use.

    Everything is given back by close() or with the object.

    Attributes:
        rest: address of the part that can be released.  Extensions follow it, and are released with it.
        end: address behind the part and its extensions, whether they are mapped or not.

    Args:
        parts: of the window.
        devices: that use the memory.
        more: addresses behind it, in bytes, for extensions.
    """

    def __init__(self, parts: Parts, devices: Sequence[int], more: int = 0) -> None:
        self.parts, self._devices = parts, list(devices)
        address = call("cuMemAddressReserve", sum(parts) + more, 0, 0, 0)
        self.address = int(address)
        self.rest, self.end = self.address + parts.resident, self.address + sum(parts)
        self._mapped: dict[int, int] = {}  # address -> bytes
        self.close = weakref.finalize(self, _give_back, address, sum(parts) + more, self._mapped, devices[0])
        self.close.atexit = False  # the driver cleans up after a process; torch may be gone by then

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped."""
        return sum(self._mapped.values())

    def map(self, resident: Any, rest: Any) -> None:
        """Map both parts.  The mappings keep the memory, without the handles."""
        self._map(self.address, self.parts.resident, resident)
        self.map_rest(rest)

    def map_rest(self, handle: Any) -> None:
        """Map the part that can be released, up to `end`, as one piece."""
        self._map(self.rest, self.end - self.rest, handle)

    def unmap_rest(self) -> None:
        """Undo map_rest() and extend().  No work that uses the part may be under way."""
        self._forget()
        for address in [address for address in self._mapped if address >= self.rest]:
            self._unmap(address)

    def extend(self, nbytes: int, handle: Any) -> None:
        """Map further memory at `end`, which the caller then moves, beside work that uses the rest."""
        self._forget()
        self._map(self.end, nbytes, handle)

    def _forget(self) -> None:
        """Unmap what an interrupted extend() has left behind `end`."""
        if (nbytes := self._mapped.get(self.end)) is not None:
            driver().cuMemUnmap(self.end, nbytes)  # the interrupt may have come before the mapping: any status is fine
            del self._mapped[self.end]

    def _map(self, address: int, nbytes: int, handle: Any) -> None:
        if nbytes == 0:
            return
        self._mapped[address] = nbytes  # first: an interrupt may come next
        try:
            call("cuMemMap", address, nbytes, 0, handle, 0)
        except DriverError:
            del self._mapped[address]
            raise
        try:
            call("cuMemSetAccess", address, nbytes, [_access(device) for device in self._devices], len(self._devices))
        except DriverError:
            self._unmap(address)
            raise

    def _unmap(self, address: int) -> None:
        if (nbytes := self._mapped.pop(address, None)) is not None:
            call("cuMemUnmap", address, nbytes)


def _give_back(address: Any, nbytes: int, mapped: dict[int, int], device: int) -> None:
    """Unmap memory and free its addresses.  Ignores statuses: there is nothing left to do about a failure."""
    with suppress(RuntimeError):  # work that still reads the memory may have been enqueued; a broken context has none
        torch.cuda.synchronize(device)
    for begin, size in mapped.items():
        driver().cuMemUnmap(begin, size)
    driver().cuMemAddressFree(address, nbytes)


def _access(device: int) -> Any:
    bindings = driver()
    access = bindings.CUmemAccessDesc()
    access.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def mappable(nbytes: int, device: torch.device, handle_type: str) -> int:
    """Return the least size from `nbytes` on that the driver can map."""
    kind = driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    granularity = int(call("cuMemGetAllocationGranularity", _properties(device, handle_type), kind))
    return -(-nbytes // granularity) * granularity


def parts_of(nbytes: int, resident: int, device: torch.device, handle_type: str, *, more: int = 0) -> Parts:
    """Cut `nbytes` of memory into parts whose sizes the driver can map; at least `resident` bytes stay.

    A window with `more` addresses has something to release, so that all ranks share what comes back.
    """
    stays, all_of_it, least = (mappable(size, device, handle_type) for size in (resident, nbytes, min(more, 1)))
    return Parts(stays, max(all_of_it - stays, least))


def create(nbytes: int, device: torch.device, handle_type: str) -> Any:
    """Physical memory of the device: its handle, for cuMemRelease.

    Args:
        nbytes: those of a part of parts_of(), at least 1.
        handle_type: how it can be shared: "NONE", "POSIX_FILE_DESCRIPTOR" or "FABRIC".

    Raises:
        NoRoom: out of device memory.
        DriverError: any other failure; FABRIC needs a fabric manager and an IMEX channel, for instance.
    """
    try:
        return call("cuMemCreate", nbytes, _properties(device, handle_type), 0)
    except DriverError as error:
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise no_room(nbytes, device) from error
        raise


def _properties(device: torch.device, handle_type: str) -> Any:
    bindings = driver()
    properties = bindings.CUmemAllocationProp()
    properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.index
    properties.requestedHandleTypes = _handle_type(handle_type)
    return properties


def _handle_type(name: str) -> Any:
    return getattr(driver().CUmemAllocationHandleType, f"CU_MEM_HANDLE_TYPE_{name}")


class VmmWindow:
    """A Window of the driver's virtual memory, which can be released and extended."""

    def __init__(self, sharing: Sharing, mappings: list[Mapping], nbytes: int, more: int) -> None:
        self.kind = "fabric" if sharing.fabric else "vmm"
        self._sharing, self._mappings = sharing, mappings
        self._own = mappings[sharing.rank]
        self.owner: object = self._own
        self.address, self.peers = self._own.address, [mapping.address for mapping in mappings]
        self.more, self._limit = more, nbytes + more

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self._own.nbytes

    def release(self) -> None:
        """Unmap the memory, which is free when the last rank has done so."""
        for mapping in self._mappings:
            mapping.unmap_rest()

    def restore(self, ranks: Rendezvous) -> tuple[int, int]:
        own = self._own.end - self._own.rest
        sizes = [int.from_bytes(data, "little") for data in ranks.all_gather(own.to_bytes(8, "little"))]
        with ExitStack() as temporary, ExitStack() as undo:
            handles = self._sharing.handles(ranks, own, temporary)
            with all_or_none(ranks):
                for mapping, size, handle in zip(self._mappings, sizes, handles, strict=True):
                    mapping.end = mapping.rest + size
                    mapping.map_rest(handle)
                    undo.callback(mapping.unmap_rest)
            undo.pop_all()
        return self._own.rest, own

    def extend(self, nbytes: int, kept: ExitStack) -> tuple[int, int, int | None]:
        size = mappable(nbytes, self._sharing.device, self._sharing.handle_type)
        begin = self.extent(self._sharing.rank)
        if begin + size > self._limit:
            raise NoRoom("the window has no more addresses")
        with ExitStack() as temporary:
            handle, exported = self._sharing.create(size, temporary, kept)
            self._own.extend(size, handle)
        return begin, size, exported

    def take(self, end: int) -> None:
        self._own.end = self.address + end

    def extend_peer(self, rank: int, begin: int, nbytes: int, descriptor: int) -> None:
        mapping = self._mappings[rank]
        if begin != self.extent(rank):  # it came back with a restore(), or the one before it is missing
            return
        with ExitStack() as temporary:
            mapping.extend(nbytes, self._sharing.imported(descriptor, temporary))
        mapping.end = mapping.address + begin + nbytes

    def extent(self, rank: int) -> int:
        return self._mappings[rank].end - self._mappings[rank].address

    def close(self) -> None:
        """Drop the peers' memory."""
        for mapping in self._mappings:
            if mapping is not self._own:
                mapping.close()
        self._mappings = []


def open_window(
    ranks: Rendezvous,
    nbytes: int,
    device: torch.device,
    timeout_s: float,
    *,
    resident: int,
    fabric: bool,
    more: int = 0,
) -> VmmWindow:
    """Open a window.  Collective.  Handles travel as file descriptors on one host, or as FABRIC handles, by IMEX.

    `more`: addresses behind the memory, for extensions; between hosts there are none.

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: the driver of some rank refuses; nothing is left mapped or open on any rank.
    """
    sharing, more = Sharing(ranks.rank, device, timeout_s, fabric), 0 if fabric else more
    with ExitStack() as temporary, ExitStack() as undo:
        with all_or_none(ranks):
            parts = parts_of(nbytes, resident, device, sharing.handle_type, more=more)
        everybodys = [sharing.handles(ranks, size, temporary) for size in parts]
        with all_or_none(ranks):
            mappings = []
            for handles in zip(*everybodys, strict=True):
                mappings.append(Mapping(parts, [device.index], more))
                undo.callback(mappings[-1].close)
                mappings[-1].map(*handles)
        undo.pop_all()
    return VmmWindow(sharing, mappings, nbytes, more)


class Sharing(NamedTuple):
    """Exchange of memory between the ranks of a window."""

    rank: int
    device: torch.device
    timeout_s: float
    fabric: bool

    @property
    def handle_type(self) -> str:
        return "FABRIC" if self.fabric else "POSIX_FILE_DESCRIPTOR"

    def handles(self, ranks: Rendezvous, nbytes: int, temporary: ExitStack) -> list[Any]:
        """Create memory; return the handles of that of every rank, by rank.  Collective.

        The handles, and all descriptors, are closed with `temporary`.
        """
        if nbytes == 0:
            return [None] * ranks.ranks
        with all_or_none(ranks):
            own, exported = self.create(nbytes, temporary)
        received = self._share(ranks, exported, temporary)
        handles = []
        with all_or_none(ranks):
            for rank, theirs in enumerate(received):
                handles.append(own if rank == self.rank else self.imported(theirs, temporary))
        return handles

    def create(self, nbytes: int, temporary: ExitStack, kept: ExitStack | None = None) -> tuple[Any, Any]:
        """Create memory; return its handle, and what a peer imports, which `kept` closes.

        The handle is closed with `temporary`, and so is the other where `kept` is None.
        """
        own = create(nbytes, self.device, self.handle_type)
        temporary.callback(driver().cuMemRelease, own)
        exported = call("cuMemExportToShareableHandle", own, _handle_type(self.handle_type), 0)
        if not self.fabric:
            exported = int(exported)
            (temporary if kept is None else kept).callback(os.close, exported)
            os.set_inheritable(exported, False)
        return own, exported

    def _share(self, ranks: Rendezvous, exported: Any, temporary: ExitStack) -> list[Any]:
        """Return every rank's handle as cuMemImportFromShareableHandle takes it."""
        if not self.fabric:
            received = share_descriptor(ranks, exported, self.timeout_s)
            temporary.callback(close_descriptors, received)
            return received
        structs = []
        for data in ranks.all_gather(bytes(exported.data)):
            structs.append(driver().CUmemFabricHandle())
            structs[-1].data = data
        return structs

    def imported(self, theirs: Any, temporary: ExitStack) -> Any:
        """Return the handle of a peer's memory, which is released with `temporary`."""
        # A descriptor is passed by value, a fabric handle by its address.
        shareable = theirs if isinstance(theirs, int) else int(theirs.getPtr())
        handle = call("cuMemImportFromShareableHandle", shareable, _handle_type(self.handle_type))
        temporary.callback(driver().cuMemRelease, handle)
        return handle
