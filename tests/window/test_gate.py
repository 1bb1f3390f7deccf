"""The calls under way in an object that is closed meanwhile, and that several threads call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

import pytest

from moecomm import _native


class Owner:
    """An object whose calls and end are noted."""

    def __init__(self) -> None:
        self.turn, self.order = _native.Turn(shared=True), list[str]()

    def call(self, alone: bool = False) -> _native.Call:
        return _native.Call(self, 0, None, alone)

    def close(self, abort: Callable[[], object] = lambda: None) -> None:
        with _native.AwaitedTurn(self.turn, lambda: (self.order.append("abort"), abort())):
            if self.turn.running + self.turn.depth > 0:
                self.turn.closing = True
            else:
                self._release()

    def _begin_call(self, rounds: int, nested: bool, note: object) -> None:
        self.order.append("call")

    def _call_failed(self, error: BaseException, missed: bool, note: object) -> None:
        self.order.append(type(error).__name__)

    def _refuse(self) -> NoReturn:
        raise PermissionError

    def _release(self) -> None:
        self.order.append("last")


def test_the_last_step_comes_after_the_calls_of_other_threads() -> None:
    owner, started, go = Owner(), threading.Event(), threading.Event()

    def call() -> None:
        with owner.call():
            started.set()
            go.wait()
            owner.order.append("end")

    thread = threading.Thread(target=call)
    thread.start()
    started.wait()
    with owner.call():
        owner.order.append("beside it")
    owner.close(go.set)
    thread.join()
    assert owner.order == ["call", "call", "beside it", "abort", "end", "last"]


def test_below_a_call_of_the_same_thread_the_last_call_makes_the_last_step() -> None:
    owner = Owner()
    with owner.call():
        with owner.call():
            owner.close()
            owner.order.append("inner")
        owner.order.append("outer")
    assert owner.order == ["call", "call", "inner", "outer", "last"]


def test_a_call_that_fails_makes_the_last_step() -> None:
    owner = Owner()

    def fail() -> None:
        with owner.call():
            owner.close()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert owner.order == ["call", "KeyError", "last"]


def test_one_call_at_a_time_contains_others() -> None:
    owner = Owner()
    with owner.call(alone=True):
        with owner.call():
            pass
        with pytest.raises(PermissionError), owner.call(alone=True):
            pass
    with owner.call(alone=True):
        pass
    assert owner.order == ["call"] * 3 and owner.turn.running == owner.turn.depth == 0


def test_without_calls_nothing_is_aborted() -> None:
    owner = Owner()
    owner.close()
    assert owner.order == ["last"]
