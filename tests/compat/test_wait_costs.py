"""deep_ep's statistics of waits: they add up over calls, and show the rank that is late."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import moecomm
from moecomm.compat.deep_ep import Buffer
from moecomm.observe.stats import Stats
from moecomm.observe.stats.counters import Beside

from ..backends.conftest import all_ranks

RANKS, LATE, TOKENS, EXPERTS = 3, 1, 4, 6
X = torch.ones(TOKENS, 128, dtype=torch.bfloat16)
IDX = torch.arange(TOKENS * 2).view(TOKENS, 2) % EXPERTS
WEIGHTS = torch.ones(TOKENS, 2)


def waits() -> torch.Tensor:
    return torch.zeros(RANKS, dtype=torch.int64)


@pytest.mark.parametrize("hook", [False, True])
def test_the_waits_of_a_call_are_added(hook: bool) -> None:
    """The late rank calls when the others have been in their rounds for half a second."""
    begun = [threading.Event() for _ in range(RANKS)]

    def body(group: Any) -> list[torch.Tensor]:
        buffer = Buffer(group, low_latency_mode=True)
        rank, dispatched, combined = buffer.rank, waits() + 5, waits() + 7

        def late() -> None:
            begun[rank].set()
            if rank == LATE:
                assert all(event.wait(30) for event in begun)
                time.sleep(0.5)

        def dispatch(stats: torch.Tensor | None) -> Any:
            *found, receive = buffer.low_latency_dispatch(
                X, IDX, TOKENS, EXPERTS, dispatch_wait_recv_cost_stats=stats, use_fp8=False, return_recv_hook=hook
            )
            if receive is not None:
                receive()
            return found

        recv_x, _, handle, _ = dispatch(None)  # windows are open
        own = buffer._pool.batched(X.device, 128, EXPERTS, 2, TOKENS, torch.bfloat16).rounds
        late()
        recv_x, _, handle, _ = dispatch(dispatched)
        assert int(dispatched[rank]) == 5, "a rank does not wait for itself"
        own.check()
        begun[rank] = threading.Event()
        buffer.low_latency_combine(recv_x, IDX, WEIGHTS, handle, combine_wait_recv_cost_stats=combined)
        words = own.session.read_counters()
        assert words is not None
        counted = Stats.of_words(words, RANKS, EXPERTS // RANKS, Beside(0, 0)).wait_ns
        assert torch.all(dispatched - 5 <= counted[0] + counted[1])
        assert torch.all(combined - 7 <= counted[0] + counted[2])
        buffer.destroy()
        return [dispatched, combined]

    found = all_ranks(RANKS, body)
    for rank, (dispatched, combined) in enumerate(found):
        assert (combined >= 7).all()
        if rank != LATE:
            assert int(dispatched[LATE]) > 100_000_000
            assert int(dispatched.argmax()) == LATE


LONG = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("bad", [LONG[:2].int(), LONG, LONG[:2].to("meta"), 7])
def test_what_waits_cannot_be_added_to_is_refused(bad: Any) -> None:
    def body(group: Any) -> None:
        buffer = Buffer(group, low_latency_mode=True)
        recv_x, _, handle, *_ = buffer.low_latency_dispatch(X, IDX, TOKENS, EXPERTS, use_fp8=False)
        with pytest.raises(moecomm.BadInput, match="dispatch_wait_recv_cost_stats"):
            buffer.low_latency_dispatch(X, IDX, TOKENS, EXPERTS, dispatch_wait_recv_cost_stats=bad)
        with pytest.raises(moecomm.BadInput, match="combine_wait_recv_cost_stats"):
            buffer.low_latency_combine(recv_x, IDX, WEIGHTS, handle, combine_wait_recv_cost_stats=bad)
        buffer.destroy()

    all_ranks(2, body)
