"""moecomm bench overlap without a GPU: its cases, what it compares, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moecomm.errors import BadInput, Unsupported
from moecomm.fused import Fp8
from moecomm.overlap import kernels
from moecomm.overlap.gpu import GpuExecutor
from moecomm.overlap.reference import in_float64
from moecomm_bench import operator_cases, operator_peers, operators
from moecomm_bench.operator_cases import OPERATORS, OperatorCase, cases

PRODUCTS = OPERATORS[:4]


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


def test_inputs_have_the_shapes_and_values_of_a_case() -> None:
    x: Any
    w: Any
    tables: Any
    indices: Any
    x, w = OperatorCase("matmul_all_reduce", "", "bf16", ((3, 16), (8, 16))).inputs(torch.device("cpu"), 1)
    assert (x.shape, w.shape, x.dtype) == ((3, 16), (8, 16), torch.bfloat16) and 0.1 < float(w.float().std()) < 0.5
    x, w = OperatorCase("matmul_all_to_all", "", "fp8", ((2, 3, 4, 256), (2, 136, 256))).inputs(torch.device("cpu"), 1)
    assert (x.scales.shape, w.scales.shape) == ((2, 3, 4, 2), (2, 2, 2))
    for made, empty in zip((x, w), OperatorCase("", "", "fp8", (x.data.shape, w.data.shape)).empty(), strict=True):
        assert [of.shape for of in made] == [of.shape for of in empty] and made[0].dtype == empty[0].dtype
    tables, indices = OperatorCase("embedding_all_to_all", "", "fp32", ((2, 5, 4), (2, 6, 3))).inputs(
        torch.device("cpu"), 0
    )
    assert (
        tables.shape == (2, 5, 4) and indices.dtype == torch.int64 and 0 <= int(indices.min()) <= int(indices.max()) < 5
    )


@pytest.mark.parametrize("operator", PRODUCTS)
def test_products_alone_in_fp8(operator: str) -> None:
    shapes = ((2, 3, 4, 128), (2, 16, 128)) if operator == "matmul_all_to_all" else ((6, 128), (16, 128))
    case = OperatorCase(operator, "", "fp8", shapes)
    x, w = case.inputs(torch.device("cpu"), 0)
    found = operator_peers.alone(case, x, w, 3)()
    rows = operator_peers.flat(x)
    assert isinstance(rows, Fp8) and isinstance(w, Fp8)
    wide_x, wide_w = in_float64(rows, w)
    wanted = wide_x @ wide_w.mT
    if operator == "all_gather_matmul":
        wanted = wanted.repeat(3, 1)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=1e-6)


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


def test_what_can_not_be_measured_is_refused() -> None:
    with pytest.raises(BadInput, match="operator"):
        operators.OperatorRun("matmul", 2, "lsa").check()
    with pytest.raises(BadInput, match="case"):
        operators.OperatorRun("all_gather_matmul", 2, "lsa", only="no such case").check()
    with pytest.raises(BadInput, match="dtype"):
        operators.OperatorRun("all_gather_matmul", 2, "lsa", dtype="int8").check()
    of_fp8 = operators.OperatorRun("matmul_all_reduce", 2, "lsa", dtype="fp8")
    assert {case.dtype for case in of_fp8.cases} == {"fp8"} and len(of_fp8.cases) > 2
    with pytest.raises(BadInput, match="case"):
        operators.OperatorRun("embedding_all_to_all", 2, "lsa", dtype="fp8").check()
    with pytest.raises(Unsupported, match="no GPU"):
        operators.OperatorRun("all_gather_matmul", 2, "host").check()
    assert math.prod(operator_cases.cases("all_gather_matmul", 4)[0].shapes[0]) * 4 == 1024**2
