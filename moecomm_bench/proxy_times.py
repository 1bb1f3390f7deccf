"""Breakdown of the time of a put + signal that NCCL's proxy thread carries, through our RMA plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moecomm_bench.columns import Column

Taken = dict[str, int]  # moecomm.rma_plugin.take_times(), and `puts`: the put + signal of this rank meanwhile

_PARTS = {
    "one way us": "one_way_us",
    "posting": "posting_us",
    "driver": "driver_us",
    "copying": "copying_us",
    "word": "word_us",
    "rest": "rest_us",
}
EXPLAINED = (
    "Where the one way of a put + signal through `gin`'s proxy goes, in us, in the median replay. "
    "`posting`: inside the calls by which NCCL's thread asks our RMA plugin for its operations (puts and signals), "
    "outside the driver. `driver`: inside CUDA's driver in these calls. `copying`: the rest of the time until a poll "
    "sees the last copy done. `word`: the driver's call by which the receiver writes a signal. `rest`: the GPU's "
    "queue, NCCL's thread, and the signal's way between the two threads. These parts add up. Over TCP, `copying` lasts "
    "until the peer acknowledges the operation. By then the peer may have written the word and begun its own put, so "
    "parts overlap. If they are longer than the one way, there is no `rest`. Beside them: the part of all time that "
    "the thread spends in polls, the part of these polls that find nothing, and the time of one poll"
)


def _part(entry: str) -> Callable[[dict[str, Any]], float | None]:
    """Return a function that takes a row and returns a part: None where parts overlap, of which older results have a
    rest below zero.
    """
    return lambda row: None if (us := row["plugin"][entry]) is None or us < 0 else us


LABELS = (
    Column("bytes", "bytes"),
    Column("by", lambda row: f"{row['method']}, {row['sms']} block{'s' * (row['sms'] > 1)}"),
)
FIGURES = (
    Column("operations", "plugin.operations", "{:.1f}"),
    *(Column(head, _part(entry), "{:.2f}") for head, entry in _PARTS.items()),
    *(Column(part, f"plugin.{part}", "{:.0%}") for part in ("polling", "empty")),
    Column("a poll us", "plugin.a_poll_us", "{:.2f}"),
)


def of_put(us: Sequence[Sequence[float]], taken: Sequence[Sequence[Taken | None]]) -> dict[str, float | None] | None:
    """Return the averages of a put + signal in the median replay, warm-up rounds included; None without measurements.

    Args:
        us: microseconds of one way, by rank and replay.
        taken: counters of the plugin meanwhile, by rank and replay.

    Returns:
        The averages by key:

        | key | meaning |
        | --- | --- |
        | one_way_us | sum of the next five, if the last is there |
        | posting_us, driver_us | inside the calls that post operations: outside the CUDA driver, and inside |
        | copying_us | rest of the time in which an operation is in flight: until a poll has seen its copy done, or |
        | | over TCP the peer's acknowledgment |
        | word_us | the call that writes a signal's word, at the receiver |
        | rest_us | the remainder: the GPU's queue, NCCL's thread, the signal's way between both threads. None if the |
        | | others are longer than the one way: over TCP a put is acknowledged while the peer's own is under way |
        | operations, bytes | operations and bytes of a put + signal |
        | until_done_us | one operation, from posting until a poll has seen it done |
        | a_poll_us, polling, empty | time of a poll; fraction of time in polls; fraction of polls that found nothing |
        | clock_reads | clock reads for these figures, at both ends |
    """
    slowest = [max(replay) for replay in zip(*us, strict=True)]
    middle = sorted(range(len(slowest)), key=slowest.__getitem__)[len(slowest) // 2]
    found = [replays[middle] for replays in taken]
    if any(part is None or part["operations"] == 0 for part in found):
        return None
    total = {name: sum(part[name] for part in found if part is not None) for name in found[0] or {}}
    each_us = {name: nanoseconds / total["puts"] / 1e3 for name, nanoseconds in total.items()}
    word_us = total["writing_ns"] / max(1, total["words"]) / 1e3
    rest_us = slowest[middle] - each_us["busy_ns"] - word_us
    parts: dict[str, float | None] = {
        "one_way_us": slowest[middle],
        "posting_us": each_us["posting_ns"] - each_us["driver_ns"],
        "driver_us": each_us["driver_ns"],
        "copying_us": each_us["busy_ns"] - each_us["posting_ns"],
        "word_us": word_us,
        "rest_us": rest_us if rest_us >= 0 else None,
        "operations": total["operations"] / total["puts"],
        "bytes": total["bytes"] / total["puts"],
        "until_done_us": total["until_ended_ns"] / max(1, total["ended"]) / 1e3,
        "a_poll_us": total["polling_ns"] / max(1, total["polls"]) / 1e3,
        "polling": total["polling_ns"] / total["since_ns"],
        "empty": total["empty_polls"] / max(1, total["polls"]),
        "clock_reads": total["clock_reads"] / total["puts"],
    }
    return {name: None if value is None else round(value, 3) for name, value in parts.items()}
