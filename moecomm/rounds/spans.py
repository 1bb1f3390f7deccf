"""Spans of a rank: begin and end of its calls, of their rounds, and of the host's waits.

A Buffer that is traced has a Spans (`FlightRecorder.spans`), any other has None.  moecomm.observe.tracing makes it, and
writes what it hands over to a file.  Times are of CLOCK_MONOTONIC, in ns: all processes of a host share that clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from moecomm.base import layers
from moecomm.rounds import signature
from moecomm.rounds.tally import Kind

now_ns = time.monotonic_ns
CALLS = "calls"  # the track of all spans of the host


class Sink(Protocol):
    """Writes spans.  `track`: the row of the picture that a span belongs to; spans of a track nest."""

    def write(self, name: str, track: str, begin_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        """Write a span that is over."""
        ...

    def drain(self) -> None:
        """Write what the executor, or the device, has noted of rounds that are over.  Waits for nothing."""
        ...

    def finish(self) -> None:
        """Drain for the last time, because the Buffer closes or is no longer traced."""
        ...


class Ranges(Protocol):
    """Ranges of a profiler, such as NVTX has; the last one opened is the first to close."""

    def push(self, name: str) -> None:
        """Open a range."""
        ...

    def pop(self) -> None:
        """Close it."""
        ...


class Spans:
    """The spans of one rank of a Buffer.  They open and close in the thread that makes the call.

    Args:
        sink: writes them.
        ranges: opened and closed with them; None: there is no profiler.
    """

    def __init__(self, sink: Sink, ranges: Ranges | None) -> None:
        self._sink, self._ranges = sink, ranges
        self._open: list[tuple[str, int, dict[str, Any]]] = []
        self._shown: dict[Kind, dict[str, str]] = {}

    def begin(self, name: str, args: dict[str, Any] | None = None, layer: str = "") -> int:
        """Open a span; return its depth, for end().  A profiler also shows the layer."""
        if self._ranges is not None:
            self._ranges.push(f"moecomm:{name}, {layer}" if layer else f"moecomm:{name}")
        self._open.append((name, now_ns(), {} if args is None else args))
        return len(self._open)

    def begin_round(self, kind: Kind, number: int, tokens: int) -> int:
        """Open the span of a round, or of half of one, and name it in the call that it belongs to."""
        shown = self._shown.get(kind)
        if shown is None:
            shown = self._shown[kind] = {} if kind.op == "reduce" else signature.shown(kind.call, kind.op)
            if "layer" in shown:  # the name of a layer is another thing
                shown["layer number"] = shown.pop("layer")
        args = {"round": number, "tokens": tokens, **shown}
        if layer := layers.current():
            args["layer"] = layer
        for _, _, outer in self._open:
            for name in ("round", "tokens", "layout", "layer"):
                if name in args:
                    outer.setdefault(name, args[name])
        return self.begin(f"{kind.op} round {number}" if number else kind.op, args, layer)

    def end(self, depth: int, error: BaseException | None = None) -> None:
        """Close a span, and those inside of it that an exception has left open."""
        end_ns = now_ns()
        while len(self._open) >= depth:
            name, begin_ns, args = self._open.pop()
            if error is not None:
                args["error"] = type(error).__name__
            if self._ranges is not None:
                self._ranges.pop()
            self._sink.write(name, CALLS, begin_ns, end_ns, args)
        if not self._open:
            self._sink.drain()

    def finish(self) -> None:
        self._sink.finish()


@contextmanager
def span(spans: Spans | None, name: str) -> Iterator[None]:
    """Put a span around the block, if a sink or profiler wants it."""
    if spans is None:
        yield
        return
    depth = spans.begin(name)
    try:
        yield
    except BaseException as error:
        spans.end(depth, error)
        raise
    spans.end(depth)
