"""Alignment of the clocks of several hosts, from barriers: no rank leaves one before every rank has come.

If rank r came at c_r and rank s left at l_s, each on its own clock, the clock of s was at most l_s when that of r was
c_r.  So the difference of the clocks (s - r) is at most l_s - c_r, and, with the roles exchanged, at least c_s - l_r.
The middle of these bounds is the estimate, and half of their distance its error.  The opening of every Buffer ends in
such a barrier, and on CPU ranks every dispatch is one, because it needs the counts of all ranks.  Many barriers narrow
the bounds; a drift between the clocks may make them cross, and counts as error then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moecomm.observe.tracing.reading import RankSpans


class Offset(NamedTuple):
    """Difference of a clock from the reference, to be subtracted, and how far that may be off, in ns."""

    offset_ns: int
    error_ns: int


class _Passage(NamedTuple):
    clock: str
    came_ns: int
    left_ns: int


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
