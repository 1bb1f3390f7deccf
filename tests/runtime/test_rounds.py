"""How rounds are run; what they do is tested elsewhere."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moecomm import _native

from ..live import FAR_S, ROOM_S
from .child import EmptyRounds, run_round
from .processes import children

TIMEOUT, PEER_LOST, ABORTED = 1, 2, 3


def test_ranks_together() -> None:
    rounds = EmptyRounds(_native, 4)
    for _ in range(100):
        _native.host_run_all(rounds.args)
    assert [rounds.failure(rank) for rank in range(4)] == [None] * 4
    assert [_native.read_word(window.address + rounds.layout.state) for window in rounds.windows] == [100] * 4


def test_ranks_in_python_threads() -> None:
    rounds = EmptyRounds(_native, 3)
    threads = [threading.Thread(target=run_round, args=(_native, args)) for args in rounds.args]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [rounds.failure(rank) for rank in range(3)] == [None] * 3


def test_the_gil_is_released() -> None:
    """Another Python thread is what the round waits for."""
    rounds = EmptyRounds(_native, 2)
    peer = threading.Thread(target=run_round, args=(_native, rounds.args[1]))
    starter = threading.Timer(0.05, peer.start)
    starter.start()
    run_round(_native, rounds.args[0])
    starter.join()
    peer.join()
    assert rounds.failure(0) is None


def test_a_failed_round_raises_nothing_here() -> None:
    rounds = EmptyRounds(_native, 2, timeout_s=0.1)
    run_round(_native, rounds.args[0])
    failure = rounds.failure(0)
    assert (failure.code, failure.rank, failure.peer, failure.round) == (TIMEOUT, 0, 1, 1)
    assert failure.waited_ns >= 100_000_000


def test_abort_from_another_thread() -> None:
    rounds = EmptyRounds(_native, 2, timeout_s=FAR_S)
    abort = threading.Timer(0.05, lambda: _native.set_abort(rounds.args[0].ctx.abort_host, ABORTED, 0))
    abort.start()
    start = time.monotonic()
    run_round(_native, rounds.args[0])
    assert time.monotonic() - start < ROOM_S
    assert (rounds.failure(0).code, rounds.failure(0).peer) == (ABORTED, 0)


def test_who_leaves_is_missed_at_once() -> None:
    rounds = EmptyRounds(_native, 3, timeout_s=FAR_S)
    _native.host_run_all(rounds.args)
    _native.leave(rounds.args[2].ctx)
    start = time.monotonic()
    _native.host_run_all(rounds.args[:2])
    assert time.monotonic() - start < ROOM_S
    assert [(rounds.failure(rank).code, rounds.failure(rank).peer) for rank in (0, 1)] == [(PEER_LOST, 2)] * 2
    with pytest.raises(ValueError, match="ctx"):
        _native.leave(_native.Context())


def test_contexts_that_are_not_set() -> None:
    rounds = EmptyRounds(_native, 2)
    good = rounds.args[0]
    for name, value in [("rank", 2), ("rank", -1), ("record", 0), ("peers", [good.ctx.peers[0]])]:
        kept = getattr(good.ctx, name)
        setattr(good.ctx, name, value)
        with pytest.raises(ValueError, match=r"ctx|address"):
            run_round(_native, good)
        setattr(good.ctx, name, kept)
    with pytest.raises(ValueError, match="ctx"):
        run_round(_native, _native.CombineArgs())
    _native.host_run_all([])
    with pytest.raises(TypeError):
        _native.host_run_all([good, rounds])  # type: ignore[list-item]


@pytest.mark.parametrize("together", [False, True])
def test_ctrl_c_ends_a_round_that_cannot_finish(together: bool) -> None:
    with children("interrupted", (together,)) as (child,):
        told = child.hear()
        assert told.pop("took") < 1
        culprits = (0, 1) if together else (0,)
        assert told.pop("peer") in culprits
        assert told.pop("word of the peer") in [(ABORTED << 16) | (rank + 1) for rank in culprits]
        assert told == {"code": ABORTED, "forwarded": [2], "restored": True}
        child.process.wait(10)
        assert child.process.stderr is not None
        assert child.process.stderr.read().rstrip().endswith("KeyboardInterrupt")


def test_a_handler_that_does_not_raise_aborts_nothing() -> None:
    with children("handled", ()) as (child,):
        assert child.hear() == {"failure": False, "came": [2]}


def test_after_a_fork() -> None:
    with children("forked", ()) as (child,):
        assert child.hear()["code"] == ABORTED  # the child's
        assert child.hear() != 0  # it ended by KeyboardInterrupt


def test_why_there_is_no_gpu() -> None:
    missing = _native.cuda_missing()
    assert (missing == "") == torch.cuda.is_available()
    if missing:
        assert missing.endswith(".")
        with pytest.raises(RuntimeError):
            _native.cuda_launch(1, 32, 0, 0, _native.DispatchArgs())
