"""moecomm bench transfer on CPU ranks: all ways leave the same weights, and the result says how long each took."""

from __future__ import annotations

import pytest

from moecomm.errors import BadInput
from moecomm_bench.transfer import AS_THEY_ARE, TransferCase, merge, run

CASE = TransferCase("", 64, 32, 7, 3, "host", ["apart", "overlap"], [AS_THEY_ARE, "fp8", "nvfp4"], 2)


def test_ways_leave_the_same_weights() -> None:
    """Each rank compares them."""
    found = run(CASE)
    assert found is not None and found["backend"] == "host"
    assert [(row["sets"], row["cast"]) for row in found["rows"]] == [(s, c) for s in CASE.sets for c in CASE.casts]
    expert = 2 * 3 * 64 * 32
    assert found["rows"][0]["mb"] == pytest.approx(4 * expert / 1e6, rel=1e-2)  # 7 experts of one rank, to two others
    for row in found["rows"]:
        assert row["moecomm_ms"] > 0 and row["broadcast_ms"] > 0 and row["all_gather_ms"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("ranks", 1), ("sets", ["x"]), ("sets", []), ("casts", ["bf8"]), ("experts", 2), ("replays", 0)],
)
def test_cases_that_cannot_be_measured(field: str, value: object) -> None:
    with pytest.raises(BadInput):
        run(TransferCase(**{**vars(CASE), field: value}))


def test_times_are_of_the_slowest_rank_and_ratios_of_one_replay() -> None:
    ranks = [
        {"backend": "host", "rows": [{"sets": "apart", "cast": "fp8", "received": of, **times}]}
        for of, times in (
            (5, {"moecomm": [2.0, 4.0], "stage": [1.0, 1.0], "bytes": [1.0, 1.0], "broadcast": [4.0, 6.0]}),
            (9, {"moecomm": [1.0, 3.0], "stage": [3.0, 1.0], "bytes": [0.5, 2.0], "broadcast": [8.0, 1.0]}),
        )
    ]
    (row,) = merge(CASE, ranks)["rows"]
    assert (row["moecomm_ms"], row["bytes_ms"], row["broadcast_ms"], row["stage_ms"]) == (3000, 1500, 7000, 2000)
    assert (row["of_bytes"], row["of_torch"], row["all_gather_ms"]) == (2.0, 2.75, None)
