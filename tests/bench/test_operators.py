"""moecomm bench overlap without a GPU: its cases, what it compares, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from moecomm.overlap import kernels
from moecomm.overlap.gpu import GpuExecutor
from moecomm_bench import operators
from moecomm_bench.operator_cases import OPERATORS, cases


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_cases_are_calls_that_the_kernels_take(operator: str, ranks: int) -> None:
    assert callable(getattr(GpuExecutor, operator)) and ranks <= kernels.MOST_RANKS
    for case in cases(operator, ranks):
        first, second = case.shapes
        assert min(first) >= 1 and min(second) >= 1, case
        if operator == "embedding_all_to_all":
            assert second[0] == first[0] and second[1] % ranks == 0
        else:
            assert first[-1] == second[-1] and first[-1] % 8 == 0 and second[-2] % 8 == 0
            assert operator != "matmul_reduce_scatter" or first[0] % ranks == 0
            assert case.dtype != "fp8" or first[-1] % 128 == 0


def test_rows_are_those_of_the_slowest_rank_and_are_compared() -> None:
    about: dict[str, Any] = {
        "operator": "matmul_all_reduce",
        "case": "a",
        "dtype": "bf16",
        "shapes": (),
        "flops": 10**6,
    }
    times = [{"moecomm": 2.0, "alone": 1.0, "nccl": 6.0}, {"moecomm": 4.0, "alone": 2.0, "nccl": 5.0}]
    by_rank = [[{**about, "who": who, "us": [us]} for who, us in of_rank.items()] for of_rank in times]
    for rows in by_rank:
        rows.append({**about, "who": "moecomm default", "form": "collectives", "us": [5.0]})
        rows.append({**about, "who": "torch", "why": "not here"})
    found = {row["who"]: row for row in operators.merge(by_rank)}
    assert found["moecomm"]["us"]["p50"] == 4.0 and found["nccl"]["us"]["p50"] == 6.0
    assert (found["nccl"]["speedup"], found["moecomm"]["of_alone"], found["moecomm"]["tflops"]) == (1.5, 2.0, 0.25)
    assert found["torch"]["why"] == "not here" and found["moecomm default"]["form"] == "collectives"
