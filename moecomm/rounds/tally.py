"""Counts of the calls of all Buffers of this process, which never decrease: those of Buffers that are gone stay.

Each Buffer counts alone, so counting takes no lock.  What a Buffer has counted joins the sum of those before it when it
is gone; the next Buffer that opens, or the next reader, sees to that.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from typing import NamedTuple

from moecomm import _native

Kind = _native.CallKind  # calls of one operation with the same options, and how many there were


class Totals(NamedTuple):
    """Sums over Buffers.  `rank` is that of the Buffer's group.

    Attributes:
        calls, tokens, nbytes: by (rank, operation); bytes of these tokens, as this rank passes them or gets them back.
        rejected: calls that failed before they reached the other ranks, by rank.
        failures: rounds that failed, by (rank, name of the error).
        waits: nanoseconds for which this rank waited for others, by (rank, phase); see Tally.waits.
    """

    calls: Counter[tuple[int, str]]
    tokens: Counter[tuple[int, str]]
    nbytes: Counter[tuple[int, str]]
    rejected: Counter[int]
    failures: Counter[tuple[int, str]]
    waits: Counter[tuple[int, str]]

    def copied(self) -> Totals:
        """Return a copy."""
        return Totals._make(counts.copy() for counts in self)


class Tally:
    """Counts of one Buffer on one rank.

    Attributes:
        waits: nanoseconds of waits for other ranks by phase, as far as a reader of the Buffer's counters has seen them.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.rejected = rank, 0
        self.kinds: dict[tuple[str, int], Kind] = {}
        self.failures: Counter[str] = Counter()
        self.waits: dict[str, int] = {}

    def add_to(self, sums: Totals) -> None:
        """Add these counts to sums."""
        rank = self.rank
        for kind in list(self.kinds.values()):
            key = rank, kind.op
            sums.calls[key] += kind.calls
            if kind.op != "dispatch_end":  # its tokens count in dispatch_begin
                sums.tokens[key] += kind.tokens
                sums.nbytes[key] += kind.tokens * kind.row_bytes
        sums.rejected[rank] += self.rejected
        for error, count in list(self.failures.items()):
            sums.failures[rank, error] += count
        for phase, ns in self.waits.items():
            sums.waits[rank, phase] += ns


class Tallies:
    """The tallies of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._there: dict[weakref.ref[object], Tally] = {}  # by owner
        self._gone: deque[weakref.ref[object]] = deque()  # keys of _there; an owner goes anywhere, and takes no lock
        self._past = Totals._make(Counter() for _ in Totals._fields)

    def open(self, owner: object, rank: int) -> Tally:
        """Return a Tally that counts as long as `owner` is there; its counts stay."""
        tally = Tally(rank)
        with self._lock:
            self._fold()
            self._there[weakref.ref(owner, self._gone.append)] = tally
        return tally

    def totals(self) -> Totals:
        """Return the sums over all Buffers so far."""
        with self._lock:
            self._fold()
            sums = self._past.copied()
            for tally in self._there.values():
                tally.add_to(sums)
        return sums

    def __len__(self) -> int:
        return len(self._there)

    def _fold(self) -> None:
        while self._gone:
            self._there.pop(self._gone.popleft()).add_to(self._past)


_process = Tallies()


def tally_for(owner: object, rank: int) -> Tally:
    """Return a Tally of this process; see Tallies.open."""
    return _process.open(owner, rank)


def totals() -> Totals:
    """Return the sums over all Buffers that this process has opened."""
    return _process.totals()
