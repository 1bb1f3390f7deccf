"""A clock for operations that all ranks take part in."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timed:
    """An operation of another library.

    Attributes:
        about: fields of its row: what, layout, payload, sms.
        calls: the call on each of several inputs.
        graph: it can be captured.
        by_expert: it sends a row for each (token, expert); otherwise one for each (token, rank).
        period: calls after which its buffers are those of the first call again. A graph has a multiple of them, and so
            have the calls between two replays.
    """

    about: dict[str, Any]
    calls: Sequence[Call]
    graph: bool = True
    by_expert: bool = False
    period: int = 1


class Rotation:
    """One operation on several inputs: each call takes the next. All ranks make equal calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        self._next = 0

    def __call__(self) -> Any:
        call = self.calls[self._next]
        self._next = (self._next + 1) % len(self.calls)
        return call()


_HEAD_START = 500_000  # cycles of delay on the device, enough for the host to enqueue a whole replay first
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}  # several times the last-level cache
_HOST_BATCHES, _HOST_CALLS = 20, 10
_HOST_S = 2.0  # seconds after which no further batch begins: an operation may take milliseconds
_SUSTAINED_TIMES, _WARM_UP = 3, 8  # sustained runs of each call; an untimed warm-up takes 1 / _WARM_UP of a run


def orders(names: Iterable[str], replays: int) -> Iterator[list[str]]:
    """Yield an order of the names for each replay, drawn anew, the same on all ranks.

    The clock rate and the caches of a GPU depend on the call before: none of the names always follows the same one.
    """
    draw, order = random.Random(0), list(names)
    for _ in range(replays):
        draw.shuffle(order)
        yield order


def device_us(call: Call, head_start: int = _HEAD_START) -> float:
    """Return the microseconds of a call's work on the current stream, behind a delay of `head_start` cycles."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(head_start)  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


class Clock:
    """A timer of one call on every rank at once. All ranks make equal calls of the Clock.

    On GPUs a time is that of one operation out of `chain`, either in one captured graph (`graph`) or enqueued one by
    one by the host. Right before, ranks synchronize on the device. In graph replay the device also waits until the host
    has enqueued everything. Neither wait is part of the time.

    On CPUs a time is that of one call out of `chain`, as the caller sees it.

    With `cold`, 256 MB (CPUs: 64 MB) are written before every part of an operation, so that none of its data is in the
    cache. On GPUs the time of a chain of such writes alone is subtracted; on CPUs the write is outside of the timed
    part and precedes the whole chain.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, graph: bool, cold: bool, chain: int, replays: int
    ) -> None:
        self._group, self._device, self._on_gpu = group, device, device.type == "cuda"
        self.graph, self._cold, self.chain, self._replays = graph, cold, chain, replays

    def __call__(self, call: Call, meet: Call | None = None, *, parts: int = 1) -> list[float]:
        """Return the microseconds of one operation on this rank, by replay.

        `meet` is an operation in which ranks wait for each other on the device; default: `call` itself. An operation of
        several `parts` calls `flush` between them, so that each part finds what it finds alone.
        """
        if not self._on_gpu:
            return self._on_cpu(call)
        beside = self._flush_us * parts if self._cold else 0.0
        return [us - beside for us in self._on_gpu_times(call, self.flush, meet or call)]

    def flush(self) -> None:
        """Flush the caches if this Clock is cold."""
        if self._cold:
            self._flush()

    def alternately(self, calls: dict[str, Call], meet: Call) -> dict[str, list[float]]:
        """Return the microseconds of one operation of each of `calls` on this rank, by replay.

        Calls alternate, because a GPU under sustained load runs at another clock rate than one that was idle. See
        orders() for the order.
        """
        return self.burst_and_sustained(calls, meet)[0]

    def burst_and_sustained(
        self, calls: dict[str, Call], meet: Call, sustained: Iterable[str] = (), seconds: float = 0.0
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Return the times of `alternately`, and by name the microseconds of an operation in a run without a pause.

        A single replay is a burst: the GPU may not have reached its limit of power. Sustained, the same chain repeats
        for `seconds`, after a warm-up; the time is the median of three such runs, which alternate as well.

        Args:
            calls, meet: see `alternately`.
            sustained: names of calls to measure without a pause.
            seconds: length of a run; with 0, and on CPUs, no run is measured.
        """
        if not self._on_gpu:
            return {name: self._on_cpu(call) for name, call in calls.items()}, {}
        beside = self._flush_us if self._cold else 0.0
        runs = {name: self._ready(call, self.flush, meet) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for order in orders(runs, self._replays + 1):
            for name in order:
                times[name].append(self._replay_us(runs[name], meet) - beside)
        times = {name: found[1:] for name, found in times.items()}
        counts = {
            name: self._least(int(seconds * 1e6 / statistics.median(times[name]) / self.chain) + 1)
            for name in (sustained if seconds else ())
        }
        without: dict[str, list[float]] = {name: [] for name in counts}
        for order in orders(counts, _SUSTAINED_TIMES):
            for name in order:
                self._replay_us(runs[name], meet, counts[name] // _WARM_UP + 1)
                without[name].append(self._replay_us(runs[name], meet, counts[name]) - beside)
        return times, {name: statistics.median(found) for name, found in without.items()}

    def host_us(self, call: Call) -> float | None:
        """Return the median microseconds until a call returns to the host; None on CPUs, where both are the same."""
        times = self.host_times(call)
        return statistics.median(times[0]) if times else None

    def host_times(self, *calls: Call, batches: int = _HOST_BATCHES) -> list[list[float]]:
        """Return the microseconds until each of the calls returns to the host, by repetition; empty on CPUs.

        Calls alternate, so that they find the host and its queue in the same state.

        Args:
            calls: what to time.
            batches: how many times the device is waited for; fewer if calls take long.
        """
        if not self._on_gpu:
            return []
        times: list[list[float]] = [[] for _ in calls]
        started = time.perf_counter()
        for _ in range(batches):
            torch.cuda.synchronize()
            if self._on_any(bool(times[0]) and time.perf_counter() - started > _HOST_S):
                break
            for _ in range(_HOST_CALLS):
                for call, found in zip(calls, times, strict=True):
                    begin = time.perf_counter()
                    call()
                    found.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
        return times

    def _on_any(self, here: bool) -> bool:
        """Return True if `here` is true on any rank. Collective."""
        anywhere = torch.tensor([here], dtype=torch.int32)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._group)
        return bool(anywhere)

    def _least(self, here: int) -> int:
        """Return the least `here` of all ranks. Collective."""
        anywhere = torch.tensor([here])
        dist.all_reduce(anywhere, dist.ReduceOp.MIN, group=self._group)
        return int(anywhere)

    def _on_cpu(self, call: Call) -> list[float]:
        times = []
        for _ in range(self._replays + 1):
            self.flush()
            dist.barrier(self._group)
            begin = time.perf_counter()
            for _ in range(self.chain):
                call()
            times.append((time.perf_counter() - begin) * 1e6 / self.chain)
        return times[1:]

    def _on_gpu_times(self, call: Call, before: Call, meet: Call) -> list[float]:
        run = self._ready(call, before, meet)
        return [self._replay_us(run, meet) for _ in range(self._replays + 1)][1:]

    def _ready(self, call: Call, before: Call, meet: Call) -> Call:
        """Warm up, and return a call that runs the chain."""
        for _ in range(2):  # compiles kernels and fills the allocators
            call()
            meet()
        torch.cuda.synchronize()
        run = partial(self._chain, call, before)
        return captured(run) if self.graph else run

    def _replay_us(self, run: Call, meet: Call, times: int = 1) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier(self._group)
        if self.graph:
            torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        meet()
        begin.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / self.chain / times

    def _chain(self, call: Call, before: Call) -> None:
        for _ in range(self.chain):
            before()
            call()

    @cached_property
    def _filler(self) -> torch.Tensor:
        return torch.zeros(FLUSH_BYTES[self._device.type], dtype=torch.uint8, device=self._device)

    def _flush(self) -> None:
        self._filler.fill_(1)

    @cached_property
    def _flush_us(self) -> float:
        return statistics.median(self._on_gpu_times(_nothing, self._flush, _nothing))


def captured(call: Call) -> Call:
    """Capture a call in a graph, and return its replay."""
    graph = torch.cuda.CUDAGraph()
    # thread_local, because NCCL's own thread queries events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def _nothing() -> None:
    pass


def rounded(value: float, places: int) -> float:
    """Round a figure to `places` decimal places, but keep 3 significant digits: no positive figure becomes 0."""
    return round(value, max(places, 2 - math.floor(math.log10(abs(value))))) if value else 0.0


def percentiles(by_rank: list[list[float]]) -> dict[str, float]:
    """Return p50, p90 and p99 over replays of the slowest rank. All ranks have equally many replays."""
    slowest: list[float] = [max(replay) for replay in zip(*by_rank, strict=True)]
    if len(slowest) == 1:
        return dict.fromkeys(("p50", "p90", "p99"), slowest[0])
    cuts = statistics.quantiles(slowest, n=100, method="inclusive")
    return {f"p{part}": rounded(cuts[part - 1], 3) for part in (50, 90, 99)}
