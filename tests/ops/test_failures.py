"""A backward pass is as collective as a forward pass, and ends as well when a peer is not there for it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from tests.ops.ranks import case

from ..live import ROOM_S


def _until_a_peer_dies(rank: int, group: Any, whole: bool) -> tuple[str, int, float]:
    c = case(2, seed=1)
    with c.buffer(group) as buffer:
        x = c.x[rank].clone().requires_grad_()
        routing = (c.topk_idx[rank], c.topk_weights[rank])
        if whole:
            experts = (torch.ones(4, n, m) for n, m in ((32, c.hidden), (c.hidden, 16)))
            out = ops.moe(buffer, x, *routing, *experts)
        else:
            routed = ops.dispatch(buffer, x, *routing)
            out = ops.combine(routed.x * 2, routed.handle)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            out.sum().backward()
        except moecomm.PeerLost as error:
            assert x.grad is None, "a gradient of a round that failed"
            return "PeerLost", error.peer, time.monotonic() - begin
        raise AssertionError("the backward pass of one rank alone came to an end")


@pytest.mark.parametrize("whole", [False, True])
def test_a_backward_pass_without_a_peer_names_it(ranks: Any, whole: bool) -> None:
    ranks.start(2, _until_a_peer_dies, whole)
    ((rank, result),) = ranks.results(1).items()
    assert rank == 0 and not isinstance(result, BaseException), result
    name, peer, seconds = result
    assert (name, peer) == ("PeerLost", 1) and seconds < ROOM_S
