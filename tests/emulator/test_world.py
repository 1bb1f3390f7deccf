"""Random sequences of rounds by the kernels of GPUs, with placements, losses and masks, against a model in float64."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from moecomm.testing import ranks as local

from ..few import few
from ..world.case import Case, Step
from ..world.shorten import program_of
from ..world.together import Together
from .machine import Machine

FEW, MANY, STEPS = range(2), range(40), 9
CALLS = ("dispatch", "dispatch", "combine", "place", "mask", "unmask", "drop")


def case_of(seed: int) -> Case:
    """Draw a case of few kernels: one size, rows of the Buffer's dtype, and a rank that is lost."""
    rng = random.Random(f"emulator {seed}")
    ranks, choice = rng.choice([2, 3]), rng.choice(["balanced", "balanced", "token"])
    sizes = {"hidden": 64, "num_experts": 6, "topk": 2, "max_tokens": 8, "dtype": "bfloat16", "capacity_factor": None}
    sizes["placement"] = {"seed": seed, "spare": rng.choice([0, 0, 1]), "choice": choice}
    steps = []
    for _ in range(STEPS):
        options = {"routing": rng.choice(["distinct", "some"]), "layout": "expert", "wire": None, "kept": -1}
        fault = ("close", rng.randrange(4), "") if rng.random() < 0.2 else None
        call = rng.choice(CALLS) if fault is None else "dispatch"
        steps.append(Step(call, rng.randrange(1 << 20), options, fault, rng.choice(["shrink", "mask"])))
    return Case(seed, ranks, sizes, tuple(steps))


@pytest.mark.parametrize("seed", few(MANY, *FEW))
def test_sequences_of_rounds_end_as_the_model_says(
    seed: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    case = case_of(seed)
    failure = Together(case).run()
    machine.forget()
    assert failure is None, program_of(case, failure, "Together")
