"""Errors that calls must raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import moecomm


def expect(call: Callable[[], Any], error: type[BaseException]) -> None:
    """Make a call that must raise this error, and no other kind of it but OutOfStep for OutOfStep."""
    try:
        call()
    except error as found:
        if isinstance(found, moecomm.OutOfStep) and error is moecomm.Mismatch:
            raise AssertionError(f"OutOfStep, not Mismatch: {found}") from found
        with contextlib.suppress(AttributeError):
            found.__traceback__ = None
        return
    except moecomm.MoecommError as found:
        raise AssertionError(f"{type(found).__name__}, not {error.__name__}: {found}") from found
    raise AssertionError(f"no {error.__name__}")
