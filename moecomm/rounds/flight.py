"""Flight recorder: a ring on the host with the last calls of a Buffer, and the failures that ended them.

Every rank records each call that it makes with its peers: a dispatch, a combine, or one half of these.  All ranks make
the same calls, so the n-th of one rank belongs to the n-th of every other.  A call that fails on this rank before it
reaches the others is recorded between them.  moecomm.observe.flight turns the ring into files and compares those of
all ranks.

Recording neither waits for the device nor allocates memory that grows.  One thread at a time records.  Any thread, and
a signal handler at any moment, may read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moecomm import _native
from moecomm.errors import RoundFailed
from moecomm.rounds.spans import Spans
from moecomm.rounds.tally import Kind, tally_for

CALLS = _native.CallRing.LENGTH
_FAILURES, _TEXT = 16, 500  # most failures that are kept beside the one that ended the Buffer; characters of an error


class Rejected(NamedTuple):
    """A call that failed on this rank before it reached the others."""

    op: str
    error: str


class Entry(NamedTuple):
    """One entry of the ring.

    Attributes:
        record: number of the entry, from 0.
        what: the call.
        step: number of the call among those made with peers, from 1; of a rejected call, that of the last one.
        round: number of the round, from 1; 0: not known, because a graph was captured, whose replays count as well.
        tokens: of this rank.
        created_ns: wall-clock time at which the call began.
        captured: made while a graph was captured.
        rejected: calls that were rejected before.
        ended_ns: wall-clock time at which it was known to be over; 0: it is not.
    """

    record: int
    what: Kind | Rejected
    step: int
    round: int
    tokens: int
    created_ns: int
    captured: bool
    rejected: int
    ended_ns: int


class Failure(NamedTuple):
    """A round that failed, or an error that ended the Buffer.  `record`: the fields of its failure record."""

    error: str
    text: str
    record: Mapping[str, int | str]
    step: int
    time_ns: int


class FlightRecorder(_native.CallRing):
    """The ring of one Buffer.

    Args:
        rank: of the Buffer's group.
        capturing: returns whether the current stream is being captured into a graph.
        on_host: rounds are over when the call that runs them returns.

    Attributes:
        steps, rounds: how many calls and rounds this rank has made.
        rejected: calls that failed on this rank before they reached the others.
        replays: a graph has been captured, whose replays the host does not see.
        on_failure: called with the name of an error that asks for a file.
        closed: the Buffer is closed.
        reasons: why files were written.
        raised: the exception that ended the use of the Buffer on this rank; "": none did.
        before: identity and rank before Buffer.shrink() or grow() opened this one.
        global_ranks: its ranks in the default group, where they are known.
        retries: rounds of dispatches that had no room for their rows in one.
        spans: of this rank, if it is traced: see moecomm.observe.tracing.
    """

    def __init__(self, rank: int, capturing: Callable[[], bool], on_host: bool) -> None:
        super().__init__(on_host)
        self._capturing = capturing
        self.closed = False
        self.opened_ns = time.time_ns()
        self.reasons: deque[str] = deque(maxlen=_FAILURES)
        self.before: tuple[str, int] | None = None
        self.global_ranks: Sequence[int] = ()
        self.retries = 0
        self.spans: Spans | None = None
        self._span = 0  # depth of the span of a call under way; 0: there is none
        self.raised = ""
        self._fatal: Failure | None = None
        self._others: deque[Failure] = deque(maxlen=_FAILURES)
        self._tally = tally_for(self, rank)
        self._kinds = self._tally.kinds
        self.on_failure: Callable[[str], None] | None = None

    def kind(self, op: str, call: int, dtype: Any, row_bytes: int) -> Kind:
        """Return the Kind of these calls, and make it if there is none."""
        key = op, call
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = Kind(op, call, dtype, row_bytes)
        return found

    def waited(self, ns: dict[str, int]) -> None:
        """Take note of how long this rank has waited for others so far, by phase."""
        self._tally.waits = ns

    @property
    def kinds(self) -> list[Kind]:
        """All kinds of calls so far."""
        return list(self._kinds.values())

    def begin(self, kind: Kind, tokens: int) -> int:
        """Record a call that is about to be made; return its number for end()."""
        record = self.begin_call(kind, tokens, self._capturing())
        if self.spans is not None:
            self._span = self.spans.begin_round(kind, self.round_of(kind), tokens)
        return record

    def end(self, record: int) -> None:
        """Record that a call has returned.  On GPUs it may still run: see settle()."""
        self.end_call(record)
        if self.spans is not None and self._span:
            self.spans.end(self._span)
            self._span = 0

    def reject(self, op: str, error: BaseException | None) -> None:
        """Record a call that failed before it reached the other ranks.  None: another thread's, refused earlier."""
        self.reject_call(Rejected(op, "ConcurrentCall" if error is None else shown(error)))
        self._tally.rejected = self.rejected

    def failed(self, error: Exception, record: Mapping[str, int | str] | None = None) -> None:
        """Record an error that a round has left behind.

        Args:
            error: as it is raised.
            record: fields of the failure record.
        """
        self._tally.failures[type(error).__name__] += 1
        failure = self.failure_of(error, record or {})
        if self._fatal is None and isinstance(error, RoundFailed):
            self._fatal = failure
        else:
            self._others.append(failure)

    def resumed(self, number: int) -> None:
        """Record that the Buffer goes on after this round: the failure has not ended it."""
        if self._fatal is not None:
            self._others.append(self._fatal)
            self._fatal = None
        self.rounds = number

    def failure_of(self, error: Exception, record: Mapping[str, int | str]) -> Failure:
        """Make a Failure of an error at the last call."""
        return Failure(type(error).__name__, shown(error), record, self.steps, time.time_ns())

    def announce(self, error: Exception) -> None:
        """Ask for a file, if a writer of flight records runs."""
        if self.on_failure is not None and not self.closed:
            self.on_failure(type(error).__name__)

    @property
    def failures(self) -> list[Failure]:
        """The failure that ended the Buffer, if there is one, then the last of the others."""
        return [*([] if self._fatal is None else [self._fatal]), *self._others]

    def entries(self) -> list[Entry]:
        """Return the entries of the ring, the oldest first."""
        return [Entry._make(call) for call in self.calls()]


def shown(error: BaseException) -> str:
    """Return an error in words, those of a long one cut."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
