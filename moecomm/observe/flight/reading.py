"""Flight records read back from files, checked: a file may come from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from moecomm.base.documents import Document
from moecomm.base.protocol import MAX_HOST_RANKS
from moecomm.errors import BadInput
from moecomm.observe.flight.record import FORMAT
from moecomm.observe.stats.counters import Stats
from moecomm.observe.stats.reading import Counters, Rank, Ranks, Whole
from moecomm.rounds import signature


@dataclass(frozen=True)
class Call:
    """A call that a rank has made with its peers.

    Attributes:
        step: its number among them, from 1.
        op: "dispatch", "combine" and so on.
        options: those that all ranks pass alike, as (name, value).
        round: number of its round; 0: not known.
        state: "scheduled", "started", "completed", "failed" or "captured".
        created_ns: when it began, wall clock.
        rejected: calls that failed on this rank alone before it.
    """

    step: int
    op: str
    options: tuple[tuple[str, str], ...]
    round: int
    state: str
    created_ns: int
    rejected: int

    @property
    def shown(self) -> str:
        """The call in words."""
        options = "".join(f", {name} {value}" for name, value in self.options if name in ("layout", "dtype"))
        number = f", round {self.round}" if self.round else ""
        return f"call {self.step} ({self.op}{options}{number})"


@dataclass(frozen=True)
class Rejection:
    """A call that failed on a rank before it reached the others, after its call `step`."""

    step: int
    op: str
    error: str


@dataclass(frozen=True)
class Ending:
    """A failure that ended the Buffer on a rank.

    Attributes:
        error: name of the exception.
        text: message of the exception.
        peer: the rank that it is about, -1: not known.
        phase: phase of the round in which this rank waited; "": not known.
        waited_ns: how long this rank waited.
    """

    error: str
    text: str
    peer: int
    phase: str
    waited_ns: int


@dataclass
class RankRecord:
    """The file of one rank.

    Attributes:
        rank, ranks: of the Buffer.
        buffer: its identity.
        opened_ns, written_ns: wall clock.
        reasons: why it was written.
        raised: the exception that ended this rank's use of the Buffer; "" if there was none, or one of a round.
        calls: those of the ring, by step.
        rejections: likewise.
        rejected: how many calls were rejected in all.
        last: the number of the last call; 0: there was none.
        ending: the failure that ended the Buffer, if there is one.
        gone: ranks whose process this rank knew to have ended.
        stats: its counters, where they were known.
    """

    rank: int
    ranks: int
    buffer: str
    opened_ns: int
    written_ns: int
    reasons: list[str]
    raised: str
    rejected: int
    last: int
    ending: Ending | None
    gone: list[int]
    stats: Stats | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)


class _FailureRecord(msgspec.Struct):
    """The record of a round that failed; a failure outside rounds lacks its fields."""

    peer: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_HOST_RANKS)] = -1
    phase: str = ""
    waited_ns: Whole = 0


class _Failure(msgspec.Struct):
    error: str
    text: str
    record: _FailureRecord


class _About(msgspec.Struct):
    """The part of a record that only moecomm writes."""

    format: Literal[1]
    buffer: str
    rank: Rank
    ranks: Ranks
    opened_ns: Whole
    written_ns: Whole
    reasons: list[str]
    raised: str
    rejected: Whole
    gone: list[Rank]
    failures: list[_Failure]
    stats: Counters | None = None


class _Entry(msgspec.Struct):
    """An entry of torch's flight recorder, with the fields that moecomm adds."""

    collective_seq_id: Whole
    profiling_name: str
    state: str
    time_created_ns: Whole
    rejected: Whole
    call: dict[str, str]
    round: Whole | None = None
    error: str | None = None


class _Status(msgspec.Struct):
    last_enqueued_collective: Whole


class _File(msgspec.Struct):
    """The file of a rank; see moecomm.observe.flight.record."""

    moecomm: _About
    pg_status: dict[str, _Status]
    entries: list[_Entry]


assert FORMAT == 1, "the one that _About describes"
_RECORD = Document("FILE", "a flight record of moecomm", _File, most_bytes=16 << 20)


def read(paths: Sequence[Path]) -> list[RankRecord]:
    """Read files, and all files of folders.  Raises BadInput for what is no flight record."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("moecomm-*.json")) if path.is_dir() else [path]
    if not files:
        raise BadInput("FILE", "none", "files that Buffer.dump_flight_record or MOECOMM_FLIGHT_DIR has written")
    ranks: dict[str, int] = {}
    found = []
    for path in files:
        record = _read(path)
        if (size := ranks.setdefault(record.buffer, record.ranks)) != record.ranks:
            _RECORD.refuse(path, f"{record.ranks} ranks, where another file of its Buffer has {size}")
        found.append(record)
    return found


def _read(path: Path) -> RankRecord:
    found = _RECORD.read(path)
    about, status = found.moecomm, found.pg_status.get("0")
    if about.rank >= about.ranks or max(about.gone, default=0) >= about.ranks:
        _RECORD.refuse(path, f"rank {max([about.rank, *about.gone])} of {about.ranks}")
    if status is None:
        _RECORD.refuse(path, "pg_status has no group 0")
    ending = _ending(about.failures)
    if ending is not None and ending.peer >= about.ranks:
        _RECORD.refuse(path, f"a failure of rank {ending.peer} of {about.ranks}")
    try:
        stats = None if about.stats is None else about.stats.stats(about.ranks)
    except ValueError as error:
        _RECORD.refuse(path, error)
    names = ("rank", "ranks", "buffer", "opened_ns", "written_ns", "reasons", "raised", "rejected", "gone")
    known: dict[str, Any] = {name: getattr(about, name) for name in names}
    record = RankRecord(**known, last=status.last_enqueued_collective, ending=ending, stats=stats)
    for entry in found.entries:
        step, op = entry.collective_seq_id, entry.profiling_name.partition(":")[2]
        if entry.state == "rejected":
            record.rejections.append(Rejection(step, op, entry.error or ""))
            continue
        # Ranks may differ in it: the round is then invalid, and nobody has gone astray.
        options = tuple((name, value) for name, value in entry.call.items() if name != signature.GROW)
        made = entry.round or 0, entry.state, entry.time_created_ns, entry.rejected
        record.calls[step] = Call(step, op, options, *made)
    return record


def _ending(failures: list[_Failure]) -> Ending | None:
    for failure in failures:
        if failure.error in ("Timeout", "PeerLost", "Aborted"):
            record = failure.record
            return Ending(failure.error, failure.text, record.peer, record.phase, record.waited_ns)
    return None
