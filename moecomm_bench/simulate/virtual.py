"""Results of bench/virtual_ranks.py: work that grows with ranks, and rows in few blocks, without links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moecomm_bench import result_file
from moecomm_bench.ours import BF16_WIRE, IN_WINDOW
from moecomm_bench.simulate.domain import Line, Operation
from moecomm_bench.simulate.measured import content
from moecomm_bench.simulate.routing import DrawnGate, spread
from moecomm_bench.simulate.rows import words_of

# The sizes of the benchmark.
_EXPERTS, _TOPK, _ROW_BYTES = 256, 8, 2 * 7168
_ENTRIES, _MOST = ("ranks", "tokens", "layout", "what", "blocks", "us"), 1 << 16  # of a row, of a number
_MOST_RANKS = 16  # of a slope: more ranks leave too few multiprocessors to each
_EXPECTED = {"dispatch flat": 1.2, "dispatch expert": 1.5, "combine flat": 120.0, "combine expert": 90.0}


@dataclass(frozen=True)
class Slope:
    """The time that more tokens take in few blocks: `rows` more, from `base` on, in so many microseconds."""

    what: str
    layout: str
    rows: float
    blocks: int
    us: float

    def predicted_us(self, line: Line) -> float:
        """Return the time of the rows by a line: nothing crosses a link on one GPU."""
        return self.rows / self.blocks * (line.row_ns + _ROW_BYTES / line.block_gbs) / 1e3


def _rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in paths:
        result = content(path, result_file.RESULT.bytes_of(path))
        with result_file.reading(path):
            rows = [] if "benchmark" in result else result.get("rows", [])
            if rows and {"ranks", "blocks", "us"} <= rows[0].keys():
                found += [{name: _known(row, name) for name in _ENTRIES} for row in rows]
    return found


def _known(row: dict[str, Any], name: str) -> Any:
    """Return an entry of a row.  Raises ValueError for a number that no result has."""
    value = row[name]
    if name not in ("layout", "what") and not 0 < value <= _MOST:
        raise ValueError(f"{name} of {value}")
    return value


def slopes(paths: Iterable[Path]) -> list[Slope]:
    """Return the times of more tokens, by number of ranks, layout and operation."""
    found = []
    rows = _rows(paths)
    for many in (row for row in rows if row["tokens"] > 1 and row["ranks"] <= _MOST_RANKS):
        same = ("ranks", "layout", "what", "blocks")
        one = next((r for r in rows if r["tokens"] == 1 and all(r[key] == many[key] for key in same)), None)
        if one is None or many["layout"] != "flat":
            continue
        wanted = float(spread(DrawnGate(_EXPERTS, _TOPK), 1, many["ranks"]).ranks.sum())
        more = (many["tokens"] - 1) * wanted
        found.append(Slope(many["what"], many["layout"], more, many["blocks"], many["us"] - one["us"]))
    return found


def word_ns(paths: Iterable[Path]) -> dict[str, float]:
    """Return the time of a tagged word by operation and layout: the slope of rounds of one token over ranks."""
    found = dict(_EXPECTED)
    rows = _rows(paths)
    for name in found:
        what, layout = name.split()
        variant = "" if what == "dispatch" else IN_WINDOW if layout == "flat" else BF16_WIRE
        operation = Operation(what, layout, variant)
        own = [row for row in rows if (row["what"], row["layout"], row["tokens"]) == (what, layout, 1)]
        words = [words_of(operation, spread(DrawnGate(_EXPERTS, _TOPK), 1, row["ranks"])) for row in own]
        if len(set(words)) > 1:
            slope = np.polyfit(words, [row["us"] for row in own], 1)[0]
            found[name] = round(float(slope) * 1e3, 4)
    return found
