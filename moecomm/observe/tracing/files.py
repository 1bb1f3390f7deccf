"""Files of spans: one for each rank of a Buffer, written as the spans end, so that a killed rank leaves what it did.

`moecomm-<identity of the Buffer>-rank<rank>-<number>.spans`, mode 0600, has a line of JSON for each span, and a header
line before them.  A span is written with one system call when it ends.  On GPUs, a file beside it, `.kernels`, has the
records of kernels as they come (csrc/device/trace.cuh), and lines in between compare the clocks.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moecomm import _native
from moecomm.base import trusted_files
from moecomm.base.processes import clock_domain
from moecomm.base.trusted_files import Access
from moecomm.gpu import cuda_driver, plain_kernel, span_ring
from moecomm.gpu.plain_kernel import PlainKernel
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.spans import now_ns

log = logging.getLogger("moecomm")

FORMAT = 1
SUFFIX, OF_KERNELS = ".spans", ".kernels"
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


class SpanFile:
    """The file of one rank of a Buffer: a Sink.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, folder: Path, rounds: Rounds, before: Rounds | None) -> None:
        number = secrets.token_hex(4)  # a Buffer may be traced several times
        path = folder / f"moecomm-{rounds.origin.identity}-rank{rounds.rank}-{number}{SUFFIX}"
        self._file = trusted_files.create(path, Access.READ_ONLY)
        weakref.finalize(self, os.close, self._file)
        self._put(_header(rounds, before))
        self._source = Steps(rounds) if rounds.on_cpu else KernelSpans(rounds, path.with_suffix(OF_KERNELS))

    def write(self, name: str, track: str, begin_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        self._put([name, track, begin_ns, end_ns, args])

    def drain(self) -> None:
        self._put(*self._source.take())

    def finish(self) -> None:
        self._put(*self._source.end())

    def _put(self, *lines: Any) -> None:
        if not lines:
            return
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
        with suppress(OSError):  # a full disk is no reason for a round to fail
            os.write(self._file, text.encode())


class Steps:
    """Steps of rounds on CPU ranks."""

    def __init__(self, rounds: Rounds) -> None:
        self._record = rounds.session.context.record
        _native.trace_rounds(self._record, True)
        self._untrace = weakref.finalize(self, _native.trace_rounds, self._record, False)

    def take(self) -> list[Any]:
        """Return the lines of steps since the last call."""
        if not self._untrace.alive:
            return []
        steps, dropped = _native.take_steps(self._record)
        return [*(_step(*step) for step in steps), *([{"dropped": dropped}] if dropped else [])]

    def end(self) -> list[Any]:
        """Return the last lines."""
        lines = self.take()
        self._untrace()
        return lines


class KernelSpans:
    """Spans of kernels.  Their records go to a file of their own, unless another rank's would look the same.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, rounds: Rounds, path: Path) -> None:
        self._session, self._record = rounds.session, rounds.session.context.record
        self._ring = span_ring.ring_of(rounds.device.index)
        file, self._lost = trusted_files.create(path, Access.READ_ONLY), [0]
        lost = self._lost

        def write(content: bytes, missing: int) -> None:
            lost[0] += missing
            with suppress(OSError):
                os.write(file, content)

        if not self._ring.watch(self._record, write):
            log.warning("rank %d: spans of kernels are not written: another rank's look the same", rounds.rank)
        self._end = weakref.finalize(self, _end, self._ring, self._record, write, file)
        self._compare_clocks()

    def _compare_clocks(self) -> None:
        self._clock: list[Any] = []
        with suppress(RuntimeError):  # of a broken CUDA context
            if not self._session.capturing() and (point := compare_clocks(self._session.device)) is not None:
                self._clock.append({"clock": list(point)})

    def take(self) -> list[Any]:
        """Drain finished records into the file; return clock and loss lines for the step file."""
        if not self._end.alive:
            return []
        self._ring.drain()
        lines, self._clock = self._clock, []
        if self._lost[0]:
            lines.append({"dropped": self._lost[0]})
            self._lost[0] = 0
        return lines

    def end(self) -> list[Any]:
        """Wait for the rounds so far, which have deadlines, and drain for the last time."""
        if not self._end.alive:
            return []
        lines = self.take()
        with suppress(RuntimeError):
            if not self._session.capturing():
                self._session.synchronize()
        self._compare_clocks()
        lines += self.take()
        self._end()
        return lines


def _end(ring: span_ring.SpanRing, record: int, write: span_ring.Write, file: int) -> None:
    ring.forget(record, write)
    os.close(file)


def _step(begin_ns: int, end_ns: int, round_number: int, worker: int, peer: int, name: str) -> list[Any]:
    """Return the line of a step of a round on CPU ranks; `peer`: the rank that was waited for, -1: none."""
    args = {"round": round_number} if peer < 0 else {"round": round_number, "peer": peer}
    return [name if peer < 0 else f"wait for rank {peer}: {name}", f"thread {worker}", begin_ns, end_ns, args]


def _header(rounds: Rounds, before: Rounds | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "buffer": rounds.origin.identity,
        "before": None if before is None else {"buffer": before.origin.identity, "rank": before.rank},
        "rank": rounds.rank,
        "ranks": rounds.num_ranks,
        "host": socket.gethostname(),
        "clock": clock_domain().hex(),
        "pid": os.getpid(),
        "backend": rounds.session.name,
        "barrier": list(rounds.origin.barrier),
        "began_ns": now_ns(),
    }
