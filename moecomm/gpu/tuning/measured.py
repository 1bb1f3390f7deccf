"""Timing of several forms of a call.  All ranks time them together, and take the same one.

The caller says how ranks begin together, how the host waits, and how ranks exchange their times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_REPETITIONS, _CALLS = 7, 3  # timed runs of each form, which alternate, and calls in a run
NEVER = 1 << 62  # nanoseconds of a form that a rank can't run

Call = Callable[[], Any]


class Clock:
    """Clock of a GPU's current stream.

    Args:
        device: the GPU.
        head_start: cycles by which delay() delays the stream: long enough for the host to enqueue a run.
    """

    def __init__(self, device: torch.device, head_start: int = 1_000_000) -> None:
        self._device, self._head_start = device, head_start

    def delay(self) -> None:
        """Delay the stream, so that the host has enqueued a run before it begins on the device."""
        with torch.cuda.device(self._device):
            torch.cuda._sleep(self._head_start)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Enqueue an event that marks this point of the stream."""
        found = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        found.record(torch.cuda.current_stream(self._device))
        return found

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Return whether the stream has passed a mark."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def us(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the microseconds between two marks that the stream has passed."""
        return float(begin.elapsed_time(end)) * 1e3


def time_forms(
    clock: Clock,
    forms: Mapping[str, Call],
    begin: Callable[[Call], object],
    wait: Callable[[torch.cuda.Event], None],
    refusals: tuple[type[Exception], ...] = (),
) -> dict[str, float]:
    """Return the microseconds of a call in each form on this rank: the median of several runs.

    Args:
        clock: of the device.
        forms: the call in each form: the same forms in the same order on all ranks.
        begin: gets the call, and makes ranks begin a run of it together.
        wait: waits until the device has passed a mark, and raises errors of the calls before it.
        refusals: a form whose first call raises one of these is left out.
    """
    ready: dict[str, Call] = {}
    for form, call in forms.items():  # compiles kernels, and connects to peers
        try:
            call()
        except refusals:  # another form may take less memory
            continue
        wait(clock.mark())
        ready[form] = call
    found: dict[str, list[float]] = {form: [] for form in ready}
    in_turn = list(ready.items())
    for _ in range(_REPETITIONS):
        for form, call in in_turn:
            clock.delay()
            begin(call)
            first = clock.mark()
            for _ in range(_CALLS):
                call()
            last = clock.mark()
            wait(last)
            found[form].append(clock.us(first, last) / _CALLS)
        in_turn.reverse()  # a call that heats the GPU slows the one behind it
    return {form: statistics.median(us) for form, us in found.items()}


def in_ns(forms: Sequence[str], us: Mapping[str, float]) -> list[int]:
    """Return the times of a rank as whole nanoseconds, to send to others; NEVER: it can't run the form."""
    return [round(1e3 * us[form]) if form in us else NEVER for form in forms]


def fastest(
    forms: Sequence[str], by_rank: Sequence[Sequence[int]], margin: float = 1.0
) -> tuple[str, dict[str, float]]:
    """Return the form that all ranks take, and the microseconds of each form on the slowest rank.

    Of forms that take at most `margin` times as long as the fastest the first is taken.

    Args:
        forms: in the order of the times.
        by_rank: times of each rank, from in_ns(); more numbers may follow them.
    """
    slowest = dict(zip(forms, map(max, zip(*by_rank, strict=True)), strict=False))
    least = min(slowest.values())
    form = next(form for form, ns in slowest.items() if ns <= margin * least)
    return form, {form: ns / 1e3 for form, ns in slowest.items() if ns < NEVER}


def rounded_up(rows: int) -> int:
    """Return the number of rows that stands for `rows` in measurements: the next power of two, or 0."""
    return 1 << (rows - 1).bit_length() if rows else 0
