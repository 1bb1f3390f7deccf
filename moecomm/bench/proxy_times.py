"""Where the time of a put + signal goes when a thread of the host carries it: NCCL's proxy, through our RMA plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Taken = dict[str, int]  # moecomm.rma_plugin.take_times(), and `puts`: how many put + signal of this rank that was

_PARTS = ("posting_us", "driver_us", "copying_us", "word_us", "rest_us")
_HEADS = (
    *("bytes", "by", "operations", "one way us", "posting", "driver", "copying", "word", "rest"),
    *("polling", "empty", "a poll us"),
)
EXPLAINED = (
    "Where the one way of a put + signal through `gin`'s proxy goes, in us that add up, of the replay in the middle: "
    "`posting`: inside the calls by which NCCL's thread asks our RMA plugin for its operations (puts and signals), "
    "outside the driver; `driver`: inside CUDA's in these; `copying`: the rest of the time until a "
    "poll has seen the last copy done; `word`: the driver's call by which the receiver writes a signal; `rest`: the "
    "GPU's queue, NCCL's thread, the signal's way between the two threads. Beside them: the part of all time that the "
    "thread spends in polls, the part of these that find nothing, and the time of one"
)


def of_put(us: Sequence[Sequence[float]], taken: Sequence[Sequence[Taken | None]]) -> dict[str, float] | None:
    """Averages a put + signal, warm-up rounds among them, of the replay in the middle; None where nothing was taken.

    `us`, `taken`: by rank and replay; the time of one way, and what its plugin added up meanwhile.  Keys:

    | key | what |
    | --- | --- |
    | one_way_us | what the next five add up to |
    | posting_us, driver_us | inside the calls that post its operations: outside the CUDA driver, and inside |
    | copying_us | the rest of the time in which an operation is under way: until a poll has seen its copy done |
    | word_us | the call that writes a signal's word, at the receiver |
    | rest_us | what is left: the GPU's queue, NCCL's thread, the way of the signal from one to the other |
    | operations, bytes | that it is made of |
    | until_done_us | of one operation, from its posting until a poll has seen it done |
    | a_poll_us, polling, empty | one poll; polls over all time; those that found nothing over all polls |
    | clock_reads | for all of this, at both ends |
    """
    slowest = [max(replay) for replay in zip(*us, strict=True)]
    middle = sorted(range(len(slowest)), key=slowest.__getitem__)[len(slowest) // 2]
    found = [replays[middle] for replays in taken]
    if any(part is None or part["operations"] == 0 for part in found):
        return None
    total = {name: sum(part[name] for part in found if part is not None) for name in found[0] or {}}
    each_us = {name: nanoseconds / total["puts"] / 1e3 for name, nanoseconds in total.items()}
    word_us = total["writing_ns"] / max(1, total["words"]) / 1e3
    parts = {
        "one_way_us": slowest[middle],
        "posting_us": each_us["posting_ns"] - each_us["driver_ns"],
        "driver_us": each_us["driver_ns"],
        "copying_us": each_us["busy_ns"] - each_us["posting_ns"],
        "word_us": word_us,
        "rest_us": slowest[middle] - each_us["busy_ns"] - word_us,
        "operations": total["operations"] / total["puts"],
        "bytes": total["bytes"] / total["puts"],
        "until_done_us": total["until_ended_ns"] / max(1, total["ended"]) / 1e3,
        "a_poll_us": total["polling_ns"] / max(1, total["polls"]) / 1e3,
        "polling": total["polling_ns"] / total["since_ns"],
        "empty": total["empty_polls"] / max(1, total["polls"]),
        "clock_reads": total["clock_reads"] / total["puts"],
    }
    return {name: round(value, 3) for name, value in parts.items()}


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Heads, then the cells of each row that has a `plugin`; empty if none has."""
    lines = []
    for row in (row for row in rows if "plugin" in row):
        part = row["plugin"]
        us = [f"{part[name]:.2f}" for name in ("one_way_us", *_PARTS)]
        polls = [f"{part['polling']:.0%}", f"{part['empty']:.0%}", f"{part['a_poll_us']:.2f}"]
        by = f"{row['method']}, {row['sms']} block" + "s" * (row["sms"] > 1)
        lines.append([str(row["bytes"]), by, f"{part['operations']:.1f}", *us, *polls])
    return [list(_HEADS), *lines] if lines else []
