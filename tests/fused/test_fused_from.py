"""What fused=None means, beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moecomm.fused import layer

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("moe-*-h200-4.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_none_is_what_was_faster(path: Path) -> None:
    found: dict[tuple[int, str], float] = {}
    for row in json.loads(path.read_text())["rows"]:
        if (row["who"], row["what"]) == ("moecomm", "layer"):
            found[row["tokens"], row["variant"]] = row["us"]["p50"]
    sizes = {tokens for tokens, _ in found}
    assert min(sizes) < layer.FUSED_FROM[4] <= max(sizes)
    for tokens in sizes:
        apart, fused = found[tokens, "sequential"], found[tokens, "two launches"]
        chosen, other = (fused, apart) if tokens >= layer.FUSED_FROM[4] else (apart, fused)
        assert chosen <= other, f"{tokens} tokens"


@pytest.mark.parametrize(
    ("ranks", "tokens", "fused", "why_not", "under"),
    [
        (4, 1024, None, "", True),
        (4, 1023, None, "", False),
        (8, 8192, None, "", False),  # not measured
        (4, 8192, None, "no GPU", False),
        (4, 8192, False, "", False),
        (1, 1, True, "", True),
        (1, 1, True, "no GPU", False),
    ],
)
def test_by_the_buffer(ranks: int, tokens: int, fused: bool | None, why_not: str, under: bool) -> None:
    buffer = cast(Any, SimpleNamespace(num_ranks=ranks, max_tokens=tokens))
    assert layer._rows_travel_under(buffer, fused, lambda: why_not) is under
