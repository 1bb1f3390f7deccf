"""Random sequences of calls on 1 to 8 ranks, compared with a model in float64.

`pytest tests/test_world.py --cases 10000 --seed 7` runs more; a failure prints a program that runs its case.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moecomm

from .few import few
from .world.calls import ROUND_CALLS
from .world.case import Case, Step
from .world.draw import draw_case
from .world.program import Failure
from .world.shorten import program_of, shorter
from .world.threads import Threads

FEW, MANY = 50, 10_000  # sequences of a plain run, and of a long one
BLOCKS = 5
FEW_OF_PROCESSES, MANY_OF_PROCESSES = 4, 400
SHORTEN_S = 30.0


def failed(case: Case) -> str:
    """Run a case; return a program that fails as it does, or nothing."""
    failure = Threads(case).run()
    if failure is None:
        return ""
    least = shorter(replace(case, steps=case.steps[: failure.step + 1]), lambda one: alike(one, failure), SHORTEN_S)
    return f"{failure}\n\n{program_of(least, Threads(least).run() or failure)}"


def alike(case: Case, failure: Failure) -> bool:
    """Return whether a case fails, and with the same words at the beginning."""
    other = Threads(case, 2.0).run()
    return other is not None and other.kind == failure.kind


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("cases", few((FEW, MANY), FEW))
def test_random_sequences_end_as_the_model_says(cases: int, block: int, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--cases") or cases
    first = request.config.getoption("--seed") * 1_000_000
    for seed in range(first + block, first + count, BLOCKS):
        said = failed(draw_case(seed))
        assert not said, f"the sequence of seed {seed} fails: {said}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cases", few((FEW_OF_PROCESSES, MANY_OF_PROCESSES), FEW_OF_PROCESSES))
def test_random_sequences_of_processes_end_as_the_model_says(cases: int, request: pytest.FixtureRequest) -> None:
    """Ranks that are killed and interrupted.  They are forked, so from a process that has one thread."""
    first = request.config.getoption("--seed") * 1_000_000
    command = [sys.executable, "-m", "tests.world.processes", str(cases), "--first", str(first)]
    there = Path(moecomm.__file__).parent.parent  # first: the repository's moecomm may not have been built
    given: dict[str, Any] = {"cwd": there, "env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cases", few((10, 500), 10))
def test_bad_input_on_some_ranks_leaves_all_out_of_step(cases: int) -> None:
    """Run the same sequences with bad input in every third round."""
    for seed in range(cases):
        case = draw_case(seed)
        rounds = [at for at, step in enumerate(case.steps) if step.call in ROUND_CALLS]
        faults = {at: ("bad one", nth, str(nth)) for nth, at in enumerate(rounds[::3])}
        steps = (replace(step, fault=faults.get(at, step.fault)) for at, step in enumerate(case.steps))
        said = failed(replace(case, steps=tuple(steps)))
        assert not said, f"the sequence of seed {seed} fails: {said}"


SIZES = {"hidden": 64, "num_experts": 6, "topk": 2, "max_tokens": 8, "dtype": "bfloat16", "capacity_factor": None}


def test_a_wrong_sum_is_found_and_its_case_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = moecomm.Buffer.combine

    def wrong(buffer: moecomm.Buffer, *args: Any, **options: Any) -> Any:
        out = combine(buffer, *args, **options)
        if len(out):
            out[-1, 0] += 1
        return out

    steps = (Step("dispatch", 1), Step("stats"), Step("dispatch", 2, {"layout": "flat"}), Step("combine", 3))
    case = Case(0, 2, SIZES, steps)
    assert Threads(case).run() is None
    monkeypatch.setattr(moecomm.Buffer, "combine", wrong)
    failure = Threads(case).run()
    assert failure is not None and "elements are wrong" in failure.text
    least = shorter(case, lambda one: alike(one, failure))
    assert [step.call for step in least.steps] == ["dispatch", "combine"]
    printed = program_of(least, failure)
    assert "Step(call='combine'" in printed
    compile(printed, "printed", "exec")
