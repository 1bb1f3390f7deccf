"""Rows that have no room in the window of a GPU: rounds in chunks, drops in graphs, and errors where nothing waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.dispatch.routed import ChunkedHandle
from moecomm.testing import LocalBuffers

from ..conftest import Ranks

EXPERTS, TOPK, TOKENS = 12, 3, 200
SIZES: dict[str, Any] = {"hidden": 512, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "timeout_s": 20}


def call(rank: int, first: int = EXPERTS) -> dict[str, Any]:
    """Make tokens that all want the first expert, and others; or experts among the `first` alone, those of rank 0."""
    g = torch.Generator().manual_seed(rank)
    if first < EXPERTS:
        ids = torch.rand(TOKENS, first, generator=g).argsort(dim=1)[:, :TOPK]
    else:
        ids = torch.rand(TOKENS, EXPERTS - 1, generator=g).argsort(dim=1)[:, :TOPK] + 1
        ids[:, 0] = 0
    return {
        "x": torch.randn(TOKENS, 512, generator=g).bfloat16().cuda(),
        "topk_idx": ids.cuda(),
        "topk_weights": torch.rand(TOKENS, TOPK, generator=g).cuda(),
    }


def without_room(given: dict[str, Any], quota: int, columns: int = TOPK) -> torch.Tensor:
    """Return topk_idx without the entries that are dropped: those of the first columns are all for rank 0, which takes
    `quota` of them from each rank.
    """
    ids = given["topk_idx"].clone()
    order = given["topk_weights"][:, :columns].flatten().argsort(descending=True, stable=True)[quota:]
    ids[order // columns, order % columns] = -1
    return ids


def rounds(
    group: Any, given: dict[str, Any], factor: float, layout: str, options: dict[str, Any]
) -> tuple[bool, list[Any]]:
    """Run a dispatch that waits, a repeat, combines, and operators with gradients; return what they give."""
    with moecomm.Buffer(group, **SIZES, backend="lsa", capacity_factor=factor) as buffer:
        routed = buffer.dispatch(**given, layout=layout, sync=True, **options)  # type: ignore[call-overload]
        y = (routed.x.float() * 2).bfloat16()
        found = [buffer.combine(y, routed.handle), buffer.combine(y, routed.handle, wire="exact")]
        again = buffer.dispatch(given["x"] * 2, handle=routed.handle, **options)
        found.append(buffer.combine((again.x.float() * 2).bfloat16(), routed.handle))
        found += [routed.tokens_per_expert.clone(), routed.num_rows.clone()]
        chunked = isinstance(routed.handle, ChunkedHandle)
        del routed, again  # the window has room for two rounds, and the operators need both
        x = given["x"].clone().requires_grad_()
        sent = ops.dispatch(buffer, x, given["topk_idx"], given["topk_weights"], layout=layout, overflow="chunks")  # type: ignore[arg-type]
        out = ops.combine(sent.x * 3, sent.handle)
        out.float().square().sum().backward()
        buffer.check()
        assert x.grad is not None
        found += [sent.tokens_per_expert, sent.num_rows, out.detach(), x.grad]
        return chunked, [tensor.cpu() for tensor in found]


@pytest.mark.gpu1
@pytest.mark.timeout(300)
@pytest.mark.parametrize("quantize", [None, "fp8", "mxfp8"])
@pytest.mark.parametrize(("layout", "factor"), [("expert", 0.5), ("flat", 0.2), ("batched", 0.8)])
def test_chunks_of_one_rank(layout: str, factor: float, quantize: Any) -> None:
    options = {"quantize": quantize}
    at_once, want = rounds("self", call(0), math.inf, layout, options)
    chunked, got = rounds("self", call(0), factor, layout, options)
    assert (at_once, chunked) == (False, True)
    for first, second in zip(want, got, strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu1
@pytest.mark.timeout(300)
def test_graphs_drop_and_late_errors_are_told() -> None:
    given = call(0)
    with moecomm.Buffer("self", **SIZES, backend="lsa", capacity_factor=0.5) as buffer:

        def round_() -> tuple[torch.Tensor, torch.Tensor]:
            routed = buffer.dispatch(**given, overflow="drop")
            assert routed.dropped is not None
            return buffer.combine(routed.x, routed.handle), routed.dropped

        want, dropped = round_()
        buffer.check()
        assert int(dropped) == TOKENS * TOPK // 2
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out, of_graph = round_()
        for turn in (1, -1):
            given["x"].mul_(turn)
            graph.replay()
            buffer.check()
            assert torch.equal(out, want * turn) and int(of_graph) == int(dropped)
        buffer.dispatch(**given)
        with pytest.raises(moecomm.TooManyRows):
            buffer.check()
        buffer.dispatch(**given)  # leaves an error that the next call, which waits, is not to take for its own
        torch.cuda.synchronize()
        with pytest.raises(moecomm.TooManyRows):
            buffer.dispatch(**given, sync=True)


INNER = 64  # I, of an expert
Layers = tuple[bool, torch.Tensor, list[torch.Tensor]]


def experts(rank: int, local: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    shapes = {"w13": (local, 2 * INNER, 512), "w2": (local, 512, INNER)}
    return {
        name: torch.randn(shape, generator=g).mul(shape[2] ** -0.5).bfloat16().cuda() for name, shape in shapes.items()
    }


def layers(group: Any, rank: int, factor: float, fused: bool, first: int = EXPERTS) -> Layers:
    """Run layers that wait.  Return whether the first took several rounds, its output, and values with gradients."""
    with moecomm.Buffer(group, **SIZES, backend="lsa", capacity_factor=factor) as buffer:
        given = {**call(rank, first), **experts(rank, len(buffer.local_experts))}
        free, made = buffer.rounds.memory.arena.largest_free, buffer.rounds.turn.made
        out = buffer.moe(**given, bias=given["x"], fused=fused, overflow="chunks")
        parts = buffer.rounds.turn.made > made + 2
        assert buffer.rounds.memory.arena.largest_free == free
        leaves = {name: given[name].clone().requires_grad_() for name in ("x", "topk_weights", "w13", "w2")}
        again = ops.moe(buffer, topk_idx=given["topk_idx"], **leaves, fused=fused, overflow="chunks")
        again.float().square().sum().backward()
        buffer.check()
        grads = [leaf.grad.cpu() for leaf in leaves.values() if leaf.grad is not None]
        assert len(grads) == 4
        return parts, out.cpu(), [again.detach().cpu(), *grads]


def compare(want: Layers, got: Layers) -> None:
    """Outputs have the bits of one round, where moecomm's GEMMs run; torch's, in backward passes, are close."""
    if torch.cuda.get_device_capability() == (9, 0):
        assert torch.equal(want[1].view(torch.int16), got[1].view(torch.int16))
        assert torch.equal(want[2][0].view(torch.int16), got[2][0].view(torch.int16))
    for one, other in zip((want[1], *want[2]), (got[1], *got[2]), strict=True):
        torch.testing.assert_close(other.float(), one.float(), rtol=2**-6, atol=2**-6 * float(one.float().abs().max()))


@pytest.mark.gpu1
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_in_parts(fused: bool) -> None:
    want, got = layers("self", 0, math.inf, fused), layers("self", 0, 0.4, fused)
    assert (want[0], got[0]) == (False, True)
    compare(want, got)


@pytest.mark.gpu1
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("columns", [2, TOPK])
def test_layers_of_virtual_ranks_drop_and_raise(columns: int, fused: bool) -> None:
    """Two ranks: all tokens have two experts of the first, or all of theirs.  Entries that are dropped are as if they
    had never been.
    """
    with LocalBuffers(2, **SIZES, backend="lsa", device=0, capacity_factor=1.0) as ranks:
        calls = [{**call(rank), **experts(rank, EXPERTS // 2), "fused": fused} for rank in range(2)]
        for rank, given in enumerate(calls):
            last = 2 if columns == TOPK else 6 + rank
            given["topk_idx"] = torch.tensor([0, 1, last]).expand(TOKENS, 3).contiguous().cuda()
        quota = TOKENS * TOPK // 2  # of the rows of a rank
        kept = [without_room(given, quota, columns) for given in calls]
        counts = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2)]
        room = [{**given, "overflow": "drop", "dropped": n} for given, n in zip(calls, counts, strict=True)]
        outs = ranks.moe(room)
        ranks.check()
        assert [int(n) for n in counts] == 2 * [columns * TOKENS - quota]
        wanted = ranks.moe([{**given, "topk_idx": ids} for given, ids in zip(calls, kept, strict=True)])
        ranks.check()
        assert all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True))
        ranks.moe(calls)
        for buffer in ranks.buffers:
            with pytest.raises(moecomm.TooManyRows) as caught:
                buffer.check()
            assert (caught.value.rank, caught.value.rows, caught.value.room) == (0, 2 * columns * TOKENS, TOKENS * TOPK)
            buffer.check()
        outs = ranks.moe(room)
        ranks.check()
        assert all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True))


@pytest.mark.gpu1
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fused", [False, True])
def test_a_graph_of_a_layer_drops_and_does_not_wait(fused: bool) -> None:
    given = {**call(0), **experts(0, EXPERTS), "fused": fused}
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    with moecomm.Buffer("self", **SIZES, backend="lsa", capacity_factor=0.5) as buffer:
        want = buffer.moe(**given, overflow="drop", dropped=count).clone()
        buffer.check()
        assert int(count) == TOKENS * TOPK // 2
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = buffer.moe(**given, overflow="drop", dropped=count)
        for _ in range(2):
            count.zero_()
            out.zero_()
            graph.replay()
            buffer.check()
            assert torch.equal(out, want) and int(count) == TOKENS * TOPK // 2
        given["topk_idx"][:] = -1
        graph.replay()
        buffer.check()
        assert int(count) == 0 and not bool(out.any())


@pytest.mark.gpu1
@pytest.mark.timeout(300)
def test_a_layer_does_not_wait_in_a_capture() -> None:
    given = {**call(0), **experts(0, EXPERTS), "fused": False}  # nothing is measured
    with moecomm.Buffer("self", **SIZES, backend="lsa", capacity_factor=0.5) as buffer:
        want = buffer.moe(**given, overflow="chunks")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(moecomm.BadInput) as caught:
            buffer.moe(**given, overflow="chunks")
        assert caught.value.argument == "overflow"
        torch.testing.assert_close(buffer.moe(**given, overflow="chunks"), want, rtol=0, atol=0)
        buffer.moe(**given)  # by default nothing waits
        with pytest.raises(moecomm.TooManyRows):
            buffer.check()
        buffer.moe(**given)  # leaves an error that the next call, which waits, is not to take for its own
        torch.cuda.synchronize()
        with pytest.raises(moecomm.TooManyRows):
            buffer.moe(**given, overflow="chunks")


def _all_to_one(rank: int, group: Any, first: int) -> str:
    for layout, factor in (("expert", 1.0), ("flat", 0.7), ("batched", 1.0)):
        at_once, want = rounds(group, call(rank, first), math.inf, layout, {})
        chunked, got = rounds(group, call(rank, first), factor, layout, {})
        assert (at_once, chunked) == (False, True), layout
        assert all(torch.equal(first, second) for first, second in zip(want, got, strict=True)), layout
    for fused in (False, True):
        want = layers(group, rank, math.inf, fused, first)
        got = layers(group, rank, 1.0, fused, first)
        assert (want[0], got[0]) == (False, True), fused
        compare(want, got)
    return "done"


@pytest.mark.gpu2
@pytest.mark.timeout(900)
@pytest.mark.parametrize("entries", ["one", "all"])
def test_chunks_of_several_ranks(gpu_ranks: Ranks, entries: str) -> None:
    """One entry of each token is for rank 0, beside random others; or all of its entries are."""
    count = min(4, torch.cuda.device_count())
    assert gpu_ranks.run(count, _all_to_one, EXPERTS // count if entries == "all" else EXPERTS) == ["done"] * count


def _raises_too_many_rows(buffer: moecomm.Buffer) -> None:
    with pytest.raises(moecomm.TooManyRows) as caught:
        buffer.check()
    found = caught.value.rank, caught.value.rows, caught.value.room
    assert found == (0, buffer.num_ranks * TOKENS * TOPK, TOKENS * TOPK)


def _all_at_rank_0(rank: int, group: Any) -> str:
    quota = TOKENS * TOPK // group.size()
    given = call(rank, EXPERTS // group.size())
    fitting = {**given, "topk_idx": without_room(given, quota)}
    with moecomm.Buffer(group, **SIZES, backend="lsa", capacity_factor=1.0) as buffer:
        for _ in range(2):
            routed = buffer.dispatch(**given, overflow="drop")
            assert routed.dropped is not None
            out, dropped, rows = buffer.combine(routed.x, routed.handle), int(routed.dropped), int(routed.num_rows)
            assert (dropped, rows) == (TOKENS * TOPK - quota, 0 if rank else TOKENS * TOPK)
            del routed
            fits = buffer.dispatch(**fitting)
            assert torch.equal(out, buffer.combine(fits.x, fits.handle))
            del fits
            buffer.check()
            buffer.dispatch(**given)  # waits for nothing
            _raises_too_many_rows(buffer)
        weights, count = experts(rank, len(buffer.local_experts)), torch.zeros(1, dtype=torch.int32, device="cuda")
        for fused in (False, True):
            out = buffer.moe(**given, **weights, fused=fused, overflow="drop", dropped=count.zero_())
            assert torch.equal(out, buffer.moe(**fitting, **weights, fused=fused))
            buffer.check()
            assert int(count) == TOKENS * TOPK - quota
            buffer.moe(**given, **weights, fused=fused)
            _raises_too_many_rows(buffer)
    return "done"


@pytest.mark.gpu2
@pytest.mark.timeout(300)
def test_all_entries_at_one_rank_are_dropped_or_raise(gpu_ranks: Ranks) -> None:
    count = min(4, torch.cuda.device_count())
    assert gpu_ranks.run(count, _all_at_rank_0) == ["done"] * count


MANY = 64  # virtual ranks, of two blocks each


def skewed(times: int, tokens: int) -> list[dict[str, Any]]:
    """Make tokens of MANY ranks: rank 0 gets so many times the mean, and the others share what is left."""
    g = torch.Generator().manual_seed(times)
    number = torch.arange(MANY * tokens)
    owner = torch.where(number % MANY < times, 0, 1 + number % (MANY - 1)).view(MANY, tokens)
    return [
        {
            "x": torch.randn(tokens, 64, generator=g).bfloat16().cuda(),
            "topk_idx": torch.stack([2 * mine, 2 * mine + 1], dim=1).cuda(),
            "topk_weights": torch.ones(tokens, 2).cuda(),
            "num_sms": 2,
        }
        for mine in owner
    ]


@pytest.mark.gpu1
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["expert", "flat"])
def test_skew_of_64_virtual_ranks(layout: str) -> None:
    """Routing from even to all tokens at one rank: with room all tokens come back, else each rank drops its part."""
    tokens, copies = 32, 1 if layout == "flat" else 2
    sizes = {"hidden": 64, "num_experts": 2 * MANY, "topk": 2, "max_tokens": tokens, "timeout_s": 60}
    roomy, tight = (
        LocalBuffers(MANY, **sizes, backend="lsa", device=0, capacity_factor=factor) for factor in (math.inf, 1.5)
    )
    with roomy, tight:
        room = tight.buffers[0].rounds.settings.capacity_rows(layout)
        for times in (1, 4, 16, 64):
            calls = [{**given, "layout": layout} for given in skewed(times, tokens)]
            routed = roomy.dispatch(calls)
            outs = roomy.combine([{"y": here.x, "handle": here.handle, "num_sms": 2} for here in routed])
            roomy.check()
            assert all(torch.equal(out, copies * given["x"]) for out, given in zip(outs, calls, strict=True))
            arrived = [int(here.num_rows) for here in routed]
            assert (arrived[0], sum(arrived)) == (times * tokens * copies, MANY * tokens * copies)
            del routed, outs
            here, *_ = kept = tight.dispatch([{**given, "overflow": "drop"} for given in calls])
            tight.check()
            wanted = [(given["topk_idx"][:, 0] // 2).bincount(minlength=MANY) * copies for given in calls]
            lost = [int((rows - room // MANY).clamp(min=0).sum()) * 2 // copies for rows in wanted]
            assert [int(one.dropped) for one in kept if one.dropped is not None] == lost  # entries, two a row of flat
            assert int(here.num_rows) == sum(min(int(rows[0]), room // MANY) for rows in wanted)
            del here, kept
            if times * tokens * copies > room:
                tight.dispatch(calls)  # waits for nothing
                for buffer in tight.buffers:
                    with pytest.raises(moecomm.TooManyRows) as caught:
                        buffer.check()
                    assert (caught.value.rank, caught.value.rows, caught.value.room) == (0, arrived[0], room)
        assert arrived[0] > room
