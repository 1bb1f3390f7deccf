"""Sizes of the windows behind deep_ep's calls.

Where the host waits for the rows, a window has room for what even routing brings, times the Buffer's capacity factor;
more rows go in several rounds.  Where nothing waits, deep_ep's contract fixes the shapes, and the window has room for
the worst case.
"""

from __future__ import annotations

from typing import NamedTuple

from moecomm.base.choices import Layout
from moecomm.ranks.settings import Settings

# Rounds with room in a window, one of them in the reserve.  The outputs of the others stay: those of two micro-batches
# and, in "flat", what a combine copies; in "batched" rows for a combine without a copy.
_ROUNDS: dict[Layout, int] = {"flat": 4, "expert": 2, "batched": 4}
_HANDLES = 64  # that may be alive at a time
_ALIGNMENT = 128


class Room(NamedTuple):
    """Bytes of a window for outputs, and of those the bytes for tables, and of the reserve: see WindowMemory."""

    window: int
    tables: int
    reserve: int


def room_for(settings: Settings, layout: Layout, max_rows: int | None = None) -> Room:
    """Return the room for rounds of a layout.

    Args:
        settings: of the Buffer; its capacity factor says which rows are expected, math.inf: the worst case.
        layout: "flat" or "expert".
        max_rows: rows of a round, in the place of those.
    """
    rows = settings.capacity_rows(layout, _ALIGNMENT if layout == "expert" else 1) if max_rows is None else max_rows
    round_bytes = settings.round_bytes(layout, rows)
    handle = rows * (12 * settings.topk + 16) + settings.max_tokens * settings.tables_bytes
    handles = min(_HANDLES * handle, 4 * round_bytes)
    return Room(_ROUNDS[layout] * round_bytes + handles, handles, round_bytes)


def batched_room(settings: Settings) -> Room:
    """Return the room for low-latency rounds, whose rows have the worst case's shape."""
    round_bytes = settings.round_bytes("batched")
    tables = round_bytes - settings.worst_rows("batched") * settings.hidden * settings.dtype.itemsize
    rounds = _ROUNDS["batched"]
    return Room(rounds * round_bytes, (rounds - 1) * tables, round_bytes)
