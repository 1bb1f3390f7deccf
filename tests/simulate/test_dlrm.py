"""docs/maintainers/dlrm.md: tables of its result, a result of the model, and a model that measured rows bear out."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moecomm_bench.simulate.domain import fitted_efficiency
from moecomm_bench.simulate.nic import ModelNic

ROOT = Path(__file__).parents[2]
AGAIN = "run: python bench/refit.py"
sys.path.append(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return dict(json.loads((ROOT / "bench" / "results" / "dlrm.json").read_text()))


@pytest.fixture(scope="module")
def fitted() -> dict[str, Any]:
    import dlrm_page

    return dlrm_page.fit(sorted((ROOT / "bench" / "results").glob("*.json")))


def test_the_page_is_that_of_its_result(kept: dict[str, Any]) -> None:
    import dlrm_page

    text = dlrm_page.PAGE.read_text()
    assert text == dlrm_page.page(kept, text), AGAIN
    assert "Predicted, not measured" in text and "2305.06942" in text
    assert f"**{kept['steps'][-1]['saving']:.1%} less time on 128 nodes**" in text
    paper, steps = kept["paper"], kept["steps"]
    assert re.search(rf"simulation has {paper['iteration']:.0%}", text.replace("\n", " "))
    assert steps[1]["saving"] < paper["iteration"] < steps[0]["saving"], "the page says so"
    assert max(one["median"] for one in kept["fit"]["errors"].values()) < 0.05, "the page says so"


def test_the_result_is_what_the_model_says(kept: dict[str, Any], fitted: dict[str, Any]) -> None:
    import dlrm_page

    for part, terms in fitted["terms"].items():
        assert kept["fit"]["terms"][part] == pytest.approx(terms, rel=1e-3), AGAIN
    found = dlrm_page.measure(fitted, ModelNic(efficiency=fitted_efficiency()))
    assert kept["fit"]["fitted_to"] == fitted["fitted_to"], AGAIN
    assert [row["gpus"] for row in found["rows"]] == [row["gpus"] for row in kept["rows"]]
    for mine, theirs in zip(found["rows"], kept["rows"], strict=True):
        for form, of in theirs["forms"].items():
            assert mine["forms"][form]["us"] == pytest.approx(of["us"], rel=1e-3), AGAIN
    for mine, theirs in zip(
        found["steps"] + found["changes"], copy.deepcopy(kept["steps"] + kept["changes"]), strict=True
    ):
        assert mine.pop("name") == theirs.pop("name") and mine == pytest.approx(theirs, abs=1e-3, rel=1e-3), AGAIN


def test_measured_rows_are_within_bounds(fitted: dict[str, Any]) -> None:
    """The worst product is that of 256 x 4096 x 7168, which has few tiles for the SMs."""
    bounds = {"bags": (8, 0.03), "torch_bags": (8, 0.05), "products": (29, 0.11)}
    bounds |= {"all_to_all": (11, 0.05), "all_reduce": (8, 0.14)}
    assert {part: of["rows"] for part, of in fitted["errors"].items()} == {
        part: rows for part, (rows, _) in bounds.items()
    }
    assert [part for part, of in fitted["errors"].items() if of["worst"] > bounds[part][1]] == []


@pytest.mark.parametrize("pooling", [8, 64, 256])
@pytest.mark.parametrize("gbs", [10.0, 50.0, 100.0])
def test_a_fused_forward_pass_saves_no_more_than_the_limit_of_the_page(
    fitted: dict[str, Any], pooling: int, gbs: float
) -> None:
    """20 %, at most; and fusing hides no more than the shorter of lookups and all-to-all."""
    import dlrm_page

    model = replace(dlrm_page.SMALL, pooling=pooling)
    setting = dlrm_page.Setting(model, ModelNic(gbs, efficiency=0.9))
    (unfused, apart), (fused, joint), (both, _) = (
        dlrm_page.iteration(fitted["terms"], setting, 128, form)
        for form in (dlrm_page.UNFUSED, dlrm_page.FUSED, dlrm_page.BOTH)
    )
    pair = apart["lookups"], apart["all-to-all"]
    assert max(pair) - apart["bottom MLP"] < joint["lookups + all-to-all"] < sum(pair)
    assert 0.8 * unfused < fused < unfused and both < fused
