"""Counters of every rank, words for what they show, and a live view of a running job.

`counters` reads the counters that rounds keep in the window, `counted` returns them to a Buffer,
`classify` says which rank, link or expert stands out, `publish` writes them beside a running job, and `top` shows them.
"""

from __future__ import annotations

from moecomm.observe.stats.counted import Counters
from moecomm.observe.stats.counters import WAITS, JobStats, Stats
from moecomm.observe.stats.publish import publish

__all__ = ["WAITS", "Counters", "JobStats", "Stats", "publish"]
