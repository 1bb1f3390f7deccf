"""A CUDA driver without a GPU: it keeps books of what is created, mapped and open, and refuses what the test says."""

from __future__ import annotations

import enum
import itertools
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

# Calls of an opening that a driver may refuse.
REFUSABLE = (
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
)


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_PERMITTED = 800


class HandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


class FabricHandle:
    """The real one is 64 bytes that are passed by address."""

    by_address: ClassVar[dict[int, FabricHandle]] = {}

    def __init__(self) -> None:
        self.data = bytes(64)
        self.by_address[id(self)] = self

    def getPtr(self) -> int:
        return id(self)


class FakeDriver:
    """`refuse(function, thread name)` is the status of a call; ranks are threads named rank0, rank1, ..."""

    CUmemAllocationHandleType = HandleType
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUmemFabricHandle = FabricHandle

    def __init__(self, refuse: Callable[[str, str], Status] = lambda function, thread: Status.CUDA_SUCCESS) -> None:
        self._refuse = refuse
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._memory: dict[int, int] = {}  # inode of an exported descriptor -> memory
        self.handles: dict[int, int] = {}  # open handles -> memory
        self.reserved: dict[int, int] = {}  # address -> bytes
        self.mapped: dict[int, int] = {}  # address -> memory
        self.access: dict[int, list[int]] = {}  # address -> devices
        self.own: dict[str, list[int]] = {}  # memory by the thread that created it

    @property
    def nothing_left(self) -> bool:
        return not (self.handles or self.reserved or self.mapped)

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def _handle(self, memory: int) -> int:
        handle = next(self._numbers)
        self.handles[handle] = memory
        return handle

    def _call(self, function: str) -> Status:
        return self._refuse(function, threading.current_thread().name)

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, 2 << 20

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any, ...]:
        if status := self._call("cuMemCreate"):
            return status, None
        with self._lock:
            memory = next(self._numbers)
            self.own.setdefault(threading.current_thread().name, []).append(memory)
            return Status.CUDA_SUCCESS, self._handle(memory)

    def cuMemExportToShareableHandle(self, handle: int, handle_type: HandleType, flags: int) -> tuple[Any, ...]:
        if status := self._call("cuMemExportToShareableHandle"):
            return status, None
        if handle_type == HandleType.CU_MEM_HANDLE_TYPE_FABRIC:
            fabric = FabricHandle()
            fabric.data = self.handles[handle].to_bytes(64, "little")
            return Status.CUDA_SUCCESS, fabric
        descriptor = os.memfd_create("memory", os.MFD_CLOEXEC)
        self._memory[os.fstat(descriptor).st_ino] = self.handles[handle]
        return Status.CUDA_SUCCESS, descriptor

    def cuMemImportFromShareableHandle(self, shareable: int, handle_type: HandleType) -> tuple[Any, ...]:
        if status := self._call("cuMemImportFromShareableHandle"):
            return status, None
        if handle_type == HandleType.CU_MEM_HANDLE_TYPE_FABRIC:
            memory = int.from_bytes(FabricHandle.by_address[shareable].data, "little")
        else:
            memory = self._memory[os.fstat(shareable).st_ino]
        with self._lock:
            return Status.CUDA_SUCCESS, self._handle(memory)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        if status := self._call("cuMemAddressReserve"):
            return status, None
        with self._lock:
            address = next(self._numbers) << 30
            self.reserved[address] = nbytes
            return Status.CUDA_SUCCESS, address

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        if status := self._call("cuMemMap"):
            return (status,)
        reserved = list(self.reserved.items())  # at once: other threads reserve meanwhile
        assert any(begin <= address <= address + nbytes <= begin + size for begin, size in reserved)
        assert nbytes > 0 and address not in self.mapped
        self.mapped[address] = self.handles[handle]
        return (Status.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> tuple[Any, ...]:
        if status := self._call("cuMemSetAccess"):
            return (status,)
        assert count == len(access) and address in self.mapped
        self.access[address] = [one.location.id for one in access]
        return (Status.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        if self.mapped.pop(address, None) is None:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        return (Status.CUDA_SUCCESS,)

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        assert not any(address <= begin < address + nbytes for begin in list(self.mapped))  # at once, as above
        assert self.reserved.pop(address) == nbytes
        return (Status.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        del self.handles[handle]
        return (Status.CUDA_SUCCESS,)
