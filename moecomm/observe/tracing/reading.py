"""Files of spans read back, checked: a file may come from anywhere, and end in the middle of a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from moecomm.base.documents import Document, opened
from moecomm.errors import BadInput
from moecomm.observe.stats.reading import Rank, Ranks, Whole
from moecomm.observe.tracing.files import FORMAT, OF_KERNELS, SUFFIX, ClockPoint, decode, on_host

_MOST_BYTES, _MOST_LINE = 4 << 30, 1 << 20  # of a file, and of a line in it


class Span(NamedTuple):
    """A span of a rank.  Times are of its host's CLOCK_MONOTONIC, in ns."""

    name: str
    track: str
    begin_ns: Whole
    end_ns: Whole
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


class _Before(msgspec.Struct):
    buffer: str
    rank: Rank


class _Header(msgspec.Struct):
    """The first line of a file; see moecomm.observe.tracing.files."""

    format: Literal[1]
    buffer: str
    rank: Rank
    ranks: Ranks
    host: str
    clock: str
    pid: Whole
    backend: str
    barrier: tuple[Whole, Whole]
    before: _Before | None = None


class _Note(msgspec.Struct):
    """A line between spans: a comparison of clocks (ClockPoint), or a number of spans that had no room."""

    clock: tuple[Whole, Whole, Whole] | None = None
    dropped: Whole | None = None


assert FORMAT == 1, "the one that _Header describes"
_SPANS = Document("FILE", "a file of spans that MOECOMM_TRACE_DIR or moecomm.trace has written", _Header, _MOST_BYTES)
_KERNELS = Document("FILE", "records of kernels beside a file of spans", bytes, _MOST_BYTES)
_FIRST, _LATER = msgspec.json.Decoder(_Header), msgspec.json.Decoder(Span | _Note)  # lines


def read(paths: Sequence[Path]) -> list[RankSpans]:
    """Read files, and all files of folders, by Buffer and rank.

    Raises:
        BadInput: there is none, or one is no file of spans.
    """
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob(f"moecomm-*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise BadInput("FILE", ", ".join(map(str, paths)) or "none", f"{_SPANS.want}, or a folder of such files")
    ranks: dict[str, int] = {}
    found = {}
    for path in dict.fromkeys(files):
        found[path] = one = _read(path)
        if (size := ranks.setdefault(one.buffer, one.ranks)) != one.ranks:
            _SPANS.refuse(path, f"{one.ranks} ranks, where another file of its Buffer has {size}")
    return sorted(found.values(), key=lambda one: (one.barrier[1], one.buffer, one.rank))


def _read(path: Path) -> RankSpans:
    number = 1
    try:
        with opened(path, _MOST_BYTES) as file:
            found = _header(path, file.readline(_MOST_LINE))
            while line := file.readline(_MOST_LINE):
                number += 1
                if len(line) < _MOST_LINE and not line.endswith(b"\n"):
                    break  # the process ended while it wrote
                _add(found, _LATER.decode(line))
    except (OSError, ValueError, RecursionError) as error:
        _SPANS.refuse(f"{path}, line {number}", error)
    _add_kernels(found)
    return found


def _add(found: RankSpans, said: Span | _Note) -> None:
    if isinstance(said, Span):
        if said.begin_ns > said.end_ns:
            raise ValueError("a span that ends before it begins")
        found.spans.append(said)
    elif said.clock is not None:
        found.clock_points.append(ClockPoint(*said.clock))
    elif said.dropped is not None:
        found.dropped += said.dropped
    else:
        raise ValueError("neither a span, nor a clock, nor dropped spans")


def _add_kernels(found: RankSpans) -> None:
    """Add the spans of kernels, if the GPU's clock was compared with the host's."""
    beside = found.path.with_suffix(OF_KERNELS)
    if not found.clock_points or not beside.exists():
        return
    found.clock_points.sort()
    records = _KERNELS.bytes_of(beside)
    try:
        kernels = list(decode(records))
    except ValueError as error:
        _KERNELS.refuse(beside, error)
    for span in kernels:
        begin_ns, end_ns = (on_host(found.clock_points, time) for time in (span.begin_ns, span.end_ns))
        found.spans.append(Span(span.name, span.track, begin_ns, max(begin_ns, end_ns), {"round": span.round}))


def _header(path: Path, line: bytes) -> RankSpans:
    said = _FIRST.decode(line)
    if said.rank >= said.ranks:
        raise ValueError(f"rank {said.rank} of {said.ranks}")
    names = ("buffer", "rank", "ranks", "host", "clock", "pid", "backend", "barrier")
    about: dict[str, Any] = {name: getattr(said, name) for name in names}
    return RankSpans(path, before=None if said.before is None else (said.before.buffer, said.before.rank), **about)
