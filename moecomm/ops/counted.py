"""Calls of operators that fail before they reach the Buffer are counted, as its own are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from moecomm.core import names
from moecomm.core.state import CollectiveCall, RoundState

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def counted(
    argument: str, position: int, rounds: int = 1
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a collective function of `rounds` rounds, whose `argument` is a Buffer, its name, or has one.

    A graph that torch.compile traces has the operators alone, which count themselves.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            buffer = _buffer_of(kwargs.get(argument, args[position] if position < len(args) else None))
            if buffer is None:
                return function(*args, **kwargs)
            with CollectiveCall(buffer, rounds):
                return function(*args, **kwargs)

        return call

    return decorate


def _buffer_of(value: Any) -> RoundState | None:
    """None if there is none, which the function says, or opens one."""
    for attribute in ("buffer", "_buffer"):
        value = getattr(value, attribute, value)
    value = getattr(value, "rounds", value)
    if isinstance(value, str):
        return names.get(value)
    return value if isinstance(value, RoundState) else None
