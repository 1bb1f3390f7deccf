"""Handlers of signals run while the main thread waits in a round, and what they raise ends it on all ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm

from .conftest import Ranks
from .live import FAR_S, ROOM_S

SIZES: dict[str, Any] = {
    "hidden": 64,
    "num_experts": 4,
    "topk": 2,
    "max_tokens": 64,
    "backend": "host",
    "timeout_s": FAR_S,
}


class Stopped(Exception):
    """The exception that a service raises in its handler of SIGTERM."""


def call(**options: Any) -> dict[str, Any]:
    return {"x": torch.ones(4, 64).bfloat16(), "topk_idx": torch.arange(8).view(4, 2) % 4, **options}


def at_a_round(buffer: moecomm.Buffer, number: int, handler: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Sends ourselves the signal once a round waits.  When it was sent, and when its handler ran."""
    sent: list[float] = []
    ran: list[float] = []

    def handle(_number: int, _frame: Any) -> None:
        ran.append(time.monotonic())
        handler()

    def send() -> None:
        while not buffer.rounds.turn.running:
            time.sleep(0.001)
        time.sleep(0.1)  # it waits, and has for longer than a wait spins
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    signal.signal(number, handle)
    threading.Thread(target=send).start()
    return sent, ran


def raise_stopped() -> None:
    raise Stopped


def _raising(rank: int, group: Any, number: int, threads: int) -> str:
    buffer = moecomm.Buffer(group, **SIZES)
    if rank == 0:
        sent, ran = at_a_round(buffer, number, raise_stopped)
        with pytest.raises(Stopped):
            buffer.dispatch(**call(num_sms=threads))
        assert ran[0] >= sent[0] and time.monotonic() - sent[0] < ROOM_S
    dist.barrier()
    begin = time.monotonic()
    with pytest.raises(moecomm.Aborted):
        buffer.dispatch(**call())
    with pytest.raises(moecomm.Aborted):
        buffer.check()
    assert time.monotonic() - begin < ROOM_S
    buffer.close()
    return "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM, signal.SIGINT])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_handler_raises_ends_the_round(ranks: Ranks, number: int, threads: int) -> None:
    assert ranks.run(2, _raising, number, threads) == ["stopped"] * 2


def _returning(rank: int, group: Any, handled: Any) -> str:
    """Rank 1 comes to the round when the handler of rank 0, which waits in it, has run."""
    with moecomm.Buffer(group, **SIZES) as buffer:
        dist.barrier()
        if rank == 0:
            sent, ran = at_a_round(buffer, signal.SIGUSR1, handled.set)
        else:
            assert handled.wait(ROOM_S)
        routed = buffer.dispatch(**call())
        if rank == 0:
            assert ran[0] >= sent[0]
        out = buffer.combine(routed.x, routed.handle)
        assert torch.equal(out, 2 * call()["x"])
    return "went on"


def test_a_handler_that_returns_disturbs_nothing(ranks: Ranks) -> None:
    assert ranks.run(2, _returning, ranks._context.Event()) == ["went on"] * 2


def _closing(rank: int, group: Any) -> str:
    buffer = moecomm.Buffer(group, **SIZES)
    if rank == 0:
        at_a_round(buffer, signal.SIGTERM, buffer.close)
        with pytest.raises(moecomm.Aborted):
            buffer.dispatch(**call())
        assert buffer.closed
        with pytest.raises(moecomm.Closed):
            buffer.dispatch(**call())
    dist.barrier()
    if rank == 1:
        with pytest.raises(moecomm.Aborted):
            buffer.dispatch(**call())
        buffer.close()
    return "closed"


def test_a_handler_may_close(ranks: Ranks) -> None:
    """The memory goes when the round that it has interrupted has ended."""
    assert ranks.run(2, _closing) == ["closed"] * 2


def _calling(rank: int, group: Any) -> str:
    with moecomm.Buffer(group, **SIZES) as buffer:
        dist.barrier()
        refused: list[str] = []

        def attempt() -> None:
            try:
                buffer.dispatch(**call())
            except moecomm.ConcurrentCall as error:
                refused.append(str(error))

        if rank == 0:
            at_a_round(buffer, signal.SIGUSR1, attempt)
        else:
            time.sleep(0.5)
        routed = buffer.dispatch(**call())
        assert len(refused) == (1 if rank == 0 else 0)
        if rank == 1:
            buffer.rounds.count_rejected()  # as if the call had failed here as well: the ranks stay in step
        assert torch.equal(buffer.combine(routed.x, routed.handle), 2 * call()["x"])
    return "refused"


def test_a_handler_may_not_call(ranks: Ranks) -> None:
    assert ranks.run(2, _calling) == ["refused"] * 2
