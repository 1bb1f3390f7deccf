"""Comparison of the flight records of all ranks of a Buffer: which rank went astray first, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from moecomm.observe.flight.reading import Call, Ending, RankRecord
from moecomm.observe.stats.classify import Finding, classify
from moecomm.observe.stats.counters import JobStats

How = Literal[
    "failed call", "another call", "exception", "no call", "absent", "late", "aborted", "waits longest", "none"
]
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Verdict:
    """The ranks that went astray first, how, and that in words.

    Attributes:
        ranks: one rank, or the ranks between which the records do not decide; none if no rank went astray.
        how: "failed call": a call failed on it alone.  "another call": it made another call than the others.
            "exception": an exception of its program ended it.  "no call": it made no call that others made.
            "absent": it has no file, and others lost it or waited for it.  "late": it made the call, and did not do its
            part in time.  "aborted": abort() or an interrupt.  "waits longest": nothing but that is known.
        text: a sentence.
    """

    ranks: tuple[int, ...]
    how: How
    text: str


@dataclass(frozen=True)
class Report:
    """The records of one Buffer, and the verdict on them.  `absent`: ranks without a file."""

    buffer: str
    ranks: int
    records: Mapping[int, RankRecord]
    absent: tuple[int, ...]
    verdict: Verdict

    def lines(self) -> list[str]:
        """Return the report in words: the verdict first, then the ranks, those alike in one line."""
        there = f"{len(self.records)} of {self.ranks} ranks"
        verdict = self.verdict
        first = "no rank went astray" if not verdict.ranks else f"first astray: {named(verdict.ranks)}"
        found = [f"Buffer {self.buffer}, files of {there}", f"  {first}: {verdict.text}"]
        alike: dict[str, list[int]] = {}
        for rank, record in sorted(self.records.items()):
            alike.setdefault(_summary(record), []).append(rank)
        if self.absent:
            alike["no file"] = list(self.absent)
        found += [f"  {named(ranks)}: {text}" for text, ranks in alike.items()]
        return found + [f"  counters: {finding.text}" for finding in self.findings()]

    def findings(self) -> list[Finding]:
        """Return what stands out in the counters, if all ranks have left theirs."""
        counted = [self.records[rank].stats for rank in range(self.ranks) if rank in self.records]
        stats = [one for one in counted if one is not None]
        return classify(JobStats.of_ranks(stats)) if len(stats) == self.ranks else []


def explain(records: Sequence[RankRecord]) -> list[Report]:
    """Compare the records of each Buffer; the Buffer that was opened first comes first."""
    buffers: dict[str, dict[int, RankRecord]] = {}
    for record in records:
        of_buffer = buffers.setdefault(record.buffer, {})
        known = of_buffer.get(record.rank)
        if known is None or known.written_ns < record.written_ns:
            of_buffer[record.rank] = record
    reports = []
    for identity, found in sorted(buffers.items(), key=lambda pair: min(r.opened_ns for r in pair[1].values())):
        ranks = max(record.ranks for record in found.values())
        absent = tuple(rank for rank in range(ranks) if rank not in found)
        reports.append(Report(identity, ranks, found, absent, judge(found, absent)))
    return reports


def judge(records: Mapping[int, RankRecord], absent: Collection[int]) -> Verdict:
    """Return the verdict on the records of the ranks of one Buffer."""
    return (
        _divergence(records)
        or _trailing_rejection(records)
        or _failures(records, absent)
        or _fewer_calls(records)
        or _deaths(records, absent)
        or _longest_wait(records)
    )


def _divergence(records: Mapping[int, RankRecord]) -> Verdict | None:
    """Look for the first call in which ranks differ."""
    for step in sorted({step for record in records.values() for step in record.calls}):
        made = {rank: record.calls[step] for rank, record in records.items() if step in record.calls}
        rejected = {rank: call.rejected for rank, call in made.items()}
        if odd := minority(rejected):
            if len(odd) == len(made):  # no majority: where more calls failed
                odd = [rank for rank in odd if rejected[rank] == max(rejected.values())]
            return _failed_call(records, odd, step)
        if odd := minority({rank: (call.op, call.options) for rank, call in made.items()}):
            return _another_call(made, odd)
    return None


def _failed_call(records: Mapping[int, RankRecord], odd: Sequence[int], step: int) -> Verdict:
    """Judge a call that failed on some ranks only: on `odd`, or on all but `odd`, which then made one call too many."""
    failed = {r: [x for x in records[r].rejections if x.step < step] for r in odd}
    errors = [f"{x[-1].op or 'call'} after call {x[-1].step}: {x[-1].error}" for x in failed.values() if x]
    what = f"a call failed there and not on the others ({errors[0]})" if errors else "fewer of its calls failed"
    return Verdict(tuple(odd), "failed call", f"{what}, before call {step}, so ranks are out of step from there on")


def _another_call(made: Mapping[int, Call], odd: Sequence[int]) -> Verdict:
    rest = [rank for rank in made if rank not in odd]
    one = made[odd[0]]
    differs = _difference(one, next(c for c in made.values() if (c.op, c.options) != (one.op, one.options)))
    if rest:
        text = f"made another call than {named(rest)}: {differs}"
    else:
        text = f"made different calls, and the records do not say which was meant: {differs}"
    return Verdict(tuple(odd), "another call", text)


def _difference(one: Call, other: Call) -> str:
    if one.op != other.op:
        return f"{one.shown} instead of {other.op}"
    mine, theirs = dict(one.options), dict(other.options)
    name = next(name for name in [*mine, *theirs] if mine.get(name) != theirs.get(name))
    return f"{one.shown} with {name} {mine.get(name, 'unset')} instead of {theirs.get(name, 'unset')}"


def _trailing_rejection(records: Mapping[int, RankRecord]) -> Verdict | None:
    """Find a rank whose last call failed while the others made the next."""
    for rank, record in sorted(records.items(), key=lambda pair: pair[1].last):
        others = [r.calls[record.last + 1] for r in records.values() if record.last + 1 in r.calls]
        if others and record.rejections and all(call.rejected < record.rejected for call in others):
            last = record.rejections[-1]
            text = f"its {last.op or 'call'} after call {last.step} failed there alone: {last.error}"
            return Verdict((rank,), "failed call", text)
    return None


def _failures(records: Mapping[int, RankRecord], absent: Collection[int]) -> Verdict | None:
    """Follow the failures: each rank names the peer that it waited for, and that one another, to the last."""
    ends: Counter[int] = Counter()
    for rank, record in records.items():
        if record.ending is not None and record.ending.peer >= 0:
            ends[_last_named(records, rank)] += 1
    if not ends:
        return None
    votes = max(ends.values())
    likely = [rank for rank, count in ends.items() if count == votes]
    likely.sort(key=lambda rank: (rank not in absent, records[rank].last if rank in records else 0))
    return _on_named(records, likely[0])


def _last_named(records: Mapping[int, RankRecord], rank: int) -> int:
    path = [rank]
    while (record := records.get(path[-1])) is not None and record.ending is not None and not record.raised:
        peer = record.ending.peer
        if peer in (-1, path[-1]):  # a rank names itself where others have given it up
            break
        if peer in path:  # ranks wait for each other: the one with fewer calls is behind
            return min(path[path.index(peer) :], key=lambda r: records[r].last)
        path.append(peer)
    return path[-1]


def _on_named(records: Mapping[int, RankRecord], rank: int) -> Verdict:
    """Say how the rank that failures name went astray."""
    said = {r: e for r, record in records.items() if r != rank and (e := record.ending) is not None and e.peer == rank}
    lost = [r for r, ending in said.items() if ending.error == "PeerLost"]
    waited = max((ending.waited_ns for ending in said.values()), default=0)
    by = f"; {named(sorted(said))} waited for it" + (f", {waited / 1e9:.1f} s" if waited else "") if said else ""
    record = records.get(rank)
    if record is None:
        how = f"its process has ended, as {named(lost)} noticed" if lost else "it died, or could not write one"
        return Verdict((rank,), "absent", f"no file: {how}{by}")
    if record.raised:
        return Verdict((rank,), "exception", f"its program raised {record.raised} after {_last_call(record)}")
    if any(ending.error == "Aborted" for ending in said.values()):
        return Verdict((rank,), "aborted", f"abort() or an interrupt there, after {_last_call(record)}")
    ahead = [r for r, other in records.items() if r != rank and other.last > record.last]
    if ahead:
        return _no_call(records, rank, ahead, by)
    if lost:
        return Verdict(
            (rank,), "exception", f"it closed its Buffer, or its process ended, after {_last_call(record)}{by}"
        )
    return Verdict((rank,), "late", f"it made {_last_call(record)}, and did not do its part in time{by}")


def _no_call(records: Mapping[int, RankRecord], rank: int, ahead: Sequence[int], by: str = "") -> Verdict:
    record = records[rank]
    made = next((c for r in ahead if (c := records[r].calls.get(record.last + 1)) is not None), None)
    what = f"call {record.last + 1}" if made is None else made.shown
    return Verdict(
        (rank,), "no call", f"it made no {what}, which {named(ahead)} made; its last is {_last_call(record)}{by}"
    )


def _fewer_calls(records: Mapping[int, RankRecord]) -> Verdict | None:
    fewest = min(record.last for record in records.values())
    behind = [rank for rank, record in records.items() if record.last == fewest]
    ahead = [rank for rank, record in records.items() if record.last > fewest]
    if not ahead:
        return None
    if raised := [rank for rank in behind if records[rank].raised]:
        return _on_named(records, raised[0])
    found = _no_call(records, behind[0], ahead)
    return found if len(behind) == 1 else Verdict(tuple(behind), "no call", found.text)


def _deaths(records: Mapping[int, RankRecord], absent: Collection[int]) -> Verdict | None:
    gone = sorted({other for record in records.values() for other in record.gone} & set(absent))
    if gone:
        return Verdict(tuple(gone), "absent", "no file: its process has ended, as the others saw")
    waiting = any(call.state == "started" for record in records.values() for call in record.calls.values())
    if absent and waiting:
        return Verdict(tuple(absent), "absent", "no file: it died, or could not write one, while others were in a call")
    return None


def _longest_wait(records: Mapping[int, RankRecord]) -> Verdict:
    waits = {
        rank: call
        for rank, record in records.items()
        if (call := record.calls.get(record.last)) is not None and call.state == "started"
    }
    raised = [rank for rank, record in records.items() if record.raised]
    if raised:
        return _on_named(records, raised[0])
    if not waits:
        return Verdict((), "none", "all ranks made the same calls, and none waits")
    rank = min(waits, key=lambda r: waits[r].created_ns)
    waited = (records[rank].written_ns - waits[rank].created_ns) / 1e9
    text = f"all ranks made the same calls; it waits longest, {waited:.1f} s in {waits[rank].shown}"
    return Verdict((rank,), "waits longest", text)


def minority(values: Mapping[int, _Key]) -> list[int]:
    """Return the ranks whose value is not that of most ranks; all of them where none has a majority; [] if alike."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return []
    (common, most), (_, next_most) = counts.most_common(2)
    return sorted(rank for rank, value in values.items() if value != common or most == next_most)


def named(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 1 and 5 to 9", for ranks in ascending order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"ranks {parts[0]}" if len(parts) == 1 else f"ranks {', '.join(parts[:-1])} and {parts[-1]}"


def _last_call(record: RankRecord) -> str:
    if record.last == 0:
        return "no call at all"
    call = record.calls.get(record.last)
    return f"call {record.last}" if call is None else call.shown


def _summary(record: RankRecord) -> str:
    call = record.calls.get(record.last)
    state = "" if call is None else f", {call.state}"
    parts = [f"{_last_call(record)}{state}"]
    if record.rejected:
        parts.append(f"{record.rejected} calls failed before they reached the others")
    ending: Ending | None = record.ending
    if ending is not None:
        about = f" about rank {ending.peer}" if ending.peer >= 0 else ""
        parts.append(f"{ending.error}{about}" + (f", phase {ending.phase}" if ending.phase else ""))
    written = [reason for reason in record.reasons if ending is None or reason != ending.error]
    if written:
        parts.append(f"written on {', '.join(dict.fromkeys(written))}")
    return "; ".join(parts)
