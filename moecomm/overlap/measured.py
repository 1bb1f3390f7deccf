"""Measured forms of calls, for `fused=None` on GPUs: the forms of a first call are timed, and all ranks take one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from moecomm.errors import BadInput, MoecommError, Timeout, Unsupported
from moecomm.gpu.tuning.measured import Call, Clock, fastest, in_ns, rounded_up, time_forms
from moecomm.overlap.agreement import OPERATORS, WORDS, FirstCalls, compared_names
from moecomm.overlap.sizes import Sizes
from moecomm.window import Window

_MARGIN = 1.02  # of forms that are as fast but for noise, the earlier has fewer roundings, and waits with a deadline
_LOOK_S = 1e-4  # between two looks at the device
_GRACE_S = 1.0  # for kernels, whose errors name the rank that they waited for
_ROWS = ("M", "C", "B")  # sizes that vary from call to call

Run = Callable[..., Any]


class Choice(NamedTuple):
    """A measured form of calls.

    Attributes:
        operator: its name.
        dtype: of the matrices or tables.
        sizes: those of the call that was measured and are the same on all ranks, by name.
        us: microseconds of each form on the slowest rank; forms are "fused", "kernel", "collectives" and "copies".
        form: the one that is taken.
    """

    operator: str
    dtype: torch.dtype
    sizes: dict[str, int]
    us: dict[str, float]
    form: str


class Choices:
    """The forms that all ranks have chosen by measuring them, by operator, dtype and sizes.

    Rows count up to the next power of two, so that batches of any size need few measurements.

    Args:
        window: of all ranks.
        first_calls: the agreement of its Workspace.
    """

    def __init__(self, window: Window, first_calls: FirstCalls) -> None:
        self._window, self._first_calls = window, first_calls
        self._clock = Clock(window.device)
        self._made: dict[tuple[Any, ...], Choice] = {}

    @property
    def made(self) -> tuple[Choice, ...]:
        """All of them, in the order of the measurements."""
        return tuple(self._made.values())

    def find(self, sizes: Sizes, forms: Iterable[str]) -> str | None:
        """Return the form that has been chosen among these; None: they have not been measured."""
        found = self._made.get(_key(sizes, forms))
        return None if found is None else found.form

    @torch.no_grad()
    def measure(self, sizes: Sizes, runs: dict[str, Run], given: tuple[Any, ...]) -> str:
        """Run a call in each form, and return the fastest one of the slowest rank.  Collective; not in a capture.

        The host waits for the device.  A form that raises BadInput or Unsupported, or runs out of memory, is not taken.

        Args:
            sizes: of the call, for which find() returns None.
            runs: what runs the call, by form: the same forms in the same order on all ranks.
            given: arguments.

        Raises:
            Timeout, PeerLost, Aborted: a rank does not take part.
        """
        window = self._window
        try:
            times = self._times({form: partial(run, *given) for form, run in runs.items()})
        except MoecommError:
            raise
        except BaseException:
            window.abort()  # others would wait for what this rank does not run
            raise
        mine = in_ns(tuple(runs), times)
        form, us = fastest(tuple(runs), self._first_calls.exchange(mine + [0] * (WORDS - len(mine))), _MARGIN)
        compared = {name: sizes.dims[name] for name in compared_names(sizes, None)}
        self._made[_key(sizes, runs)] = Choice(sizes.operator, sizes.given, compared, us, form)
        return form

    def _times(self, calls: dict[str, Call]) -> dict[str, float]:
        """Return the microseconds of each form on this rank; all ranks begin each run together."""
        refusals = BadInput, Unsupported, torch.cuda.OutOfMemoryError
        return time_forms(self._clock, calls, lambda _: self._window.barrier(), self._wait, refusals)

    def _wait(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has passed a mark: a collective has no deadline, and does not see that a rank is lost.

        Raises Timeout, PeerLost, Aborted.
        """
        window = self._window
        end = time.monotonic() + window.timeout_s + _GRACE_S
        while not self._clock.passed(mark):
            window.raise_failure()
            if time.monotonic() > end:
                window.abort()
                raise Timeout(
                    f"rank {window.rank} measured the forms of a call, and waited for the device; gave up after "
                    f"{window.timeout_s:.1f} s",
                    rank=window.rank,
                    peer=-1,
                    phase="signal",
                    op="wait",
                    round=0,
                )
            time.sleep(_LOOK_S)
        window.raise_failure()


def _key(sizes: Sizes, forms: Iterable[str]) -> tuple[Any, ...]:
    """Return the key of a choice, the same on all ranks.  It leaves out what a rank alone decides."""
    names = compared_names(sizes, None)
    dims = [rounded_up(sizes.dims[name]) if name in _ROWS else sizes.dims[name] for name in names]
    return OPERATORS.index(sizes.operator), sizes.given, *dims, *forms
