"""The calls under way in an object that is closed meanwhile."""

from __future__ import annotations

import threading

from moecomm.window.opened import CallGate


def test_the_last_step_comes_after_all_calls() -> None:
    gate, order, started, go = CallGate(), [], threading.Event(), threading.Event()

    def call() -> None:
        with gate.call():
            started.set()
            go.wait()
            order.append("call")

    thread = threading.Thread(target=call)
    thread.start()
    started.wait()
    gate.close(lambda: (order.append("abort"), go.set()), lambda: order.append("last"))  # type: ignore[arg-type]
    thread.join()
    assert order == ["abort", "call", "last"]


def test_below_a_call_of_the_same_thread_the_call_makes_the_last_step() -> None:
    gate, order = CallGate(), []
    with gate.call():
        with gate.call():
            gate.close(lambda: order.append("abort"), lambda: order.append("last"))
            order.append("inner")
        order.append("outer")
    assert order == ["abort", "inner", "outer", "last"]


def test_without_calls_nothing_is_aborted() -> None:
    gate, order = CallGate(), []
    gate.close(lambda: order.append("abort"), lambda: order.append("last"))
    assert order == ["last"]
