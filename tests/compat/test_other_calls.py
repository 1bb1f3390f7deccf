"""Ranks that make different calls of deep_ep: each raises Mismatch that names both, long before the deadline."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moecomm
from moecomm.compat.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from tests.conftest import Ranks
from tests.few import few

TOKENS, HIDDEN, EXPERTS = 3, 128, 6
X = torch.ones(TOKENS, HIDDEN).bfloat16()
IDX = torch.tensor([[0, 3], [1, 4], [5, 2]])
WEIGHTS = torch.ones(TOKENS, 2)
MAP = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, IDX, True)


def normal(buffer: Any, hidden: int = HIDDEN, **options: Any) -> None:
    layout = buffer.get_dispatch_layout(IDX, EXPERTS)
    given = {"topk_idx": IDX, "topk_weights": WEIGHTS} | options
    rows, *_, handle, _ = buffer.dispatch(X[:, :hidden], num_tokens_per_expert=layout[2], **given)
    buffer.combine(rows, handle)


def without_ids(buffer: Any) -> None:
    in_rank = buffer.get_dispatch_layout(IDX, EXPERTS)[3]
    normal(buffer, topk_idx=None, topk_weights=None, is_token_in_rank=in_rank)


def low_latency(buffer: Any, most: int, **options: Any) -> None:
    rows, _, handle, _, hook = buffer.low_latency_dispatch(X, IDX, most, EXPERTS, use_fp8=False, **options)
    if hook is not None:
        hook()
    buffer.low_latency_combine(rows, IDX, WEIGHTS, handle)


def elastic(buffer: Any, **options: Any) -> None:
    rows, _, _, handle, _ = buffer.dispatch(
        X, topk_idx=IDX, num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS, **options
    )
    buffer.combine(rows, handle)


def hybrid(buffer: Any, **options: Any) -> None:
    if "routing_map" not in options:
        options |= {"topk_idx": IDX, "topk_weights": WEIGHTS, "num_of_experts": EXPERTS}
    rows, *_, handle = buffer.dispatch_with_permute(hidden=X, **options)
    buffer.combine_with_unpermute(hidden=rows, handle=handle)


CALLS: dict[str, tuple[Any, Callable[[Any], None]]] = {  # by name in errors, and what else tells it from others
    "Buffer.dispatch": (Buffer, normal),
    "Buffer.dispatch, 64 columns": (Buffer, lambda buffer: normal(buffer, 64)),
    "Buffer.dispatch, worst": (Buffer, lambda buffer: normal(buffer, num_worst_tokens=9)),
    "Buffer.low_latency_dispatch": (Buffer, lambda buffer: low_latency(buffer, 4)),
    "Buffer.low_latency_dispatch, 8": (Buffer, lambda buffer: low_latency(buffer, 8, return_recv_hook=True)),
    "ElasticBuffer.dispatch": (ElasticBuffer, elastic),
    "ElasticBuffer.dispatch, expanded": (ElasticBuffer, lambda buffer: elastic(buffer, do_expand=True)),
    "ElasticBuffer.dispatch, no waits": (ElasticBuffer, lambda buffer: elastic(buffer, do_cpu_sync=False)),
    "ElasticBuffer.barrier": (ElasticBuffer, lambda buffer: buffer.barrier()),
    "HybridEPBuffer.dispatch_with_permute": (HybridEPBuffer, hybrid),
    "HybridEPBuffer.dispatch_with_permute, map": (HybridEPBuffer, lambda buffer: hybrid(buffer, routing_map=MAP)),
    "HybridEPBuffer.dispatch_with_permute, budget": (
        HybridEPBuffer,
        lambda buffer: hybrid(buffer, num_permuted_tokens=99, non_blocking=True),
    ),
}
# Once their windows are open, these are the same rounds.
ALIKE = ("HybridEPBuffer.dispatch_with_permute", "HybridEPBuffer.dispatch_with_permute, map")
PAIRS = list(itertools.combinations(CALLS, 2))


def opened(kind: Any, group: Any) -> Any:
    return kind(group, HIDDEN, TOKENS, EXPERTS // group.size()) if kind is HybridEPBuffer else kind(group)


def check_mismatch(buffer: Any, mine: str, theirs: str) -> None:
    """Make a call while another rank makes another one."""
    with pytest.raises(moecomm.Mismatch) as caught:
        CALLS[mine][1](buffer)
    for name in (mine, theirs):
        assert name.split(",")[0] in str(caught.value)


def first_calls(rank: int, group: Any) -> None:
    for pair in PAIRS:
        mine, theirs = pair if rank == 0 else pair[::-1]
        buffer = opened(CALLS[mine][0], group)
        check_mismatch(buffer, mine, theirs)
        if CALLS[mine][0] is not CALLS[theirs][0]:
            buffer = opened(CALLS[pair[0]][0], group)
        CALLS[pair[0]][1](buffer)  # a second try works


def test_first_calls(ranks: Ranks) -> None:
    ranks.run(2, first_calls)


def later_calls(rank: int, group: Any, odd: int) -> None:
    """All windows of a class are open.  Rank `odd` makes another call than the rest."""
    for pair in PAIRS:
        kinds = {CALLS[name][0] for name in pair}
        if len(kinds) > 1 or pair == ALIKE:
            continue
        buffer = opened(kinds.pop(), group)
        for name in pair:
            CALLS[name][1](buffer)
        check_mismatch(buffer, *(pair if rank != odd else pair[::-1]))
        with pytest.raises(moecomm.Closed):
            CALLS[pair[0]][1](buffer)


@pytest.mark.parametrize(("count", "odd"), few([(2, 1), (3, 0), (3, 1)], (2, 1), (3, 1)))
def test_later_calls(count: int, odd: int, ranks: Ranks) -> None:
    ranks.run(count, later_calls, odd)


def with_and_without_windows(rank: int, group: Any) -> None:
    """One rank has no window for its call yet, and the other has; then both have."""
    buffer = opened(Buffer, group)
    for _ in range(2):
        normal(buffer)
    check_mismatch(buffer, *(("Buffer.dispatch", "Buffer.low_latency_dispatch")[:: 1 if rank == 0 else -1]))
    buffer = opened(Buffer, group)
    low_latency(buffer, 4)
    normal(buffer)
    check_mismatch(buffer, *(("Buffer.dispatch", "Buffer.low_latency_dispatch")[:: 1 if rank == 0 else -1]))


def test_windows_on_one_side(ranks: Ranks) -> None:
    ranks.run(2, with_and_without_windows)


def in_a_fork(rank: int, group: Any) -> int:
    """The child has no part in its parent's calls."""
    buffer = opened(Buffer, group)
    normal(buffer)
    child = os.fork()
    if child == 0:
        try:
            normal(buffer)
        except moecomm.Closed:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    normal(buffer)
    buffer.destroy()
    return status


def test_a_forked_child(ranks: Ranks) -> None:
    assert ranks.run(2, in_a_fork) == [0, 0]
