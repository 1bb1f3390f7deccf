"""Decorators of the calls of Buffer whose types depend on their arguments, most of which end with `**options`.

The build writes their types to overloads.pyi (signatures.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from moecomm.base.keywords import show_options
from moecomm.combine import options as combine_options
from moecomm.dispatch import options as dispatch_options
from moecomm.fused import options as layer_options
from moecomm.rounds.state import not_traced

_Call = TypeVar("_Call", bound=Callable[..., Any])


def typed(options: Any = None) -> Callable[[_Call], _Call]:
    """Return the decorator of a call; `options`: the NamedTuple of its further keywords, if it has any."""

    def decorate(call: _Call) -> _Call:
        not_traced(call)
        if options is not None:
            show_options(call, options)
        return call

    return decorate


dispatch = typed(dispatch_options.Options)
dispatch_begin = typed(dispatch_options.Options)
combine = typed(combine_options.Options)
moe = typed(layer_options.Options)
stats = typed()
