"""docs/maintainers/dlrm.md is what its result says, and the result is what the model predicts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moecomm_bench.simulate.cli import app
from moecomm_bench.simulate.dlrm.gpu import content
from moecomm_bench.simulate.domain import fitted_efficiency
from moecomm_bench.simulate.nic import ModelNic

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "maintainers" / "dlrm.md"
AGAIN = "run: python bench/refit.py"
sys.path.append(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return dict(json.loads((ROOT / "bench" / "results" / "dlrm.json").read_text()))


def test_the_page_is_that_of_its_result(kept: dict[str, Any]) -> None:
    import dlrm_page

    assert PAGE.read_text() == dlrm_page.page(kept), AGAIN


def test_the_result_is_what_the_model_says(kept: dict[str, Any]) -> None:
    import dlrm_page

    found = dlrm_page.measure(content(), ModelNic(efficiency=fitted_efficiency()))
    assert found.keys() <= kept.keys() and found["assumptions"] == kept["assumptions"], AGAIN
    for part in ("rows", "steps", "changes"):
        for mine, theirs in zip(found[part], kept[part], strict=True):
            assert mine["saving"] == pytest.approx(theirs["saving"], abs=1e-3), AGAIN
    for mine, theirs in zip(found["grid"], kept["grid"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3), AGAIN


def test_the_steps_end_at_the_prediction(kept: dict[str, Any]) -> None:
    last = kept["rows"][-1]
    assert last["gpus"] == 128 and kept["steps"][-1]["saving"] == last["saving"]
    assert [row["gpus"] for row in kept["rows"]] == [2, 4, 8, 16, 32, 64, 128]
    for one in kept["steps"][
        1:
    ]:  # the operator's saving, of its share, is that of the iteration, but for what overlaps
        assert one["saving"] == pytest.approx(one["share"] * one["operator_saving"], abs=0.005)


def test_the_page_says_what_it_is(kept: dict[str, Any]) -> None:
    page = PAGE.read_text()
    assert "Predicted, not measured" in page and "2305.06942" in page
    assert all(one in page for one in kept["assumptions"])


def test_the_commands_of_the_page_run() -> None:
    commands = re.findall(r"^moecomm simulate (dlrm.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        told = CliRunner().invoke(app, command.split(), catch_exceptions=False)
        assert told.exit_code == 0, told.output
