"""Every public argument x values that it can't have: an error of moecomm's, or a meaning that accepted.py has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops

from ..few import few
from ..fresh_python import run_python
from . import calls
from .accepted import TABLE, accepted
from .child import RIGHT_EVERY
from .values import GENERAL, LIKE

LONG = 1800  # seconds
TABLES = {"moecomm": calls.of_moecomm, "compat": calls.of_compat}


def is_of(part: str, name: str) -> bool:
    return name.startswith(("compat.", "deep_ep.")) == (part == "compat")


def said_by_child(*words: str, timeout_s: int = 120) -> list[list[str]]:
    ran = run_python(Path(__file__).parent / "child.py", *words, timeout_s=timeout_s)
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 0, f"ended by {said[-1:]}\n{ran.stderr[-2000:]}"
    return said


@pytest.mark.parametrize("part", few(TABLES, "moecomm"))
def test_values_that_arguments_cannot_have(part: str) -> None:
    wrong, cases = [], 0
    for name, argument, value, *found in said_by_child(part):
        if not found:
            continue
        cases += 1
        if value.startswith("right"):
            fine = found == ["accepted"]
        else:
            kind = value if value in GENERAL else value.split("[")[0]  # of a part of a pair
            fine = found == ["named"] or (found == ["accepted"] and kind in (accepted(name, argument) or ()))
        if not fine:
            wrong.append(f"{name}({argument}={value}): {found[0]}")
    assert not wrong, "\n".join(wrong)
    assert cases > 5000


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("part", TABLES)
@pytest.mark.parametrize("cases", few((3000, 100_000), 3000))
def test_several_values_that_arguments_cannot_have(part: str, cases: int, pytestconfig: pytest.Config) -> None:
    """Some of them can: which ones, of several, no table says.  No other error comes, and right calls still work."""
    count, seed = pytestconfig.getoption("--cases") or cases, pytestconfig.getoption("--seed")
    said = said_by_child(part, str(count), str(seed), timeout_s=LONG)
    found = [(name, arguments, values, *ends) for name, arguments, values, *ends in said if ends]
    wrong = [one for one in found if one[3] != "accepted" and (one[3] != "named" or not one[1])]
    assert not wrong, "\n".join(map(str, wrong[:50]))
    assert len(found) == count + -(-count // RIGHT_EVERY)


@pytest.mark.parametrize("part", TABLES)
def test_every_public_argument_is_in_the_tables(part: str) -> None:
    public = {name: call for name, call in calls.public().items() if is_of(part, name)}
    table = TABLES[part]()
    assert set(table) == set(public)
    for name, some in table.items():
        assert set(calls.parameters(public[name])) <= set().union(*(call.arguments for call in some)), name
        for call in some:
            assert [argument for argument in call.arguments if accepted(name, argument) is None] == [], name


def test_rows_speak_of_what_there_is() -> None:
    public = {name: calls.parameters(call) for name, call in calls.public().items()}
    known = {argument for names in public.values() for argument in names}
    known |= {f"{name}({argument})" for name, names in public.items() for argument in names}
    for row in TABLE:
        assert set(row.arguments) <= known, row.meaning
        assert set(row.values) <= {*GENERAL, *LIKE}, row.meaning


def test_transforms_of_torch_func_are_refused_by_name() -> None:
    with moecomm.Buffer(**calls.SIZES, backend="host", dtype=torch.float32) as buffer:
        x, idx, weights = torch.randn(4, calls.H), torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2)
        sent = ops.dispatch(buffer, x, idx, weights)
        w13, w2 = torch.randn(calls.E, 16, calls.H), torch.randn(calls.E, calls.H, 8)
        rounds: list[Callable[[Any], Any]] = [
            lambda given: ops.dispatch(buffer, given, idx, weights).x,
            lambda given: ops.dispatch_again(given, sent.handle),
            lambda given: ops.moe(buffer, given, idx, weights, w13, w2),
        ]
        for call in rounds:
            with pytest.raises(moecomm.Unsupported, match=r"x.* under torch.func"):
                torch.func.grad(lambda given, call=call: call(given).sum())(x)
            with pytest.raises(moecomm.Unsupported, match=r"x.* under torch.func"):
                torch.func.vmap(call)(x.unsqueeze(0))
        with pytest.raises(moecomm.Unsupported, match=r"y.* under torch.func"):
            torch.func.grad(lambda given: ops.combine(given, sent.handle).sum())(sent.x)
        assert torch.equal(ops.combine(sent.x, sent.handle, weighted=False), 2 * x)
