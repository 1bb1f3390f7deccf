"""Options of commands, checked before any measurement."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import typer

from moecomm.base.validation import check_integer, check_real
from moecomm.errors import BadInput

MOST = 1 << 20  # of a size; larger than in any model


def whole(least: int, most: int = MOST) -> Callable[[typer.CallbackParam, int | None], int | None]:
    """Return a callback that raises BadInput for integers out of range."""

    def check(param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None:
            check_integer(str(param.name), value, least, most)
        return value

    return check


def real(least: float, most: float = float("inf")) -> Callable[[typer.CallbackParam, float], float]:
    """Return a callback that raises BadInput for real numbers out of range."""

    def check(param: typer.CallbackParam, value: float) -> float:
        check_real(str(param.name), value, least, most)
        return value

    return check


def written(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Create the folder of an output file; a callback. Raises BadInput if the file cannot be written."""
    if value is None:
        return None
    why = "it is a directory" if value.is_dir() else ""
    try:
        value.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = str(error)
    if not why and not os.access(value if value.exists() else value.parent, os.W_OK):
        why = "no permission"
    if why:
        raise BadInput(str(param.name), str(value), f"a file that can be written ({why})")
    return value
