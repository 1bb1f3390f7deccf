"""Ranks that start a call together: on GPUs on the device, which also takes the time, on CPUs by the host's clock."""

from __future__ import annotations

import ctypes
import time
from types import TracebackType

import torch
import torch.distributed as dist

from moecomm.base.protocol import MAX_RANKS
from moecomm.errors import Timeout
from moecomm.gpu import plain_kernel
from moecomm_bench import kernels
from moecomm_bench.receive_buffer import ReceiveBuffer

_WORDS = 2 + 2 * MAX_RANKS  # kStartWords
_TIMEOUT_NS = 20_000_000_000
_AHEAD_S = 0.5e-3  # from the moment at which rank 0 names the start to the start: enough for the others to hear of it


class _StartArgs(ctypes.Structure):
    """StartArgs of csrc/bench/start.cuh."""

    _fields_ = (
        ("blocks", ctypes.c_uint64 * MAX_RANKS),
        *((name, ctypes.c_uint64) for name in ("times", "abort_here", "abort_host", "timeout_ns")),
        *((name, ctypes.c_int32) for name in ("rank", "ranks")),
    )


class DeviceStart:
    """A start on GPUs that load and store each other's memory. Collective; a context manager.

    `begin` and `finish` enqueue a kernel each on the current stream, also in a captured graph, with the work between.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._window = ReceiveBuffer(group, 8 * _WORDS, "lsa", device)
        self._times = torch.zeros(5, dtype=torch.int64, device=device)
        here, host = self._window.abort_words
        blocks = (ctypes.c_uint64 * MAX_RANKS)(*self._window.addresses)
        rank, ranks = self._window.rank, self._window.ranks
        self._args = _StartArgs(blocks, self._times.data_ptr(), here, host, _TIMEOUT_NS, rank, ranks)

    @property
    def starts_address(self) -> int:
        """Address of the number of starts so far, which `begin` increments on the device."""
        return self._times.data_ptr()

    def begin(self) -> None:
        """Enqueue the start: it ends on all ranks within a fraction of a microsecond."""
        plain_kernel.launch(kernels.START["start"], 1, self._args)

    def finish(self) -> None:
        """Enqueue the end of the timed work."""
        plain_kernel.launch(kernels.START["finish"], 1, self._args)

    def us(self) -> float:
        """Wait for the device, and return the microseconds from the latest start to its end. Raises Timeout."""
        _, begin, end, outcome, _ = self._times.tolist()
        if outcome:
            text = f"rank {self._window.rank} waited for the others to start"
            raise Timeout(text, rank=self._window.rank, peer=0, phase="counts", op="start", round=0)
        return float(end - begin) / 1e3

    def step_ns(self) -> int:
        """Return the nanoseconds between two values of the device's clock."""
        plain_kernel.launch(kernels.START["clock_step"], 1, self._args)
        return int(self._times.tolist()[-1])

    def __enter__(self) -> DeviceStart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._window.buffer.close()


def on_host(group: dist.ProcessGroup) -> None:
    """Return at the same moment in all processes of a host. Collective.

    Rank 0 names the moment, and all ranks spin until then. A rank that the operating system does not run at that moment
    is late.
    """
    dist.barrier(group)
    moment = torch.tensor([time.perf_counter() + _AHEAD_S], dtype=torch.float64)
    dist.broadcast(moment, dist.get_global_rank(group, 0), group=group)
    begin = float(moment)
    while time.perf_counter() < begin:
        pass
