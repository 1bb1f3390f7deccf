"""Windows of GPUs that grow by agreement ahead of a round that takes more than their reserve."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing import LocalBuffers

from ..backends.conftest import run_ranks
from ..conftest import Ranks
from ..wide_rounds import Kind, Sent, random_rounds

pytestmark = pytest.mark.filterwarnings("ignore:a window of:UserWarning")

KINDS: list[Kind] = [("expert", (400,)), ("flat", (3,)), ("batched", (40,))]  # each is a few kernels
SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 7, "topk": 2, "max_tokens": 48, "timeout_s": 30}


def _random(rank: int, group: Any, seeds: list[int]) -> list[tuple[int, int, int]]:
    os.environ["MOECOMM_WINDOW"] = "vmm"
    found = []
    for seed in seeds:
        with moecomm.Buffer(group, **SIZES, backend="lsa") as buffer:
            opened = buffer.nbytes
            counted = random_rounds(buffer, seed, 16, KINDS)
            found.append((opened, buffer.nbytes, buffer.rounds.flight.rounds - counted[-1]))
    return found


@pytest.mark.gpu2
@pytest.mark.timeout(400)
def test_random_widths_beside_kept_outputs(gpu_ranks: Ranks) -> None:
    for found in gpu_ranks.run(2, _random, [1, 2, 3]):
        assert any(grown > opened for opened, grown, _ in found)


def _first_round(rank: int, group: Any) -> list[tuple[int, int, int]]:
    """The first round needs more than the window has; a later one of the same kind makes one round, natively."""
    os.environ["MOECOMM_WINDOW"] = "vmm"
    found = []
    for keep in (1, 2, 4):
        with moecomm.Buffer(group, **{**SIZES, "max_tokens": 600}, backend="lsa") as buffer:
            sent, held, rounds, sizes_after = Sent(buffer, 3, (400,), 600), [], [], []
            for _ in range(keep + 4):
                before = buffer.rounds.flight.rounds
                held.append(buffer.dispatch(**sent.given(rank, buffer.device), sync=True))
                rounds.append(buffer.rounds.flight.rounds - before)
                sizes_after.append(buffer.nbytes)
                held = held[-keep:]
                for routed in held:
                    sent.check(routed)
            assert rounds == [4, *[1] * (keep + 3)], rounds
            found.append((rounds[0], sizes_after[0], sizes_after[-1]))
    return found


@pytest.mark.gpu2
@pytest.mark.timeout(400)
def test_a_first_round_that_is_larger_than_the_window(gpu_ranks: Ranks) -> None:
    gpu_ranks.run(2, _first_round)


def _graphs(rank: int, group: Any) -> None:
    """A graph captured before the window grows, and one after, with eager outputs beside them that are kept."""
    os.environ["MOECOMM_WINDOW"] = "vmm"
    with moecomm.Buffer(group, **SIZES, backend="lsa") as buffer:
        graphs, kept = [], []

        def capture(sent: Sent) -> None:
            given = sent.given(rank, buffer.device)
            eager = buffer.dispatch(**given, layout="expert", sync=False)
            buffer.check()
            sent.check(eager)
            del eager
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                routed = buffer.dispatch(**given, layout="expert", sync=False)
                out = buffer.combine(routed.x, routed.handle, weighted=False, wire="exact")
            graphs.append((graph, given, routed, out, sent))

        def replay() -> None:
            for graph, given, routed, out, sent in graphs:
                out.zero_()
                routed.x.zero_()
                graph.replay()
                buffer.check()
                sent.check(routed)
                assert torch.equal(out, (given["x"].float() * buffer.topk).bfloat16())
            for sent, routed in kept:
                sent.check(routed)

        capture(Sent(buffer, 1, ()))
        replay()
        for step, width in enumerate((400, 900)):
            for at in range(3):
                sent = Sent(buffer, 10 * step + at + 2, (width,))
                kept.append((sent, buffer.dispatch(**sent.given(rank, buffer.device), sync=False)))
                buffer.check()
                replay()
            capture(Sent(buffer, step + 50, (width,)))
            replay()
        wider = Sent(buffer, 70, (3000,)).given(rank, buffer.device)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(moecomm.BadInput, match="window_bytes"), torch.cuda.graph(graph):
            buffer.dispatch(**wider, layout="batched", sync=False)


@pytest.mark.gpu2
@pytest.mark.timeout(400)
def test_graphs_beside_windows_that_grow(gpu_ranks: Ranks) -> None:
    gpu_ranks.run(2, _graphs)


def _differs(rank: int, group: Any, what: str) -> str:
    """Rank 1 makes another call, or none, while rank 0 needs a larger window."""
    os.environ["MOECOMM_WINDOW"] = "vmm"
    with moecomm.Buffer(group, **{**SIZES, "timeout_s": 5}, backend="lsa") as buffer:
        wide = Sent(buffer, 5, (2000,)).given(rank, buffer.device)
        narrow = {**wide, "extras": ()}
        if rank == 0:
            with pytest.raises(moecomm.MoecommError) as caught:
                buffer.dispatch(**wide, sync=True)
        elif what == "narrow":
            with pytest.raises(moecomm.MoecommError) as caught:
                buffer.dispatch(**narrow, sync=True)
        elif what == "closes":
            return "closed"
        elif what == "fails":
            with pytest.raises(moecomm.BadInput):
                buffer.dispatch(**{**wide, "topk_idx": wide["topk_idx"].float()}, sync=True)
            with pytest.raises(moecomm.MoecommError) as caught:
                buffer.dispatch(**wide, sync=True)
        else:
            buffer.abort()
            with pytest.raises(moecomm.MoecommError) as caught:
                buffer.dispatch(**wide, sync=True)
        return type(caught.value).__name__


@pytest.mark.gpu2
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("narrow", "Mismatch", "Mismatch"),
        ("closes", "PeerLost", "closed"),
        ("fails", "OutOfStep", "OutOfStep"),
        ("aborts", "Aborted", "Aborted"),
    ],
)
def test_a_rank_that_does_something_else(gpu_ranks: Ranks, what: str, first: str, second: str) -> None:
    assert gpu_ranks.run(2, _differs, what) == [first, second]


@pytest.mark.gpu1
def test_virtual_ranks_have_the_rows_at_once() -> None:
    with LocalBuffers(ranks=2, **SIZES, backend="lsa", device=0) as ranks:
        kept = []
        for step, width in enumerate((400, 400, 900, 400, 900)):
            sent = Sent(ranks.buffers[0], step, (width,))
            routed = ranks.dispatch([sent.given(rank, ranks.device) for rank in range(2)])
            ranks.check()
            kept.append((sent, routed))
            for one, all_of_it in kept:
                for here in all_of_it:
                    one.check(here)


@pytest.mark.gpu2
@pytest.mark.timeout(200)
def test_threads_with_a_gpu_each_agree() -> None:
    def body(group: Any) -> list[int]:
        torch.cuda.set_device(group.rank)
        with moecomm.Buffer(group, **SIZES, backend="lsa", device=torch.device("cuda", group.rank)) as buffer:
            return random_rounds(buffer, 4, 10, KINDS)

    found = run_ranks(2, body)
    assert all(isinstance(one, list) for one in found), found
