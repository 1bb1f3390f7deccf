"""The CUDA driver as moecomm uses it, through cuda.bindings (12.x or 13.x), imported when first called."""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from moecomm.ranks.collective import NoRoom


class DriverError(RuntimeError):
    """A driver call that failed; `name` is that of the error, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, function: str, name: str) -> None:
        super().__init__(f"{function}: {name}")
        self.function, self.name = function, name


def wheel_suffix() -> str:
    """Return the suffix of the wheels that go with this torch: "cu12" or "cu13"."""
    return "cu12" if (torch.version.cuda or "").startswith("12.") else "cu13"


def int32_at(address: int, device: torch.device, count: int = 1) -> torch.Tensor:
    """int32 `[count]`: device memory that the caller keeps alive."""
    return _memory_at(address, count, "<i4", device)


def int64_at(address: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 `[count]`: as int32_at."""
    return _memory_at(address, count, "<i8", device)


def _memory_at(address: int, count: int, kind: str, device: torch.device) -> torch.Tensor:
    array = {"shape": (count,), "typestr": kind, "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=device)


@functools.cache
def driver() -> ModuleType:
    """cuda.bindings.driver."""
    import cuda.bindings.driver

    bindings: ModuleType = cuda.bindings.driver
    return bindings


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function; return its results besides its status: nothing, one value or a tuple.

    Raises:
        DriverError: the status was not CUDA_SUCCESS.
    """
    status, *values = getattr(driver(), name)(*arguments)
    if int(status) != 0:
        raise DriverError(name, getattr(status, "name", f"error {int(status)}"))
    return values[0] if len(values) == 1 else tuple(values) or None


def attribute(name: str, device: int) -> int:
    """A device attribute by the end of its name; 0 if these bindings or this driver do not know it."""
    known = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if known is None:
        return 0
    with suppress(DriverError):
        return int(call("cuDeviceGetAttribute", known, device))
    return 0


def uuid(device: int) -> bytes:
    """16 bytes that name the GPU whatever its number is in another process."""
    return bytes(call("cuDeviceGetUuid", device).bytes)[:16].ljust(16, b"\0")


def unreachable(device: int, uuids: list[bytes]) -> str:
    """Name the first GPU of `uuids` that `device` can't load from and store to; empty: none.  Skips invisible GPUs."""
    visible = {uuid(other): other for other in range(torch.cuda.device_count())}
    for rank, wanted in enumerate(uuids):
        other = visible.get(wanted, device)
        if other != device and not int(call("cuDeviceCanAccessPeer", device, other)):
            return f"GPU {device} can't load from and store to GPU {other} of rank {rank}: no peer access between them"
    return ""


class PinnedMemory:
    """Zeroed host memory that every GPU of the process reaches under the same address; freed with the object."""

    def __init__(self, nbytes: int) -> None:
        bindings = driver()
        flags = bindings.CU_MEMHOSTALLOC_PORTABLE | bindings.CU_MEMHOSTALLOC_DEVICEMAP
        self.nbytes = nbytes
        self.address = int(call("cuMemHostAlloc", nbytes, flags))
        ctypes.memset(self.address, 0, nbytes)
        weakref.finalize(self, bindings.cuMemFreeHost, self.address).atexit = False

    def write(self, offset: int, data: bytes) -> int:
        """Put bytes there; return their address."""
        assert offset + len(data) <= self.nbytes
        ctypes.memmove(self.address + offset, data, len(data))
        return self.address + offset

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes there."""
        assert offset + nbytes <= self.nbytes
        return ctypes.string_at(self.address + offset, nbytes)


class CopyStream:
    """A stream of our own, for the few bytes that the host moves in and out of windows.

    Copies on the default stream would wait for the kernels of other ranks of this process, which may wait for us.
    """

    def __init__(self) -> None:
        bindings = driver()
        self._stream = call("cuStreamCreate", int(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING))
        weakref.finalize(self, bindings.cuStreamDestroy, self._stream).atexit = False

    def zero(self, address: int, nbytes: int) -> None:
        """Zero device memory."""
        if nbytes > 0:
            call("cuMemsetD8Async", address, 0, nbytes, self._stream)

    def to_device(self, address: int, pinned: int, nbytes: int) -> None:
        """Copy from pinned memory to a window."""
        call("cuMemcpyHtoDAsync", address, pinned, nbytes, self._stream)

    def to_host(self, pinned: int, address: int, nbytes: int) -> None:
        """Copy from a window to pinned memory."""
        call("cuMemcpyDtoHAsync", pinned, address, nbytes, self._stream)

    def peek(self, pinned: PinnedMemory, offset: int, address: int, nbytes: int, within_s: float) -> bytes | None:
        """Read some bytes of device memory by way of pinned memory; None if that takes longer than `within_s`.

        Kernels may be running: the copy does not wait for them.
        """
        self.to_host(pinned.address + offset, address, nbytes)
        deadline = time.monotonic() + within_s
        while int(driver().cuStreamQuery(self._stream)[0]) != 0:
            if time.monotonic() > deadline:
                return None
        return pinned.read(offset, nbytes)

    def wait(self) -> None:
        """Return when everything above is done."""
        call("cuStreamSynchronize", self._stream)


def bind_thread(device: int) -> None:
    """Make torch's context of the device current in this thread if none is; torch itself does so late."""
    if int(call("cuCtxGetCurrent")) == 0:
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))


def relax_captures() -> None:
    """Let this thread copy and poll while another one captures a graph, which its calls would otherwise end."""
    call("cuThreadExchangeStreamCaptureMode", driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


@contextmanager
def relaxed_captures() -> Iterator[None]:
    """Wait and map memory while this thread or another one captures a graph, which that would otherwise end."""
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def no_room(nbytes: int, device: torch.device) -> NoRoom:
    """The error for a window that does not fit, with what makes it smaller."""
    free, total = torch.cuda.mem_get_info(device)
    return NoRoom(
        f"{nbytes} bytes of a window do not fit on {device}: {free} of {total} bytes are free; "
        "a smaller window_bytes= or max_tokens= shrinks it, torch.cuda.empty_cache() gives back what torch holds unused"
    )
