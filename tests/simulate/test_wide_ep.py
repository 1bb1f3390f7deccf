"""docs/maintainers/wide_ep.md is what its result says, and the result is what the model predicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moecomm_bench.simulate.domain import content, load
from moecomm_bench.simulate.nic import ModelNic

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return dict(json.loads((ROOT / "bench" / "results" / "wide-ep.json").read_text()))


def test_the_page_is_that_of_its_result(kept: dict[str, Any]) -> None:
    import wide_ep

    assert (ROOT / "docs" / "maintainers" / "wide_ep.md").read_text() == wide_ep.page(kept), (
        "run: python bench/refit.py"
    )


def test_the_result_is_what_the_model_says(kept: dict[str, Any]) -> None:
    import wide_ep

    nic = content()["nic"]
    checked = json.loads((ROOT / "bench" / "results" / "simulate-check.json").read_text())["measured"]
    found = wide_ep.measure(load(), ModelNic(efficiency=nic["efficiency"]), nic, checked)
    again = "run: python bench/refit.py"
    for about, value in kept["few_tokens"].items():
        assert found["few_tokens"][about] == pytest.approx(value, rel=1e-2), again
    for part in ("rows", "one_domain"):
        for mine, theirs in zip(found[part], kept[part], strict=True):
            for what in ("dispatch", "combine"):
                assert mine[what]["us"] == pytest.approx(theirs[what]["us"], rel=1e-2), again
    for mine, theirs in zip(found["published"], kept["published"], strict=True):
        assert mine["measured_us"] == theirs["measured_us"], again
        assert mine["error"] == pytest.approx(theirs["error"], abs=1e-2), again
