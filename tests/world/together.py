"""Ranks whose rounds one thread runs for all: by the emulator of GPU kernels, or as virtual ranks of a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import moecomm
from moecomm.testing import LocalBuffers

from .program import Program
from .threads import WAIT_S, Threads

CALLS = ("dispatch", "combine", "repeat", "mask", "unmask", "shrink", "grow", "place", "check kept", "drop")


class Together(Threads):
    """Runs a case with a thread for each rank, which hand their rounds to the last that comes.

    It makes the calls of CALLS, with room for all rows.  Of what goes wrong, it has ranks that close.
    """

    rounds_fail = False

    def open(self, program: Program, group: Any, sizes: dict[str, Any]) -> Any:
        """Open the Buffer of a rank."""
        return Joint(self, program, super().open(program, group, sizes))

    def together(self, name: str, joint: Joint, given: Any, run: Callable[[list[Any], list[Any]], list[Any]]) -> Any:
        """Make a call of all ranks that take part, when the last of them comes; return this rank's result."""
        state = joint.program.state
        with self._lock:
            calls, done = self._calls.setdefault(name, ({}, threading.Event()))
            calls[joint.program.rank] = joint, given
            last = len(calls) == len(state.there)
        if last:
            ranks = sorted(calls)
            try:
                results = run([calls[rank][0].real for rank in ranks], [calls[rank][1] for rank in ranks])
            except BaseException as error:  # noqa: BLE001 - raised on every rank
                results = [error] * len(ranks)
            self._results[name] = dict(zip(ranks, results, strict=True))
            done.set()
        assert done.wait(WAIT_S), f"ranks do not meet in {name!r}"
        result = self._results[name][joint.program.rank]
        if isinstance(result, BaseException):
            raise result
        return result

    def run(self) -> Any:
        """Run the case; return the first failure."""
        self._calls: dict[str, tuple[dict[int, Any], threading.Event]] = {}
        self._results: dict[str, dict[int, Any]] = {}
        return super().run()


class Joint:
    """A Buffer whose rounds are those of all ranks together.

    Attributes:
        program: of its rank.
        real: the Buffer.
    """

    def __init__(self, executor: Together, program: Program, real: moecomm.Buffer) -> None:
        self.program, self.real, self._executor = program, real, executor
        self._at, self._nth = -1, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def _together(self, call: str, given: Any) -> Any:
        if self.program.at != self._at:
            self._at, self._nth = self.program.at, 0
        self._nth += 1

        def run(buffers: list[Any], calls: list[Any]) -> list[Any]:
            result: list[Any] = getattr(LocalBuffers.of(buffers), call)(calls)
            return result

        return self._executor.together(f"{self._at} {self._nth}", self, given, run)

    def dispatch(self, x: Any, topk_idx: Any = None, **given: Any) -> Any:
        """See Buffer.dispatch."""
        if topk_idx is not None:
            given["topk_idx"] = topk_idx
        return self._together("dispatch", {"x": x, **given})

    def dispatch_begin(self, **given: Any) -> Any:
        """See Buffer.dispatch_begin."""
        return self._together("dispatch_begin", given)

    def dispatch_end(self, routed: Any) -> Any:
        """See Buffer.dispatch_end."""
        return self._together("dispatch_end", routed)

    def combine(self, **given: Any) -> Any:
        """See Buffer.combine."""
        return self._together("combine", given)
