"""Single calls: caches flushed before each, ranks that start together, and nothing in flight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from moecomm_bench.clock import FLUSH_BYTES, Call, captured, percentiles
from moecomm_bench.ranks import together
from moecomm_bench.start import DeviceStart, on_host

_STEADY = 3  # calls of each kind before the timed ones


class Singles:
    """A timer of single calls on every rank at once. All ranks make equal calls of it. Collective; a context manager.

    Before each call 256 MB (CPUs: 64 MB) are written, so that none of its data is in the cache, and ranks start within
    a fraction of a microsecond (moecomm_bench.start). On GPUs a time is that between two stamps of the device's clock,
    right after the start and right after the call, in one captured graph: nothing is subtracted, and `floor_us` is the
    time of no work at all. On CPUs a time is that of the call.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, calls: int) -> None:
        self._group, self._on_gpu, self._calls = group, device.type == "cuda", calls
        self._filler = torch.zeros(FLUSH_BYTES[device.type], dtype=torch.uint8, device=device)
        self._open = ExitStack()
        self._start = self._open.enter_context(DeviceStart(group, device)) if self._on_gpu else None

    def __enter__(self) -> Singles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def __call__(self, calls: Sequence[Call], graph: bool = True, period: int = 1) -> list[float]:
        """Return the microseconds of single calls on this rank.

        Args:
            calls: the operation on each of several inputs, which take equal shares of the calls.
            graph: capture each on GPUs; without, the host enqueues it while the start waits for other ranks.
            period: see Timed; on GPUs the first calls of a period run before the caches are flushed.
        """
        times: list[float] = []
        for index, call in enumerate(calls):
            share = self._calls * (index + 1) // len(calls) - len(times)
            times += self._on_device(call, share, graph, period) if self._start else self._on_host(call, share)
        return times

    @property
    def starts_address(self) -> int:
        """Address, on the device, of the number of starts so far: another one in each call."""
        assert self._start is not None, "on GPUs"
        return self._start.starts_address

    def about(self) -> dict[str, Any]:
        """Return {calls, floor_us, step_ns}: how many are timed, and on GPUs the time of none and the clock's step."""
        if not self._start:
            return {"calls": self._calls, "floor_us": None, "step_ns": None}
        return {"calls": self._calls, "floor_us": self([_nothing]), "step_ns": self._start.step_ns()}

    def _on_host(self, call: Call, count: int) -> list[float]:
        times = []
        for _ in range(count + 1):
            self._filler.fill_(1)
            on_host(self._group)
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return times[1:]

    def _on_device(self, call: Call, count: int, graph: bool, period: int) -> list[float]:
        assert self._start is not None
        start = self._start

        def single() -> None:
            for _ in range(period - 1):
                call()
            self._filler.fill_(1)
            start.begin()
            call()
            start.finish()

        single()  # compiles kernels and fills the allocators
        start.us()
        run = captured(single) if graph else single
        times = []
        for _ in range(count + _STEADY):
            run()
            times.append(start.us())
        return times[_STEADY:]


def open_singles(
    opened: ExitStack, group: dist.ProcessGroup, device: torch.device, calls: int
) -> tuple[Singles | None, dict[str, Any]]:
    """Open Singles for so many calls in `opened`; returns (it, {alone: Singles.about()}). Collective.

    It is None for 0 calls, without `alone`, and where ranks do not reach each other by load and store, which `alone`
    then says as {why}.
    """
    if not calls:
        return None, {}
    singles, why = together(group, partial(Singles, group, device, calls))
    if singles is None:
        return None, {"alone": {"why": why}}
    opened.enter_context(singles)
    return singles, {"alone": singles.about()}


def merge_about(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the `alone` of all ranks (see open_singles), as {alone: ...}; {} without any."""
    if not by_rank:
        return {}
    about = dict(by_rank[0])
    if about.get("floor_us") is not None:
        about["floor_us"] = percentiles([found["floor_us"] for found in by_rank])
        about["step_ns"] = max(found["step_ns"] for found in by_rank)
    return {"alone": about}


def _nothing() -> None:
    pass
