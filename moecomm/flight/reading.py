"""Flight records read back from files, checked: a file may come from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moecomm.core import signature
from moecomm.core.protocol import MAX_HOST_RANKS
from moecomm.errors import BadInput
from moecomm.flight.record import FORMAT
from moecomm.stats.counters import Stats

_MOST_BYTES = 16 << 20
_Value = TypeVar("_Value")


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


def read(paths: Sequence[Path]) -> list[RankRecord]:
    """Read files, and all files of folders.  Raises BadInput for what is no flight record."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("moecomm-*.json")) if path.is_dir() else [path]
    if not files:
        raise BadInput("FILE", "none", "files that Buffer.dump_flight_record or MOECOMM_FLIGHT_DIR has written")
    return [_read(path) for path in files]


def _read(path: Path) -> RankRecord:
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"{size} bytes")
        found = json.loads(path.read_bytes())
        return _record(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BadInput("FILE", f"{path} ({why})", "a flight record of moecomm") from error


def _record(found: Any) -> RankRecord:
    about = _of(found, "moecomm", dict)
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}, not {FORMAT}")
    ranks = _of(about, "ranks", int)
    rank = _of(about, "rank", int)
    if not 0 <= rank < ranks <= MAX_HOST_RANKS:
        raise ValueError(f"rank {rank} of {ranks}")
    status = _of(_of(_of(found, "pg_status", dict), "0", dict), "last_enqueued_collective", int)
    record = RankRecord(
        rank=rank,
        ranks=ranks,
        buffer=_of(about, "buffer", str),
        opened_ns=_of(about, "opened_ns", int),
        written_ns=_of(about, "written_ns", int),
        reasons=[str(reason) for reason in _of(about, "reasons", list)],
        raised=_of(about, "raised", str),
        rejected=_of(about, "rejected", int),
        last=status,
        ending=_ending(_of(about, "failures", list)),
        gone=[int(other) for other in _of(about, "gone", list)],
        stats=None if about.get("stats") is None else Stats.of_lists(_of(about, "stats", dict), ranks),
    )
    for entry in _of(found, "entries", list):
        step, op = _of(entry, "collective_seq_id", int), _of(entry, "profiling_name", str).partition(":")[2]
        if _of(entry, "state", str) == "rejected":
            record.rejections.append(Rejection(step, op, str(entry["error"])))
            continue
        # Ranks may differ in it: the round is then invalid, and nobody has gone astray.
        options = tuple((n, str(v)) for n, v in _of(entry, "call", dict).items() if n != signature.GROW)
        known = (_of(entry, "state", str), _of(entry, "time_created_ns", int), _of(entry, "rejected", int))
        record.calls[step] = Call(step, op, options, int(entry["round"] or 0), *known)
    return record


def _of(found: Any, name: str, kind: type[_Value]) -> _Value:
    value = found[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is no {kind.__name__}")
    return value


def _ending(failures: list[Any]) -> Ending | None:
    for failure in failures:
        if failure["error"] in ("Timeout", "PeerLost", "Aborted"):
            record = _of(failure, "record", dict)
            peer, waited_ns = int(record.get("peer", -1)), int(record.get("waited_ns", 0))
            phase = str(record.get("phase", ""))
            return Ending(failure["error"], str(failure["text"]), peer, phase, waited_ns)
    return None
