"""Spans of a rank's kernels: taken from the ring of its GPU, and the GPU's clock compared with the host's."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from moecomm import _native
from moecomm.gpu import cuda_driver, plain_kernel
from moecomm.gpu.plain_kernel import PlainKernel
from moecomm.rounds.spans import now_ns

# Names of Role in csrc/device/trace.cuh, in its order.
ROLES = (
    *("kernel", "agree", "send", "receive", "metadata", "flags", "put", "forward", "unpack"),
    *("push", "reduce", "pull", "return_forward", "drain"),
    *("publish", "fetch", "await_rows", "await_tiles", "gemm_1", "gemm_2", "send_results", "await_results"),
)
# Roles that are one thread's or follow each other, and so share a track.
_TRACKS = {"gemm_1": "math", "gemm_2": "math", "send_results": "math", "await_rows": "scheduler"}
_TRACKS |= {"await_tiles": "scheduler", "await_results": "reduce"}
_RECORD = struct.Struct("<QIIIIII")
_ASKS, _LIMIT_S = 20, 0.5
CLOCK = PlainKernel("device/globaltimer", "store_time", "u64", 32)


class DeviceSpan(NamedTuple):
    """A span of one role of a block.  Times are of the GPU's globaltimer, in ns."""

    name: str
    track: str
    begin_ns: int
    end_ns: int
    round: int


class ClockPoint(NamedTuple):
    """One moment on the GPU's clock and on CLOCK_MONOTONIC, and how far that may be off, in ns."""

    device_ns: int
    host_ns: int
    error_ns: int


class _Address(ctypes.Structure):
    _fields_ = (("to", ctypes.c_uint64),)


def decode(content: bytes) -> Iterator[DeviceSpan]:
    """Return the spans of complete records.  Raises ValueError for a role that is none."""
    for begin_ns, _, number, lasted_ns, _, _, what in _RECORD.iter_unpack(content[: len(content) // 32 * 32]):
        role, block = what & 0xFF, what >> 8
        if role >= len(ROLES):
            raise ValueError(f"role {role}")
        name = ROLES[role]
        track = f"block {block} {_TRACKS.get(name, name)}"
        yield DeviceSpan(name.replace("_", " "), track, begin_ns, begin_ns + lasted_ns, number)


def compare_clocks(device: torch.device) -> ClockPoint | None:
    """Ask the GPU for its time, several times, and return the answer that came soonest; None: it is too busy.

    The GPU's time was taken between the host's times before the launch and after the answer.
    """
    answer = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    best: ClockPoint | None = None
    if _native.cuda_context() == 0:
        cuda_driver.bind_thread(device.index)
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        args = _Address(answer.data_ptr())
        for _ in range(_ASKS):
            answer.zero_()
            begin_ns = now_ns()
            plain_kernel.launch(CLOCK, 1, args)
            limit = time.monotonic() + _LIMIT_S
            while (device_ns := int(answer[0])) == 0:
                if time.monotonic() > limit:
                    torch.cuda.current_stream().synchronize()  # it will still write to `answer`
                    return best
            end_ns = now_ns()
            point = ClockPoint(device_ns, (begin_ns + end_ns) // 2, (end_ns - begin_ns + 1) // 2)
            if best is None or point.error_ns < best.error_ns:
                best = point
        torch.cuda.current_stream().synchronize()
    return best


def on_host(points: list[ClockPoint], device_ns: int) -> int:
    """Return a time of the GPU's clock on the host's: between two points the clocks differ linearly."""
    first, last = points[0], points[-1]
    for point in points:
        if point.device_ns <= device_ns:
            first = point
    for point in reversed(points):
        if point.device_ns > device_ns:
            last = point
    between = last.device_ns - first.device_ns
    here, there = first.host_ns - first.device_ns, last.host_ns - last.device_ns
    share = 0 if between <= 0 else (device_ns - first.device_ns) / between
    return device_ns + here + round((there - here) * share)
