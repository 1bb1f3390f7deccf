"""Counting of calls of moecomm.ops that fail before they reach the Buffer, so that ranks notice a missing round."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from moecomm._native import Call
from moecomm.rounds import names
from moecomm.rounds.state import RoundState

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def counted(
    argument: str, position: int, rounds: int = 1
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorate a collective function of `rounds` rounds, whose `argument` is a Buffer, its name, or an object with one.

    While torch.compile traces, the function is called directly: graphs contain only the operators, which count their
    own calls.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            buffer = _buffer_of(kwargs.get(argument, args[position] if position < len(args) else None))
            if buffer is None:
                return function(*args, **kwargs)
            with Call(buffer, rounds, None, True):
                return function(*args, **kwargs)

        return call

    return decorate


def _buffer_of(value: Any) -> RoundState | None:
    """Return the Buffer of an argument, or None; the decorated function then raises or opens one."""
    for attribute in ("buffer", "_buffer"):
        value = getattr(value, attribute, value)
    value = getattr(value, "rounds", value)
    if isinstance(value, str):
        return names.get(value)
    return value if isinstance(value, RoundState) else None
