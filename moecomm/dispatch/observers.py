"""Observers of routing: functions that see the routing of each dispatch before it runs.  moecomm.routing records it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moecomm.rounds.rounds import Rounds

Observer = Callable[[Rounds, Any, Any], None]  # rounds, topk_idx, topk_weights

active: tuple[Observer, ...] = ()  # replaced, never changed: a dispatch in another thread may be reading it
_changing = threading.Lock()
_thread = threading.local()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` for each dispatch of this process that has a routing of its own."""
    global active
    with _changing:
        active = (*active, observer)
    try:
        yield
    finally:
        with _changing:
            active = tuple(other for other in active if other is not observer)


@contextmanager
def muted() -> Iterator[None]:
    """Show the dispatches of this thread to no observer: those of a backward pass repeat a routing."""
    before = getattr(_thread, "muted", False)
    _thread.muted = True
    try:
        yield
    finally:
        _thread.muted = before


def show(rounds: Rounds, topk_idx: Any, topk_weights: Any) -> None:
    """Show the routing of a dispatch or of a layer to all observers.  Without observers this is one comparison.

    A dispatch along a handle has no `topk_idx`, and is not shown.  A layer shows its routing before that is checked.
    """
    if active and topk_idx is not None and not getattr(_thread, "muted", False):
        for observer in active:
            observer(rounds, topk_idx, topk_weights)
