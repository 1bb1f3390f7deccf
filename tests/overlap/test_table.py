"""fused=None on GPUs: the table holds what bench/results shows, and nothing that was slower there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moecomm.overlap import table
from moecomm.overlap.sizes import Sizes

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("overlap-*.json"))


def dims_of(operator: str, shapes: list[list[int]], ranks: int) -> dict[str, int]:
    """Sizes by the names of the docstrings, from those of the first two arguments."""
    first, second = shapes
    if operator == "embedding_all_to_all":
        return {"T": first[0], "V": first[1], "D": first[2], "B": second[1] // ranks}
    if operator == "matmul_all_to_all":
        return {"E": first[0], "C": first[2], "K": first[3], "N": second[1]}
    return {"M": first[0], "K": first[1], "N": second[0]}


def measured() -> Iterator[tuple[str, int, Sizes, dict[str, float]]]:
    """The GPU, the ranks, the call and the times of everybody."""
    for path in RESULTS:
        found: dict[str, Any] = json.loads(path.read_text())
        times: dict[Any, dict[str, float]] = {}
        for row in found["rows"]:
            key = (row["operator"], row["dtype"], json.dumps(row["shapes"]))
            if "us" in row:
                times.setdefault(key, {})[row["who"]] = row["us"]["p50"]
        for (operator, dtype, shapes), by_whom in times.items():
            dims = dims_of(operator, json.loads(shapes), found["ranks"])
            sizes = Sizes(operator, torch.bfloat16, dims, (), (), dtype == "fp8")
            yield found["machine"]["gpus"][0], found["ranks"], sizes, by_whom


@pytest.mark.parametrize("row", table.MEASURED, ids=lambda row: f"{row.operator} {row.least}")
def test_a_range_has_been_measured(row: table.Row) -> None:
    of_row = [times for gpu, ranks, sizes, times in measured() if row.covers(gpu, ranks, sizes)]
    assert len(of_row) >= 2


def test_what_is_fused_was_faster() -> None:
    chosen = 0
    for gpu, ranks, sizes, times in measured():
        if table.is_faster(gpu, ranks, sizes):
            assert times["moecomm"] < times["nccl"], (sizes.operator, sizes.dims)
            chosen += 1
    assert chosen >= 30


def test_other_gpus_and_numbers_of_ranks_are_unfused() -> None:
    for gpu, ranks, sizes, _ in measured():
        assert not table.is_faster(gpu, ranks + 1, sizes) and not table.is_faster("another", ranks, sizes)
