"""The least case that still fails, and a program that runs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .case import Case, Step


def shorter(case: Case, fails: Callable[[Case], bool], limit_s: float = 60.0) -> Case:
    """Return a case with fewer steps and options that fails as well.

    Args:
        case: one that fails.
        fails: runs a case; whether it fails in the same way.
        limit_s: no further case is tried after so long.
    """
    end = time.monotonic() + limit_s

    def tried(other: Case) -> bool:
        return time.monotonic() < end and fails(other)

    size = len(case.steps) // 2
    while size:
        at = 0
        while at < len(case.steps):
            fewer = replace(case, steps=case.steps[:at] + case.steps[at + size :])
            if tried(fewer):
                case = fewer
            else:
                at += size
        size //= 2
    for ranks in range(1, case.ranks):
        if not case.sizes.get("domain_ranks") and tried(fewer := replace(case, ranks=ranks)):
            case = fewer
            break
    for name in ("capacity_factor", "verify_every", "domain_ranks", "placement"):
        if name in case.sizes:
            sizes = {key: value for key, value in case.sizes.items() if key != name}
            if tried(fewer := replace(case, sizes=sizes)):
                case = fewer
    for at, step in enumerate(case.steps):
        for plainer in _plainer(step):
            steps = (*case.steps[:at], plainer(case.steps[at]), *case.steps[at + 1 :])
            if steps != case.steps and tried(fewer := replace(case, steps=steps)):
                case = fewer
    return case


def _plainer(step: Step) -> list[Callable[[Step], Step]]:
    """Return ways to make a step plainer."""

    def without(name: str) -> Callable[[Step], Step]:
        return lambda one: replace(one, options={key: value for key, value in one.options.items() if key != name})

    return [lambda one: replace(one, fault=None), lambda one: replace(one, options={}), *map(without, step.options)]


def program_of(case: Case, failure: Any, executor: str = "Threads") -> str:
    """Return a program that runs a case, for a shell in the repository."""
    steps = "".join(f"        {step!r},\n" for step in case.steps[: max(0, failure.step) + 1])
    return (
        f"# {str(failure)[:400]}\n"
        f"from tests.world.case import Case, Step\n"
        f"from tests.world.{executor.lower()} import {executor}\n\n"
        f"case = Case(\n    {case.seed}, {case.ranks}, {case.sizes!r},\n    (\n{steps}    ),\n)\n"
        f"print({executor}(case).run())\n"
    )
