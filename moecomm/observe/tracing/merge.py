"""The spans of all ranks as one trace of Chrome's format, which Perfetto and chrome://tracing show.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU has the format.  A rank is a process of
the trace, also where it is a thread of the program, and after shrink() or grow() has given it another number; the
tracks of each of its Buffers are threads.

Clocks of several hosts are aligned by barriers: no rank leaves one before every rank has come.
If rank r came at c_r and rank s left at l_s, each on its own clock, the clock of s was at most l_s when that of r was
c_r.  So the difference of the clocks (s - r) is at most l_s - c_r, and, with the roles exchanged, at least c_s - l_r.
The middle of these bounds is the estimate, and half of their distance its error.  The opening of every Buffer ends in
such a barrier, and on CPU ranks every dispatch is one, because it needs the counts of all ranks.  Many barriers narrow
the bounds; a drift between the clocks may make them cross, and counts as error then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moecomm.observe.tracing.reading import RankSpans
from moecomm.rounds.spans import CALLS

_MOST_DIGITS = 20  # of a number in the name of a track


class Offset(NamedTuple):
    """Difference of a clock from the reference, to be subtracted, and how far that may be off, in ns."""

    offset_ns: int
    error_ns: int


class _Passage(NamedTuple):
    clock: str
    came_ns: int
    left_ns: int


class _Process(NamedTuple):
    """A rank as it was when its first Buffer opened."""

    host: str
    pid: int
    rank: int


def merge(files: Sequence[RankSpans]) -> dict[str, Any]:
    """Return the trace of these files, to be written as JSON.  Times are in us, from the first span on.

    Its metadata `clocks` has what was subtracted from each host's clock and by how much that may be off.  Spans of a
    host whose clock can't be aligned are in the trace as they are, and the metadata says so.
    """
    reference = files[0].clock
    aligned = offsets(files, reference)
    pids = _pids(files)
    first_ns = min((span.begin_ns - _offset(file, aligned) for file in files for span in file.spans), default=0)
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, str, str], int] = {}
    for file in files:
        pid = pids[file.path]
        for span in file.spans:
            tid = tracks.setdefault((pid, file.buffer, span.track), len(tracks) + 1)
            begin_ns = span.begin_ns - _offset(file, aligned) - first_ns
            events.append(
                {
                    "name": span.name,
                    "cat": "moecomm",
                    "ph": "X",
                    "ts": begin_ns / 1000,
                    "dur": (span.end_ns - span.begin_ns) / 1000,
                    "pid": pid,
                    "tid": tid,
                    "args": span.args,
                }
            )
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    return {
        "traceEvents": [*_names(files, pids, tracks), *events],
        "displayTimeUnit": "ns",
        "otherData": {
            "clocks": _clocks(files, aligned),
            "gpu_clocks": {
                file.path.name: {"error_ns": max(point.error_ns for point in file.clock_points)}
                for file in files
                if file.clock_points
            },
            "dropped": {file.path.name: file.dropped for file in files if file.dropped},
        },
    }


def offsets(files: Iterable[RankSpans], reference: str) -> dict[str, Offset]:
    """Return the offset of each clock from the reference.

    A clock that shares no barrier with the reference is not there: its times can't be compared.
    """
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for passages in _barriers(list(files)):
        references = [passage for passage in passages if passage.clock == reference]
        for other in passages:
            for ours in references if other.clock != reference else ():
                low, high = other.came_ns - ours.left_ns, other.left_ns - ours.came_ns
                least[other.clock] = max(least.get(other.clock, low), low)
                most[other.clock] = min(most.get(other.clock, high), high)
    found = {clock: Offset((low + most[clock]) // 2, abs(most[clock] - low + 1) // 2) for clock, low in least.items()}
    return {reference: Offset(0, 0), **found}


def _barriers(files: list[RankSpans]) -> Iterator[list[_Passage]]:
    """Yield the passages of all ranks through each barrier."""
    openings: dict[str, list[_Passage]] = defaultdict(list)
    rounds: dict[tuple[str, int], list[_Passage]] = defaultdict(list)
    for file in files:
        if file.barrier[1]:
            openings[file.buffer].append(_Passage(file.clock, *file.barrier))
        for span in file.spans if file.backend == "host" else ():
            number = span.args.get("round")
            if isinstance(number, int) and span.name == f"dispatch round {number}" and "error" not in span.args:
                rounds[file.buffer, number].append(_Passage(file.clock, span.begin_ns, span.end_ns))
    yield from openings.values()
    yield from rounds.values()


def _offset(file: RankSpans, aligned: dict[str, Offset]) -> int:
    return aligned[file.clock].offset_ns if file.clock in aligned else 0


def _pids(files: Sequence[RankSpans]) -> dict[Path, int]:
    """Return the process of the trace that each file belongs to."""
    known = {(file.buffer, file.rank): file for file in files}

    def process(file: RankSpans) -> _Process:
        seen = set()
        while file.before is not None and file.before in known and file.before not in seen:
            seen.add(file.before)
            file = known[file.before]
        return _Process(file.clock, file.pid, file.rank)

    processes = {file.path: process(file) for file in files}
    numbers = {found: number for number, found in enumerate(sorted(set(processes.values()), key=_order), 1)}
    return {path: numbers[found] for path, found in processes.items()}


def _order(process: _Process) -> tuple[int, str, int]:
    return process.rank, process.host, process.pid


def _names(files: Sequence[RankSpans], pids: dict[Path, int], tracks: dict[tuple[int, str, str], int]) -> list[Any]:
    """Return the events that name processes and threads, and put them in order."""
    of_process: dict[int, list[RankSpans]] = {}
    for file in files:
        of_process.setdefault(pids[file.path], []).append(file)
    buffers = {file.buffer: number for number, file in reversed([*enumerate(files)])}
    order = {buffer: place for place, buffer in enumerate(sorted(buffers, key=lambda buffer: buffers[buffer]))}
    events = []
    for pid, own in sorted(of_process.items()):
        ranks = " -> ".join(dict.fromkeys(str(file.rank) for file in own))
        events.append(_meta("process_name", pid, 0, name=f"rank {ranks} ({own[0].host}, process {own[0].pid})"))
        events.append(_meta("process_sort_index", pid, 0, sort_index=pid))
    for place, ((pid, buffer, track), tid) in enumerate(
        sorted(tracks.items(), key=lambda item: (item[0][0], order[item[0][1]], *_place(item[0][2])))
    ):
        events.append(_meta("thread_name", pid, tid, name=f"{track}, Buffer {buffer[:8]}"))
        events.append(_meta("thread_sort_index", pid, tid, sort_index=place))
    return events


def _place(track: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Return the key of a track among those of a Buffer: calls first, then by words, numbers as such."""
    words = [(word, word.isdecimal() and len(word) < _MOST_DIGITS) for word in track.split()]
    return track != CALLS, [(is_number, int(word) if is_number else 0, word) for word, is_number in words]


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _clocks(files: Sequence[RankSpans], aligned: dict[str, Offset]) -> list[dict[str, Any]]:
    hosts = {file.clock: file.host for file in reversed(files)}
    return [
        {"host": host, "aligned": clock in aligned, **(aligned[clock]._asdict() if clock in aligned else {})}
        for clock, host in sorted(hosts.items(), key=lambda item: item[1])
    ]
