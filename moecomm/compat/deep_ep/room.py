"""Sizes of the windows behind deep_ep's calls.

Where the host waits for the rows, a window has room for what even routing brings, times the Buffer's capacity factor;
more rows go in several rounds.  Where nothing waits, deep_ep's contract fixes the shapes, and the window has room for
the worst case.
"""

from __future__ import annotations

from typing import NamedTuple

from moecomm.core.choices import Layout
from moecomm.core.settings import Settings

FLAT_ROUNDS = 4  # with room in a window: two micro-batches, what a combine copies, and what arrives next
BATCHED_ROUNDS = 3  # two in flight, and rows for a combine without a copy
EXPANDED_ROUNDS = 2
_KEPT: dict[Layout, int] = {"flat": 2, "expert": 1}  # of those, rounds whose outputs stay in the window
_ROUNDS: dict[Layout, int] = {"flat": FLAT_ROUNDS, "expert": EXPANDED_ROUNDS}
_HANDLES = 64  # that may be alive at a time
_ALIGNMENT = 128


class Room(NamedTuple):
    """Bytes of a window for outputs, and of those that outputs leave free, in one piece."""

    window: int
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
    rounds = _ROUNDS[layout]
    return Room(rounds * round_bytes + handles, (rounds - _KEPT[layout]) * round_bytes + handles)
