"""Failed calls over several Buffers count in each of them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.rounds.call_count import CallCount, CountedCall

from ..backends.conftest import all_ranks

X, IDS = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 0]])


def opened(group: Any) -> moecomm.Buffer:
    return moecomm.Buffer(group, hidden=64, num_experts=2, topk=2, max_tokens=2, backend="host", timeout_s=60)


def fails(calls: CallCount, after: Callable[[], object] = list) -> None:
    def call() -> None:
        with CountedCall(calls):
            after()
            raise KeyError

    with pytest.raises(KeyError):
        call()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("failing", [(1,), (0, 1)])
def test_a_failed_call_counts_in_every_buffer(later: bool, failing: tuple[int, ...]) -> None:
    done = Barrier(2)

    def body(group: Any) -> list[str]:
        calls, buffers, found = CallCount(), [], []
        for which in range(2):
            if later and which == 1 and group.rank in failing:
                fails(calls)
            buffers.append(opened(group))
            calls.add(buffers[-1].rounds)
        if not later and group.rank in failing:
            fails(calls)
        for buffer in buffers:
            try:
                with CountedCall(calls):
                    found.append(str(len(buffer.dispatch(X, IDS).x)))
            except moecomm.OutOfStep as error:
                found.append(type(error).__name__)
        done.wait(30)
        for buffer in buffers:
            buffer.close()
        return found

    assert all_ranks(2, body) == [["4", "4"] if failing == (0, 1) else ["OutOfStep"] * 2] * 2


def test_a_round_or_a_call_that_has_counted_is_not_counted_again() -> None:
    calls = CallCount()
    with opened("self") as buffer:
        calls.add(buffer.rounds)
        fails(calls, after=lambda: buffer.dispatch(X, IDS))
        assert (calls.failed, buffer.rounds.turn.failed) == (0, 0)
        with pytest.raises(moecomm.BadInput), CountedCall(calls):
            buffer.dispatch(X.double(), IDS)
        assert (calls.failed, buffer.rounds.turn.failed) == (0, 1)
        fails(calls, after=lambda: fails(calls))
        assert (calls.failed, buffer.rounds.turn.failed) == (1, 2)


def test_a_failure_beside_a_call_of_another_thread_counts_after_it() -> None:
    done = Barrier(2)

    def body(group: Any) -> None:
        calls = CallCount()
        with opened(group) as buffer:
            calls.add(buffer.rounds)
            if group.rank == 1:
                with _native.Call(buffer.rounds, 0):
                    other = Thread(target=fails, args=(calls,))
                    other.start()
                    other.join()
                    assert (buffer.rounds.turn.failed, buffer.rounds.turn.uncounted) == (0, 1)
            with pytest.raises(moecomm.OutOfStep):
                buffer.dispatch(X, IDS)
            done.wait(30)

    all_ranks(2, body)
