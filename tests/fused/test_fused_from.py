"""What fused=None means, beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moecomm.fused import layer
from moecomm.fused.kernels import FP8

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FROM = layer.FUSED_FROM[BF16, 4]
RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("moe-*-h200-4.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_none_is_what_was_faster(path: Path) -> None:
    found: dict[tuple[int, str], float] = {}
    for row in json.loads(path.read_text())["rows"]:
        if (row["who"], row["what"]) == ("moecomm", "layer"):
            found[row["tokens"], row["variant"]] = row["us"]["p50"]
    sizes = {tokens for tokens, _ in found}
    assert min(sizes) < FROM <= max(sizes)
    for tokens in sizes:
        apart, fused = found[tokens, "sequential"], found[tokens, "two launches"]
        chosen, other = (fused, apart) if tokens >= FROM else (apart, fused)
        assert chosen <= other, f"{tokens} tokens"


@pytest.mark.parametrize(
    ("weights", "ranks", "tokens", "fused", "why_not", "under"),
    [
        (BF16, 4, 1024, None, "", True),
        (FP16, 4, 1024, None, "", True),
        (BF16, 4, 1023, None, "", False),
        (BF16, 8, 8192, None, "", False),  # not measured
        (FP8, 4, 8192, None, "", False),  # nor this
        (FP32, 4, 8192, None, "", False),
        (BF16, 4, 8192, None, "no GPU", False),
        (BF16, 4, 8192, False, "", False),
        (BF16, 1, 1, True, "", True),
        (FP8, 1, 1, True, "", True),
        (BF16, 1, 1, True, "no GPU", False),
    ],
)
def test_by_the_buffer_and_its_weights(
    weights: torch.dtype, ranks: int, tokens: int, fused: bool | None, why_not: str, under: bool
) -> None:
    buffer = cast(Any, SimpleNamespace(num_ranks=ranks, max_tokens=tokens))
    assert layer._rows_travel_under(buffer, weights, fused, lambda: why_not) is under
