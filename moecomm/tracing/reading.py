"""Files of spans read back, checked: a file may come from anywhere, and end in the middle of a line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moecomm.core.protocol import MAX_HOST_RANKS
from moecomm.errors import BadInput
from moecomm.tracing.device import ClockPoint, decode, on_host
from moecomm.tracing.files import FORMAT, OF_KERNELS, SUFFIX

_MOST_NS = 1 << 63
_Value = TypeVar("_Value")


class Span(NamedTuple):
    """A span of a rank.  Times are of its host's CLOCK_MONOTONIC, in ns."""

    name: str
    track: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any]


@dataclass
class RankSpans:
    """The file of one rank of a Buffer.

    Attributes:
        path: of the file.
        buffer: identity of the Buffer.
        before: identity and rank before shrink() or grow() opened it; None: it was opened by itself.
        rank, ranks: of the Buffer.
        host: name of the host.
        clock: the same for all files whose times are of one clock.
        pid: process id.
        backend: of the Buffer.
        barrier: when the rank came to the barrier that ends the opening, and when it left.
        spans: in the order in which they ended.
        clock_points: moments on the clock of its GPU, in order; none: it has no spans of kernels.
        dropped: spans that had no room.
    """

    path: Path
    buffer: str
    before: tuple[str, int] | None
    rank: int
    ranks: int
    host: str
    clock: str
    pid: int
    backend: str
    barrier: tuple[int, int]
    spans: list[Span] = field(default_factory=list)
    clock_points: list[ClockPoint] = field(default_factory=list)
    dropped: int = 0


def read(folder: Path) -> list[RankSpans]:
    """Read all files of a folder, by Buffer and rank.

    Raises:
        BadInput: there is none, or one is no file of spans.
    """
    files = sorted(folder.glob(f"moecomm-*{SUFFIX}")) if folder.is_dir() else []
    if not files:
        raise BadInput("FOLDER", str(folder), "a folder in which MOECOMM_TRACE_DIR or moecomm.trace has written files")
    return sorted((_read(path) for path in files), key=lambda found: (found.barrier[1], found.buffer, found.rank))


def _read(path: Path) -> RankSpans:
    lines = 1
    try:
        with path.open("rb") as file:
            found = _header(path, json.loads(file.readline()))
            for line in file:
                lines += 1
                if not line.endswith(b"\n"):
                    break  # the process ended while it wrote
                _add(found, json.loads(line))
        _add_kernels(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BadInput("FOLDER", f"{path}, line {lines} ({why})", "a file of spans of moecomm") from error
    return found


def _add(found: RankSpans, line: Any) -> None:
    if isinstance(line, dict) and "clock" in line:
        device_ns, host_ns, error_ns = (int(number) for number in _of(line, "clock", list))
        found.clock_points.append(ClockPoint(device_ns, host_ns, error_ns))
        return
    if isinstance(line, dict):
        found.dropped += _of(line, "dropped", int)
        return
    name, track, begin_ns, end_ns, args = line
    named = isinstance(name, str) and isinstance(track, str) and isinstance(args, dict)
    timed = isinstance(begin_ns, int) and isinstance(end_ns, int) and 0 <= begin_ns <= end_ns < _MOST_NS
    if not (named and timed):
        raise ValueError("no span")
    found.spans.append(Span(name, track, begin_ns, end_ns, args))


def _add_kernels(found: RankSpans) -> None:
    """Add the spans of kernels, if the GPU's clock was compared with the host's."""
    beside = found.path.with_suffix(OF_KERNELS)
    if not found.clock_points or not beside.is_file():
        return
    found.clock_points.sort()
    for span in decode(beside.read_bytes()):
        begin_ns, end_ns = (on_host(found.clock_points, time) for time in (span.begin_ns, span.end_ns))
        found.spans.append(Span(span.name, span.track, begin_ns, max(begin_ns, end_ns), {"round": span.round}))


def _header(path: Path, line: Any) -> RankSpans:
    if line["format"] != FORMAT:
        raise ValueError(f"format {line['format']}, not {FORMAT}")
    rank, ranks = _of(line, "rank", int), _of(line, "ranks", int)
    if not 0 <= rank < ranks <= MAX_HOST_RANKS:
        raise ValueError(f"rank {rank} of {ranks}")
    came_ns, left_ns = (int(time) for time in _of(line, "barrier", list))
    before = line["before"]
    return RankSpans(
        path=path,
        buffer=_of(line, "buffer", str),
        before=None if before is None else (_of(before, "buffer", str), _of(before, "rank", int)),
        rank=rank,
        ranks=ranks,
        host=_of(line, "host", str),
        clock=_of(line, "clock", str),
        pid=_of(line, "pid", int),
        backend=_of(line, "backend", str),
        barrier=(came_ns, left_ns),
    )


def _of(found: Any, name: str, kind: type[_Value]) -> _Value:
    value = found[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is no {kind.__name__}")
    return value
