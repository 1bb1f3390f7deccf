"""Outputs that callers keep: later rounds find room, whatever is alive, and what is alive stays as it is.

Windows grow at once, or later, or have a fixed size.  Outputs without room are copied.
"""

from __future__ import annotations

import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.backends import host
from moecomm.compat.deep_ep import Buffer
from moecomm.testing import LocalBuffers, random_sizes

from .backends.conftest import all_ranks, run_ranks
from .conftest import Ranks
from .few import few
from .keeper import Keeper, draw, window_for
from .little_room import agreeing_windows, fixed_windows, late_windows

pytestmark = pytest.mark.filterwarnings("ignore:a window of:UserWarning")
TOKENS, HIDDEN, EXPERTS, TOPK = 16, 64, 8, 2
LAYOUTS = ("flat", "expert", "batched")
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
PAIR = {"ranks": 2, "dtype": torch.bfloat16, **SIZES}
PLAIN = (1, 9, 33)  # seeds
WINDOW = window_for(3, PAIR)


@pytest.fixture(params=["grows", "late", "agrees", "fixed"])
def windows(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether windows grow."""
    how = {"grows": nullcontext, "late": late_windows, "agrees": agreeing_windows, "fixed": fixed_windows}
    with how[request.param]():
        yield request.param


@pytest.fixture
def fixed() -> Iterator[None]:
    """See fixed_windows()."""
    with fixed_windows():
        yield


@pytest.mark.parametrize("seed", few(range(40), *PLAIN))
def test_random_cases_of_which_each_rank_keeps_others(seed: int, windows: str) -> None:
    sizes = random_sizes(seed, ranks=(2, 3))
    sizes["max_tokens"] = max(8, sizes["max_tokens"])
    with LocalBuffers(**sizes, backend="host", window_bytes=window_for(1.2, sizes)) as ranks:
        keeper = Keeper(ranks, seed, 14)
        keeper.run(range(40 * seed, 40 * seed + 40), **sizes)
    if windows == "grows":
        assert keeper.outside == 0
    elif windows == "late":
        assert keeper.outside < keeper.inside
    elif windows == "agrees":
        assert keeper.inside > 10, "others are copied until all peers have mapped what was added for them"
    elif seed in PLAIN:
        assert keeper.inside > 10 and keeper.outside > 10, "some find room in the window, and some do not"


@pytest.mark.parametrize("seed", few(range(20), 4))
def test_rounds_between_domains(seed: int, windows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 4:
        monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)  # all tokens go by way of a forwarder
    sizes = random_sizes(seed, ranks=(4,))
    sizes["max_tokens"] = max(8, sizes["max_tokens"])
    with LocalBuffers(**sizes, backend="host", domain_ranks=2, window_bytes=window_for(1.5, sizes)) as ranks:
        Keeper(ranks, seed, 14).run(range(30 * seed, 30 * seed + 30), **sizes)


@pytest.mark.parametrize("seed", few(range(20), 2))
def test_verified_rounds(seed: int, windows: str) -> None:
    sizes = random_sizes(seed, ranks=(2, 3))
    sizes["max_tokens"] = max(8, sizes["max_tokens"])
    every = 1 + seed % 3
    with LocalBuffers(**sizes, backend="host", window_bytes=window_for(1.5, sizes), verify_every=every) as ranks:
        Keeper(ranks, seed, 14).run(range(30 * seed, 30 * seed + 30), **sizes)


def test_rows_that_arrive_in_chunks(windows: str) -> None:
    """Each chunk needs room of its own, beside what callers keep."""

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, backend="host", window_bytes=WINDOW, capacity_factor=0.5) as buffer:
            kept, retries = [], 0
            for step in range(24):
                given = draw(TOKENS, HIDDEN, EXPERTS, TOPK, 2 * step + group.rank)
                if step % 2:
                    given["topk_idx"] %= EXPERTS // 2  # all to the first rank
                    given["topk_idx"] = given["topk_idx"][:, :1].repeat(1, TOPK)
                routed = buffer.dispatch(**given, layout=("flat", "expert", "batched")[step % 3])
                kept.append((routed, routed.x.clone(), given))
                retries = buffer.rounds.flight.retries
            for routed, rows, given in kept:
                assert torch.equal(routed.x, rows)
                out = buffer.combine(routed.x, routed.handle, weighted=False, wire="exact")
                flat = routed.handle.layout == "flat"
                times = (given["topk_idx"] // (EXPERTS // 2)).diff(dim=1).ne(0).sum(dim=1, keepdim=True) + 1
                assert torch.equal(out, (given["x"].float() * (times if flat else TOPK)).bfloat16())
            assert retries > 0

    all_ranks(2, body)


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_what_a_kept_handle_is_for(layout: str, fixed: None) -> None:
    """Handles alone are kept, until their tables find no room; rounds with them have the same results."""

    window = window_for(2, PAIR, [layout])

    def body(group: Any) -> tuple[int, int]:
        with moecomm.Buffer(group, **SIZES, backend="host", window_bytes=window) as buffer:
            kept, inside = [], 0
            for step in range(60):
                given = draw(TOKENS, HIDDEN, EXPERTS, TOPK, 2 * step + group.rank)
                routed = buffer.dispatch(**given, layout=layout)
                out = buffer.combine(routed.x, routed.handle, wire="exact")
                kept.append((given, routed.handle, routed.src.clone(), out))
                inside += not isinstance(routed.handle.block, torch.Tensor)
                del routed
            for given, handle, src, out in kept:
                again = buffer.dispatch(given["x"], handle=handle)
                assert torch.equal(again.src, src)
                assert torch.equal(buffer.combine(again.x, handle, wire="exact"), out)
            return inside, len(kept)

    for inside, count in all_ranks(2, body):
        assert 0 < inside < count


def test_halves_of_rounds(windows: str) -> None:
    """A handle is in use before its dispatch has ended; what has begun is in the reserve."""

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, backend="host", window_bytes=WINDOW) as buffer:
            kept = []
            for step in range(24):
                given = draw(TOKENS, HIDDEN, EXPERTS, TOPK, 2 * step + group.rank)
                begun = buffer.dispatch_begin(**given, layout="expert")
                handle = begun.handle
                if kept:
                    routed, y, want = kept[step // 2]
                    assert torch.equal(buffer.combine(y, routed.handle, wire="exact"), want)
                routed = buffer.dispatch_end(begun, sync=step % 2 == 0)
                assert routed.handle is handle and len(routed.x) == handle.y_shape[0]
                y = routed.x.clone()
                want = buffer.combine(routed.x, handle, wire="exact")
                kept.append((routed, y, want))
            for routed, y, want in kept:
                count = int(routed.num_rows)
                assert torch.equal(routed.x[:count], y[:count])
                assert torch.equal(buffer.combine(y, routed.handle, wire="exact"), want)

    all_ranks(2, body)


def test_rows_of_empty_find_room_inside_or_outside(fixed: None) -> None:
    def body(group: Any) -> list[bool]:
        with moecomm.Buffer(group, **SIZES, backend="host", window_bytes=WINDOW) as buffer:
            given, kept = draw(TOKENS, HIDDEN, EXPERTS, TOPK, group.rank), []
            routed = buffer.dispatch(**given)
            want = buffer.combine(routed.x, routed.handle)
            for _ in range(30):
                y = buffer.empty(routed.handle).copy_(routed.x)
                assert torch.equal(buffer.combine(y, routed.handle), want)
                kept.append(y)
            return [buffer.rounds.session.context.in_heap(y.data_ptr()) for y in kept]

    for inside in all_ranks(2, body):
        assert inside[0] and not inside[-1]


def test_nothing_is_copied_when_windows_have_grown() -> None:
    """Peers map memory later: the first outputs are copied, without a warning, and from some step on none is."""
    given = [draw(TOKENS, HIDDEN, EXPERTS, TOPK, rank) for rank in range(2)]
    with late_windows(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with LocalBuffers(**PAIR, backend="host", window_bytes=WINDOW) as ranks:
            outside, in_heap = [], ranks.buffers[0].rounds.session.context.in_heap
            for _ in range(8):
                kept = [ranks.dispatch([{**call, "layout": layout} for call in given]) for layout in 4 * LAYOUTS]
                outside.append(sum(not in_heap(routed[0].x.data_ptr()) for routed in kept))
                for layout, routed in zip(4 * LAYOUTS, kept, strict=True):
                    if layout == "expert":
                        calls = [{"y": here.x, "handle": here.handle, "wire": "exact"} for here in routed]
                        outs = ranks.combine(calls)
                        for call, out in zip(given, outs, strict=True):
                            total = call["topk_weights"].sum(dim=1, keepdim=True)
                            torch.testing.assert_close(out.float(), call["x"].float() * total, rtol=1e-2, atol=1e-2)
                del kept, routed
    assert sum(outside) > 0 and outside[-3:] == [0, 0, 0], outside


def test_a_round_that_is_larger_than_the_window() -> None:
    """It has no room where windows have a fixed size."""

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, backend="host", window_bytes=8000, capacity_factor=0.5) as buffer:
            given = draw(TOKENS, HIDDEN, EXPERTS, TOPK, group.rank)
            kept = [buffer.dispatch(**given) for _ in range(6)]
            for _ in range(6):
                kept.append(buffer.dispatch(**given, layout="expert", max_rows=2 * TOKENS * TOPK))
                out = buffer.combine(kept[-1].x, kept[-1].handle, weighted=False)
                assert torch.equal(out, (given["x"].float() * TOPK).bfloat16())

    all_ranks(2, body)
    with fixed_windows():
        assert {type(error) for error in run_ranks(2, body)} == {moecomm.BadInput}


def _keeps(rank: int, group: Any) -> list[int]:
    with moecomm.Buffer(group, **SIZES, backend="host", timeout_s=60, window_bytes=WINDOW) as buffer:
        sizes, kept = [buffer.nbytes], []
        for layer in range(40):
            given = draw(TOKENS, HIDDEN, EXPERTS, TOPK, 2 * layer + rank)
            routed = buffer.dispatch(**given, layout=LAYOUTS[layer % 3])
            kept.append((given, routed, routed.x.clone()))
        for given, routed, rows in kept:
            assert torch.equal(routed.x, rows)
            if routed.handle.layout == "expert":
                out = buffer.combine(routed.x, routed.handle, weighted=False)
                assert torch.equal(out, (given["x"].float() * TOPK).bfloat16())
        sizes.append(buffer.nbytes)
        del routed, kept, rows, out
        buffer.release_memory()
        sizes.append(buffer.nbytes)
        buffer.restore()
        routed = buffer.dispatch(**given)
        assert len(routed.x) > 0
        return [*sizes, buffer.nbytes]


def test_windows_of_processes_grow_and_are_released(ranks: Ranks) -> None:
    for opened, grown, released, restored in ranks.run(2, _keeps):
        assert released < opened < grown == restored


def _with_few_addresses(rank: int, group: Any) -> int:
    if rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (8 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with moecomm.Buffer(group, **SIZES, backend="host", timeout_s=60) as buffer:
        given = draw(TOKENS, HIDDEN, EXPERTS, TOPK, rank)
        kept = [buffer.dispatch(**given, layout="expert") for _ in range(40)]
        for routed in kept:
            out = buffer.combine(routed.x, routed.handle, weighted=False)
            assert torch.equal(out, (given["x"].float() * TOPK).bfloat16())
        return buffer.rounds.session.extensible


def test_windows_keep_their_size_where_a_rank_has_few_addresses(ranks: Ranks) -> None:
    assert ranks.run(2, _with_few_addresses) == [0, 0]


def test_an_error_that_is_kept_takes_no_room() -> None:
    """Its traceback refers to the call, and that to memory of the round."""

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, backend="host", window_bytes=WINDOW, capacity_factor=0.5) as buffer:
            kept: list[Any] = []
            used = buffer.rounds.memory.used
            for step in range(20):
                given = draw(TOKENS, HIDDEN, EXPERTS, TOPK, step + group.rank)
                try:
                    kept.append(
                        buffer.dispatch(**{**given, "topk_idx": torch.zeros_like(given["topk_idx"])}, overflow="error")
                    )
                except moecomm.TooManyRows as error:
                    kept.append(error)
            assert all(isinstance(one, moecomm.TooManyRows) for one in kept)
            assert buffer.rounds.memory.used == used

    all_ranks(2, body)


@pytest.mark.parametrize(("rounds", "stay"), [(1, 0), (2, 1), (5, 3)])
def test_windows_of_a_callers_size(rounds: int, stay: int, fixed: None) -> None:
    """One round is enough: its outputs are then copied.  With more, some stay."""
    x, ids = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % EXPERTS
    with moecomm.Buffer("self", **SIZES, device="cpu") as buffer:
        routed = buffer.dispatch(x, ids)
        need = buffer.rounds.memory.used
        del routed
    with moecomm.Buffer("self", **SIZES, device="cpu", window_bytes=rounds * (need + 4096)) as buffer:
        kept = [buffer.dispatch(x, ids) for _ in range(8)]
        inside = [buffer.rounds.session.context.in_heap(one.x.data_ptr()) for one in kept]
        assert sum(inside) >= stay and inside == sorted(inside, reverse=True) and not inside[-1]
        for one in kept:
            assert torch.equal(
                buffer.combine(one.x, one.handle, wire="exact", weighted=False).float(), x.float() * TOPK
            )


def test_copies_are_told_once_and_how_to_avoid_them(fixed: None) -> None:
    x, ids = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    ids[:, 1] = 1

    def kept(**more: Any) -> tuple[int, list[str]]:
        with (
            warnings.catch_warnings(record=True) as told,
            moecomm.Buffer("self", **SIZES, device="cpu", **more) as buffer,
        ):
            warnings.simplefilter("always")
            alive = [buffer.dispatch(x, ids, sync=False) for _ in range(6)]
            outside = sum(not buffer.rounds.session.context.in_heap(one.x.data_ptr()) for one in alive)
        return outside, [str(one.message) for one in told]

    outside, told = kept()
    window = 0
    while outside > 0:
        assert len(told) == 1, told
        enough = int(told[0].split("window_bytes=")[1].split()[0])
        assert enough > window
        window = enough
        fewer, told = kept(window_bytes=window)
        assert fewer < outside, "the window that is named has room for one more round"
        outside = fewer
    assert told == []


def test_layers_of_training_keep_their_rows(windows: str) -> None:
    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, backend="host", window_bytes=WINDOW) as buffer:
            given = draw(TOKENS, HIDDEN, EXPERTS, TOPK, group.rank)
            x = given.pop("x").requires_grad_()
            out = x
            for _ in range(10):
                routed = ops.dispatch(buffer, out, **given)
                out = ops.combine(routed.x, routed.handle)
            out.float().sum().backward()
            total, want = given["topk_weights"].sum(dim=1, keepdim=True), x.detach().float()
            for _ in range(10):
                want = want * total
            torch.testing.assert_close(out.detach().float(), want, rtol=0.1, atol=0.1)
            assert x.grad is not None and x.grad.isfinite().all() and (x.grad != 0).all()

    all_ranks(2, body)


Steps = tuple[str, ...]
SEQUENCES: dict[str, Steps] = {
    "rows of FP8, and a zero-copy buffer": ("8:a", "z:a", "16:b", "v:a", "16:c"),
    "rows of FP8": ("8:a", "16:b", "v:a", "16:c"),
    "a zero-copy buffer": ("16:a", "z:a", "16:b", "v:a", "16:c"),
    "three, and another in the place of the second": ("16:a", "16:b", "16:c", "-:b", "16:d"),
    "the same, the first in FP8": ("8:a", "16:b", "16:c", "-:b", "16:d"),
    "results that replace others, as in DeepEP's test": tuple(
        f"{kind}:a"
        for kind in ("16", "16", "r", "z", "8", "z", "8", "8", "z", "h", "r", "z", "8", "8", "z", "8", "z", "16", "z")
    ),
    "hooks": ("h:a", "h:b", "16:c", "v:a", "h:d", "z:b", "h:e", "c:d"),
    "many": tuple(f"{kind}:{slot}" for slot in "abcdefgh" for kind in ("8", "z") + ("h",) * (slot in "dg")),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_low_latency_results(name: str, windows: str) -> None:
    """Views of rows, handles and zero-copy buffers, as tests of DeepEP, UCCL and NIXL keep them."""

    def body(group: Any) -> None:
        buffer, experts = Buffer(group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=EXPERTS // 2), EXPERTS
        given = draw(TOKENS, 256, experts, TOPK, group.rank)
        x, ids, weights = given["x"], given["topk_idx"], given["topk_weights"]
        kept: dict[str, Any] = {}
        rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

        def dispatch(slot: str, fp8: bool, hook: bool) -> None:
            recv, count, handle, _, wait = buffer.low_latency_dispatch(
                x, ids, TOKENS, experts, use_fp8=fp8, return_recv_hook=hook
            )
            if wait is not None:
                wait()
            kept[slot] = recv, count, handle
            recv = recv[0] if fp8 else recv
            used = torch.arange(recv.shape[1]) < count[:, None]
            rows[slot] = recv.view(torch.uint8)[used].clone(), used

        def combine(slot: str, zero_copy: bool) -> None:
            _, count, handle = kept[slot]
            y = torch.zeros(handle.native.y_shape, dtype=torch.bfloat16)
            used = torch.arange(y.shape[1]) < count[:, None]
            y[used] = 1
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
            out, _, _ = buffer.low_latency_combine(y, ids, weights, handle, zero_copy=zero_copy)
            torch.testing.assert_close(out.float(), weights.sum(dim=1, keepdim=True).expand(-1, 256), rtol=1e-2, atol=0)

        steps: dict[str, Callable[[str], Any]] = {
            "8": lambda slot: dispatch(slot, True, False),
            "16": lambda slot: dispatch(slot, False, False),
            "h": lambda slot: dispatch(slot, False, True),
            "v": lambda slot: kept.update(
                {slot: kept[slot][0][0] if isinstance(kept[slot][0], tuple) else kept[slot][0]}
            ),
            "-": lambda slot: (kept.pop(slot), rows.pop(slot)),
            "r": lambda slot: (
                kept.update(r=kept[slot][0]),
                rows.update(r=rows[slot]),
            ),  # its rows, in a name of their own
            "c": lambda slot: combine(slot, False),
            "z": lambda slot: combine(slot, True),
        }
        for step in SEQUENCES[name]:
            kind, slot = step.split(":")
            steps[kind](slot)
            for other, (want, used) in rows.items():
                alive = kept[other][0] if isinstance(kept[other], tuple) else kept[other]
                alive = alive[0] if isinstance(alive, tuple) else alive
                assert torch.equal(alive.view(torch.uint8)[used], want), (step, other)

    all_ranks(2, body)
