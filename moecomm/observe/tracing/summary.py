"""A table of a trace: when each role of a round begins and ends, over all ranks."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moecomm.observe.tracing.clocks import offsets
from moecomm.observe.tracing.reading import RankSpans
from moecomm.rounds.spans import CALLS

_ROUND = re.compile(r"(\w+) round (\d{1,18})")
_WAIT = "wait for "


class _Span(NamedTuple):
    rank: int
    begin_ns: int
    end_ns: int


class RoleTimes(NamedTuple):
    """Medians over rounds of one role, in us from the moment at which the last rank begins the round's work.

    No round can end before that, however early other ranks have begun to wait.  What lies before it counts as 0: ranks
    that came earlier may have sent already.

    Attributes:
        operation: "dispatch", "combine" and so on.
        role: the role of a warp, or on CPU ranks the step of a thread.
        rounds: the number of rounds in which the role appears.
        begins: when the last rank begins the role.
        usually_ends: the median end over ranks and their blocks or threads.
        ends: the last end on any rank.
    """

    operation: str
    role: str
    rounds: int
    begins: float
    usually_ends: float
    ends: float


def summarize(files: Sequence[RankSpans], skip: int = 0) -> list[RoleTimes]:
    """Return the roles of each operation, by begin.  Rounds that a rank's file lacks are left out.

    Args:
        files: of all ranks.
        skip: rounds of each Buffer and operation to leave out, from the first on: kernels load in the first one.
    """
    aligned = offsets(files, files[0].clock)
    operations: dict[tuple[str, int], str] = {}
    work: dict[tuple[str, int], dict[str, list[_Span]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        offset = aligned[file.clock].offset_ns if file.clock in aligned else 0
        for span in file.spans:
            if span.track == CALLS:
                if found := _ROUND.fullmatch(span.name):
                    operations[file.buffer, int(found[2])] = found[1]
            elif isinstance(number := span.args.get("round"), int) and not span.name.startswith(_WAIT):
                begin, end = span.begin_ns - offset, span.end_ns - offset
                work[file.buffer, number][span.name].append(_Span(file.rank, begin, end))
    sizes = {file.buffer: file.ranks for file in files}
    seen: dict[tuple[str, str], int] = defaultdict(int)
    times: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for key in sorted(work):
        begun = _begins(span for spans in work[key].values() for span in spans)
        if key not in operations or len(begun) < sizes[key[0]]:
            continue
        seen[key[0], operations[key]] += 1
        if seen[key[0], operations[key]] <= skip:
            continue
        zero = max(begun.values())
        for role, spans in work[key].items():
            ends = [max(0, span.end_ns - zero) for span in spans]
            begin = max(0, max(_begins(spans).values()) - zero)
            times[operations[key], role].append((begin / 1e3, statistics.median(ends) / 1e3, max(ends) / 1e3))
    rows = [
        RoleTimes(*name, len(of), *(statistics.median(column) for column in zip(*of, strict=True)))
        for name, of in times.items()
    ]
    return sorted(rows, key=lambda row: (row.operation, row.begins, row.ends))


def _begins(spans: Iterable[_Span]) -> dict[int, int]:
    """Return when each rank begins the first of these."""
    found: dict[int, int] = {}
    for span in spans:
        found[span.rank] = min(span.begin_ns, found.get(span.rank, span.begin_ns))
    return found
