"""A short soak: `python -m tests.soak --minutes 60` is the long one."""

from __future__ import annotations

from . import soak


def test_a_short_soak_leaves_nothing_behind() -> None:
    samples, row = soak.soak(seconds=12, every_s=0.5, seed=3)
    soak.check_same(samples)
    assert not row["shm_files_left"]
    assert len(samples) > 2 and row["events"]["grow"] and row["events"]["shrink"]


def test_a_line_through_samples_ignores_one_that_is_off() -> None:
    samples = [{"second": float(at), "value": 2.0 * at} for at in range(9)]
    samples[4]["value"] = 100.0
    assert soak.line(samples, lambda one: one["value"]) == (0.0, 16.0)
