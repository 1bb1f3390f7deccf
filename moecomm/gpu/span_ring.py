"""Rings of spans that traced kernels fill, one for each GPU of this process.  csrc/device/trace.cuh writes a record.

Kernels are compiled with MOECOMM_TRACE while `wanted`, under names of their own in the cache of kernels.  Records are
in pinned host memory: the host reads them without a wait or a call of the driver, also while a kernel hangs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from moecomm.gpu import cuda_driver

DEFINITION = "#define MOECOMM_TRACE 1\n"
SYMBOL = "moecomm_span_ring"
RECORD_BYTES = 32
_RECORDS = 1 << 17  # 4 MiB
_WORDS = RECORD_BYTES // 4
_NUMBER, _NUMBER_TOO, _OWNER = 2, 5, 6  # words of a record
_MASK = 0xFFFFFFFF

wanted = False  # set while a trace goes on

Write = Callable[[bytes, int], None]  # complete records of one owner; how many of any owner were lost before


class SpanRing:
    """A ring and the owners of its records.

    Args:
        records: int32 `[n, 8]` in memory that kernels reach, n a power of two, zeroed.
        following: int32 `[1]` in memory of the device, zero.
    """

    def __init__(self, records: torch.Tensor, following: torch.Tensor) -> None:
        self._records, self._next = records, following
        self._numbers = torch.arange(1, 257)
        self._taken = 0  # records so far
        self._lock = threading.Lock()
        self._owners: dict[int, Write] = {}

    @property
    def descriptor(self) -> bytes:
        """Bytes of the MoecommSpanRing that kernels read."""
        words = (self._records.data_ptr(), self._next.data_ptr())
        return bytes((ctypes.c_uint64 * 2)(*words)) + bytes((ctypes.c_uint32 * 2)(len(self._records) - 1, 0))

    def watch(self, record: int, write: Write) -> bool:
        """Hand records of the rank with this failure record to `write`.  False: those of another rank look the same."""
        with self._lock:
            return self._owners.setdefault(owner_of(record), write) is write

    def forget(self, record: int, write: Write) -> None:
        """Drop later records of the rank for which `write` was registered."""
        with self._lock:
            if self._owners.get(owner_of(record)) is write:
                del self._owners[owner_of(record)]

    def drain(self) -> None:
        """Hand out all records that have arrived.  Waits for nothing."""
        with self._lock:
            while self._take():
                pass

    def _take(self) -> bool:
        """Hand out some records; return whether there may be more."""
        size = len(self._records)
        first = self._taken % size
        found = self._records[first : first + len(self._numbers)].clone()  # a kernel may be overwriting them
        numbers = found[:, [_NUMBER, _NUMBER_TOO]].long() - (self._numbers[: len(found), None] + self._taken)
        ahead = ((numbers + (1 << 31)) & _MASK) - (1 << 31)  # modulo 2^32
        good = (ahead == 0).all(dim=1)
        count = len(found) if bool(good.all()) else int(good.int().argmin())
        self._hand_out(found[:count], 0)
        self._taken += count
        if count == len(found):
            return True
        laps = int(ahead[count].min())
        if laps < size:  # not there yet
            return False
        lost = laps - size + 1  # records up to the oldest that is still there
        self._taken += lost
        self._hand_out(found[:0], lost)
        return True

    def _hand_out(self, found: torch.Tensor, lost: int) -> None:
        owners = found[:, _OWNER].long() & _MASK
        for owner, write in self._owners.items():
            own = found[owners == owner].contiguous()
            if len(own) or lost:
                write(ctypes.string_at(own.data_ptr(), own.nbytes), lost)


def owner_of(record: int) -> int:
    """Return the word by which records name a rank: a part of the address of its failure record."""
    return record // 64 & _MASK


_rings: dict[int, SpanRing] = {}
_making = threading.Lock()


def ring_of(device: int) -> SpanRing:
    """Return the ring of a GPU, which lives as long as the process, as kernels do."""
    with _making:
        if device not in _rings:
            records = torch.zeros(_RECORDS, _WORDS, dtype=torch.int32, pin_memory=True)
            _rings[device] = SpanRing(records, torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}"))
        return _rings[device]


def attach(module: Any, device: int) -> None:
    """Tell the kernels of a module, compiled with DEFINITION, where the ring is.  In the context of the device."""
    address, size = cuda_driver.call("cuModuleGetGlobal", module, SYMBOL.encode())
    content = ring_of(device).descriptor
    assert int(size) == len(content), "SpanRing.descriptor and csrc/device/trace.cuh disagree"
    cuda_driver.call("cuMemcpyHtoD", address, content, len(content))
