"""Few cases of many for a plain run of the tests; `pytest -m long` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], *plain: Any) -> list[Any]:
    """Parameters for pytest: all `cases`, of which those that are not `plain` are long."""
    every = list(cases)
    assert plain and all(case in every for case in plain)
    return [
        case if case in plain else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in every
    ]
