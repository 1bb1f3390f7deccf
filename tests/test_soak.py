"""A short soak: `python -m tests.soak --minutes 60` is the long one."""

from __future__ import annotations

from . import soak


def test_a_short_soak_leaves_nothing_behind() -> None:
    samples, row = soak.soak(seconds=12, every_s=0.5, seed=3)
    soak.check_same(samples)
    assert not row["shm_files_left"]
    assert len(samples) > 2 and row["events"]["grow"] and row["events"]["shrink"]
