"""Rules that choose the schedule of a grouped GEMM by its shape: tables have lists of them, and the first match counts.

A rule is JSON: {"dtype": "bf16", "schedule": "128x6c1", "least": {"rows": 41}, "most": {"rows": 96, "waves": 1},
"paired": true}. Bounds are inclusive; a quantity without a bound may have any value. In the place of a name, `schedule`
may hold the relative times of several: see `in_whole_waves`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Rows of the tallest tile of each schedule, by dtype: those of moecomm.fused.SCHEDULES and FP8_SCHEDULES.
HEIGHTS = {
    "bf16": {
        "64x8c1": 64,
        "64x8c2": 64,
        "128x6c1": 128,
        "128x6c2": 128,
        "256x4c1": 256,
        "256x4c1d": 256,
        "256x4c2u16": 256,
        "256x4c2u16d": 256,
    },
    "fp8": {"64x5c1": 64, "64x5c2": 64, "128x4c1": 128, "128x4c1r": 128, "128x4c1rd": 128},
}
DTYPES = tuple(HEIGHTS)  # bf16: also of float16
_FIXED = ("columns", "depth", "groups")  # by rules that were measured
_FEW_WAVES = 6  # with more, a partial wave takes little of the time


@dataclass(frozen=True)
class Shape:
    """A grouped GEMM.

    Attributes:
        rows: expected rows of a group.
        groups: experts of the rank.
        columns: rows of a group's matrix.
        depth: columns of a group's matrix.
        column_tiles: tiles of all columns.
        multiprocessors: of the GPU.
    """

    rows: int
    groups: int
    columns: int
    depth: int
    column_tiles: int
    multiprocessors: int

    @property
    def waves(self) -> float:
        """Waves of tiles if each group has one row of tiles."""
        return self.groups * self.column_tiles / self.multiprocessors

    @property
    def paired(self) -> bool:
        """True if clusters of two have no idle block at the end of a row of tiles."""
        return self.column_tiles % 2 == 0


QUANTITIES = ("rows", "groups", "columns", "depth", "waves")  # of a Shape, that rules may bound


@dataclass(frozen=True)
class Rule:
    """A rule of a table. Raises ValueError for one that could choose nothing."""

    dtype: str
    schedule: str | dict[str, float]
    least: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    paired: bool | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: want one of {DTYPES}")
        names = self.schedule if isinstance(self.schedule, dict) else {self.schedule: 1.0}
        known = HEIGHTS[self.dtype]
        if not names or not all(name in known and _is_number(time) and time > 0 for name, time in names.items()):
            raise ValueError(f"schedule={self.schedule!r}: want one of {tuple(known)}, or their relative times")
        for name, bounds in (("least", self.least), ("most", self.most)):
            good = isinstance(bounds, dict) and all(key in QUANTITIES and _is_number(bounds[key]) for key in bounds)
            if not good:
                raise ValueError(f"{name}={bounds!r}: want numbers of {QUANTITIES}")
        if self.paired not in (None, True, False):
            raise ValueError(f"paired={self.paired!r}: want true or false")

    def covers(self, shape: Shape) -> bool:
        """Return whether the rule holds for a GEMM."""
        return (
            self.paired in (None, shape.paired)
            and all(getattr(shape, name) >= value for name, value in self.least.items())
            and all(getattr(shape, name) <= value for name, value in self.most.items())
        )

    @property
    def shape(self) -> tuple[Any, ...] | None:
        """Return the shape for which the rule was measured: dtype, columns, depth, groups; None for a general rule."""
        fixed = [self.least.get(name) for name in _FIXED]
        if None in fixed or fixed != [self.most.get(name) for name in _FIXED]:
            return None
        return (self.dtype, *fixed)

    def line(self) -> dict[str, Any]:
        """Return the rule as JSON."""
        found: dict[str, Any] = {"dtype": self.dtype, "schedule": self.schedule}
        found |= {name: bounds for name, bounds in (("least", self.least), ("most", self.most)) if bounds}
        return found if self.paired is None else {**found, "paired": self.paired}


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def first_match(rules: Iterable[Rule], dtype: str, shape: Shape) -> str:
    """Return the name of the schedule by the first rule that covers the shape. Raises ValueError if no rule does."""
    for rule in rules:
        if rule.dtype == dtype and rule.covers(shape):
            if isinstance(rule.schedule, str):
                return rule.schedule
            if name := in_whole_waves(rule.schedule, HEIGHTS[dtype], shape):
                return name
    raise ValueError(f"no rule for a GEMM in {dtype!r} of {shape}")


def in_whole_waves(times: dict[str, float], heights: dict[str, int], shape: Shape) -> str | None:
    """Return the schedule whose waves of tiles take the least time; a partial wave counts as a full one.

    Args:
        times: for each schedule the time for a row where tensor cores are the bottleneck, relative to one of them.
        heights: rows of the tallest tile of each schedule.
        shape: a GEMM of groups with about the expected rows.

    Returns:
        The name of the schedule; None for many waves, where other rules do better.
    """
    found = {}
    for name, time in times.items():
        tiles = max(1, -(-shape.rows // heights[name]))  # of equal height
        waves = -(-shape.groups * tiles * shape.column_tiles // shape.multiprocessors)
        found[name] = waves, shape.rows / tiles * time
    if min(waves for waves, _ in found.values()) > _FEW_WAVES:
        return None
    return min(found, key=lambda name: found[name][0] * found[name][1])


def of_measured(
    dtype: str, columns: int, depth: int, groups: int, us: Sequence[tuple[int, dict[str, float]]], tolerance: float
) -> list[Rule]:
    """Return rules for the GEMM of one shape: as few ranges of rows as there can be.

    A range has one schedule, which is at each of its points slower than the fastest by at most `tolerance`. Two ranges
    meet halfway between the points, as ratios go; the first and the last range have no end.

    Args:
        dtype, columns, depth, groups: the shape.
        us: rows of a group, and microseconds by schedule; at least one point.
        tolerance: a fraction.
    """
    points = [
        (rows, {name: time / min(times.values()) for name, time in times.items()})
        for rows, times in sorted(us, key=lambda point: point[0])
    ]
    ranges: list[tuple[int, int, str]] = []  # rows of the first point and the last, and the schedule
    while points:
        covered, fine = 0, set(points[0][1])
        for _, times in points:
            still = {name for name in fine if times.get(name, math.inf) <= 1 + tolerance}
            if not still:
                break
            covered, fine = covered + 1, still
        inside, points = points[:covered], points[covered:]
        best = min(sorted(fine), key=lambda name: sum(times[name] for _, times in inside))
        ranges.append((inside[0][0], inside[-1][0], best))
    fixed: dict[str, float] = {"columns": columns, "depth": depth, "groups": groups}
    rules = []
    for i, (_, last, name) in enumerate(ranges):
        end = {"rows": math.isqrt(last * ranges[i + 1][0])} if i + 1 < len(ranges) else {}
        rules.append(Rule(dtype, name, fixed, fixed | end))
    return rules
