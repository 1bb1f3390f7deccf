"""Percentiles of times that a long run notes."""

from __future__ import annotations

import math

_PARTS = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def percentiles(ms: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the longest time, rounded; nothing without times."""
    return {name: round(sorted(ms)[math.ceil(part * len(ms)) - 1], 2) for name, part in _PARTS.items()} if ms else {}
