"""Rows that have no room in the window: rounds in chunks, with the bits of one round; errors where nothing waits."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native, backends
from moecomm.base.protocol import LAYOUTS
from moecomm.compat.deep_ep.pool import _MORE_TOKENS, batched_room, room_for
from moecomm.dispatch import finish, run
from moecomm.dispatch.routed import ChunkedHandle
from moecomm.errors import TooManyRows
from moecomm.fused.kernels import row_pitch
from moecomm.ranks.settings import Settings
from moecomm.rounds.memory import WindowMemory
from moecomm.testing.prepare import prepare_dispatch

from .backends.conftest import run_ranks
from .few import few

RANKS, EXPERTS, TOPK, TOKENS = 4, 16, 3, 40
SIZES: dict[str, Any] = {
    "hidden": 64,
    "num_experts": EXPERTS,
    "topk": TOPK,
    "max_tokens": TOKENS,
    "backend": "host",
    "timeout_s": 20,
}
FEW = {"flat": 0.4, "expert": 0.8, "batched": 0.8}  # capacity factors with which even routing has no room
FP8: dict[str, Any] = {"quantize": "fp8"}
COLUMNS: dict[str, Any] = {**FP8, "scale_layout": "column"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("expert", {}),
    ("expert", {"expert_alignment": 4}),
    ("expert", {**COLUMNS, "expert_alignment": 4}),
    ("flat", {}),
    ("flat", FP8),
    ("flat", {**COLUMNS, "scale_format": "ue8m0"}),
    ("batched", {}),
    ("batched", {**FP8, "scale_format": "ue8m0"}),
    ("batched", {**COLUMNS, "scale_format": "ue8m0"}),
]
TENSORS = (
    *("x", "scales", "tokens_per_expert", "rows_per_expert", "num_rows"),
    *("src", "topk_idx", "topk_weights", "row_weights"),
)


def call(rank: int, skew: float, experts: int = EXPERTS, tokens: int = TOKENS, topk: int = TOPK) -> dict[str, Any]:
    """Make tokens of a rank: the more skew, the more of them want the experts of rank 0."""
    g = torch.Generator().manual_seed(rank)
    count = max(0, tokens - 3 * rank)
    scores = torch.rand(count, experts, generator=g)
    scores[:, : EXPERTS // RANKS] += skew
    return {
        "x": torch.randn(count, SIZES["hidden"], generator=g).bfloat16(),
        "topk_idx": scores.topk(topk).indices,
        "topk_weights": torch.rand(count, topk, generator=g),
    }


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, float8 as bytes, which compare."""
    copy = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return copy.clone(memory_format=torch.contiguous_format)


def rounds(group: Any, factor: float, skew: float, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run a dispatch, a repeat and combines, and return all tensors, without the contents of padding."""
    with moecomm.Buffer(group, **SIZES, capacity_factor=factor) as buffer:
        given = call(group.rank, skew)
        routed = buffer.dispatch(**given, layout=layout, **options)
        y = (2 * routed.x.float()).bfloat16()
        by_row = y.float().sum(-1)
        if layout == "flat":
            by_row = by_row[:, None] * torch.arange(1.0, TOPK + 1)
        combined = buffer.combine(y, routed.handle)
        found = {name: getattr(routed, name) for name in TENSORS}
        found["combined"] = combined
        found["exact"] = buffer.combine(y, routed.handle, wire="exact", bias=combined.float(), out=combined.clone())
        found["grad"], found["weight_grads"] = buffer.combine(y, routed.handle, weight_grads=by_row)
        if layout != "flat":
            weights = given["topk_weights"].flip(1).contiguous()
            found["reweighted"] = buffer.combine(y, routed.handle, topk_weights=weights)
        repeat = {name: value for name, value in options.items() if name != "expert_alignment"}
        again = buffer.dispatch(given["x"] * 2, handle=routed.handle, **repeat)
        found["again"], found["scales again"] = again.x, again.scales
        assert buffer.empty(routed.handle).shape == y.shape == routed.handle.y_shape
        valid = routed.src[..., 0] >= 0
        if layout == "batched":
            valid = torch.arange(y.shape[1]) < routed.tokens_per_expert[:, None]
        rows = {"x", "scales", "src", "row_weights", "again", "scales again"}
        values = {
            name: contents(tensor)[valid] if name in rows and layout != "flat" else contents(tensor)
            for name, tensor in found.items()
            if tensor is not None
        }
        strides = None if routed.scales is None or layout == "batched" else routed.scales.stride()
        types = {name: tensor.dtype for name, tensor in found.items() if tensor is not None}
        return {"values": values, "about": (types, strides), "chunked": isinstance(routed.handle, ChunkedHandle)}


@pytest.mark.parametrize("skew", few([0.5, 2, 9], 0.5, 9))
@pytest.mark.parametrize(("layout", "options"), CASES)
def test_rounds_in_chunks_have_the_bits_of_one_round(layout: str, options: dict[str, Any], skew: float) -> None:
    at_once = run_ranks(RANKS, lambda group: rounds(group, math.inf, skew, layout, options))
    in_chunks = run_ranks(RANKS, lambda group: rounds(group, FEW[layout], skew, layout, options))
    for want, got in zip(at_once, in_chunks, strict=True):
        assert (want["chunked"], got["chunked"]) == (False, True)
        assert want["about"] == got["about"]
        assert want["values"].keys() == got["values"].keys()
        for name, tensor in want["values"].items():
            assert torch.equal(tensor, got["values"][name]), name


@pytest.mark.parametrize("how", [{"sync": False}, {"max_rows": 64}])
def test_where_nothing_waits_every_rank_raises_and_goes_on(how: dict[str, Any]) -> None:
    def body(group: Any) -> TooManyRows:
        with moecomm.Buffer(group, **SIZES, capacity_factor=0.8) as buffer:
            given = call(group.rank, 9)
            with pytest.raises(TooManyRows) as caught:
                buffer.dispatch(**given, **how)
            buffer.check()
            routed = buffer.dispatch(**given)
            assert isinstance(routed.handle, ChunkedHandle)
            return caught.value

    for error in run_ranks(RANKS, body):
        assert (error.argument, error.rank, error.room) == ("max_rows", 0, 64 if "max_rows" in how else 96)
        assert error.rows > error.room


def test_ranks_that_do_not_all_wait_get_a_named_error() -> None:
    """A rank that does not wait leaves; what it calls next does not match the chunks of the others."""

    def body(group: Any) -> type[Exception]:
        with moecomm.Buffer(group, **SIZES, capacity_factor=0.8) as buffer:
            given = call(group.rank, 9)
            try:
                buffer.dispatch(**given, sync=group.rank > 0)
            except moecomm.MoecommError as error:
                first = type(error)
            else:
                return type(None)
            if group.rank == 0:
                with pytest.raises(moecomm.Mismatch):
                    buffer.dispatch(**given)
            return first

    assert run_ranks(RANKS, body) == [TooManyRows, *[moecomm.Mismatch] * (RANKS - 1)]


def test_a_chunked_handle_does_not_begin() -> None:
    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, capacity_factor=0.8) as buffer:
            given = call(group.rank, 9)
            routed = buffer.dispatch(**given)
            with pytest.raises(moecomm.BadInput, match="handle"):
                buffer.dispatch_begin(given["x"], handle=routed.handle)

    run_ranks(RANKS, body)


def dropped_by_hand(
    settings: Settings, layout: str, rows: int, ids: torch.Tensor, weights: torch.Tensor
) -> list[list[int]]:
    """Drop entry by entry: the largest weights first, flat: the tokens with the largest sums."""
    local = EXPERTS // RANKS
    quota = rows // RANKS // (local if layout == "batched" else 1)
    kept = ids.tolist()
    by_owner: dict[int, list[tuple[float, int, list[int]]]] = {}
    for t, row in enumerate(ids.tolist()):
        owners = [expert if layout == "batched" else expert // local for expert in row]
        for owner in sorted(set(owners)):
            ks = [k for k, other in enumerate(owners) if other == owner]
            if layout == "flat":
                by_owner.setdefault(owner, []).append((-float(weights[t, ks].sum()), t, ks))
            else:
                by_owner.setdefault(owner, []).extend((-float(weights[t, k]), t, [k]) for k in ks)
    for entries in by_owner.values():
        for _, t, ks in sorted(entries, key=lambda entry: entry[0])[quota:]:
            for k in ks:
                kept[t][k] = -1
    return kept


@pytest.mark.parametrize("max_rows", [None, 32])
@pytest.mark.parametrize("layout", ["expert", "flat", "batched"])
def test_drop_keeps_the_largest_weights(layout: str, max_rows: int | None) -> None:
    def body(group: Any) -> tuple[int, int]:
        given = call(group.rank, 2)
        rows = None if max_rows is None else max_rows // (EXPERTS // RANKS if layout == "batched" else 1)
        with moecomm.Buffer(group, **SIZES, capacity_factor=FEW[layout]) as buffer:
            how: dict[str, Any] = {"layout": layout, "max_rows": rows}
            routed = buffer.dispatch(**given, **how, overflow="drop", sync=False)
            room = buffer.rounds.settings.capacity_rows(layout) if max_rows is None else max_rows
            ids, weights = given["topk_idx"], given["topk_weights"]
            want = torch.tensor(dropped_by_hand(buffer.rounds.settings, layout, room, ids, weights)).view_as(ids)
            assert routed.dropped is not None and routed.dropped.dtype is torch.int32
            assert int(routed.dropped) == int((want < 0).sum())
            out = buffer.combine(routed.x, routed.handle, wire="exact")
            same = buffer.dispatch(given["x"], want, weights, **how, sync=False)
            assert same.dropped is None
            assert torch.equal(same.num_rows, routed.num_rows)
            assert torch.equal(buffer.combine(same.x, same.handle, wire="exact"), out)
            return int(routed.dropped), int(routed.num_rows)

    found = run_ranks(RANKS, body)
    assert sum(dropped for dropped, _ in found) > 0


def test_ids_without_dropped_entries_live_until_the_round_has_run() -> None:
    """Also where a plan is used again."""
    sizes: dict[str, Any] = {"hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 8}
    with moecomm.Buffer("self", **sizes, backend="host") as buffer:
        x, ids = torch.zeros(8, 64).bfloat16(), torch.zeros(8, 2, dtype=torch.int64)
        for _ in range(3):
            pending = prepare_dispatch(buffer, x, ids, overflow="drop")
            assert pending.inputs[1].data_ptr() == pending.args.topk_idx != ids.data_ptr()
            run(pending)
            assert finish(buffer.rounds, pending).inputs is None


def test_what_excludes_a_way_to_overflow() -> None:
    with moecomm.Buffer("self", **SIZES) as buffer:
        given = call(0, 0)
        routed = buffer.dispatch(**given)
        with pytest.raises(moecomm.BadInput, match="overflow"):
            buffer.dispatch(given["x"], handle=routed.handle, overflow="drop")
        with pytest.raises(moecomm.BadInput, match="overflow"):
            buffer.dispatch(**given, overflow="chunks", sync=False)
        with pytest.raises(moecomm.BadInput, match="overflow"):
            buffer.dispatch(**given, overflow="chunks", max_rows=100)
        with pytest.raises(moecomm.BadInput, match="overflow"):
            buffer.dispatch_begin(**given, overflow="chunks")
        buffer.dispatch_end(buffer.dispatch_begin(**given, overflow="drop"))


def settings_of(ranks: int, tokens: int, **more: Any) -> Settings:
    """DeepSeek-V3's sizes."""
    return Settings(ranks, 7168, 256, 8, tokens, torch.bfloat16, **{"backend": "lsa", "window_bytes": None, **more})


def window_bytes(settings: Settings) -> int:
    return int(_native.window_layout(settings.shape(backends.load(settings.backend))).bytes)


@pytest.mark.parametrize("backend", ["lsa", "host"])
@pytest.mark.parametrize(("ranks", "most"), [(8, 1.5), (64, 2.5)])
def test_the_default_window_follows_what_is_expected(backend: str, ranks: int, most: float) -> None:
    assert window_bytes(settings_of(ranks, 4096, backend=backend)) <= most * 2**30


def test_the_table_in_the_documents() -> None:
    text = (Path(__file__).parents[1] / "docs" / "memory.md").read_text()
    found = re.findall(r"^\| (\d+) \| ([\d.]+) GiB \| ([\d.]+) GiB \| ([\d.]+) GiB \|$", text, re.MULTILINE)
    assert [int(row[0]) for row in found] == [4, 8, 16, 32, 64]
    for ranks, *cells in found:
        worst = settings_of(int(ranks), 4096, capacity_factor=math.inf)
        sizes = [settings_of(int(ranks), 128), settings_of(int(ranks), 4096), worst]
        assert cells == [f"{window_bytes(settings) / 2**30:.1f}" for settings in sizes], ranks


def test_windows_of_several_domains_in_the_documents() -> None:
    """The table has them all; the aims that they miss have four."""
    docs = Path(__file__).parents[1] / "docs"
    found = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) GiB \|$", (docs / "memory.md").read_text(), re.MULTILINE)
    cells = {(int(ranks), int(domains)): gib for ranks, domains, gib in found}
    assert list(cells) == [(4, 2), (8, 2), (8, 4), (16, 2), (64, 8), (64, 32)]
    for (ranks, domains), gib in cells.items():
        settings = replace(settings_of(ranks, 4096), domain_ranks=ranks // domains)
        assert gib == f"{window_bytes(settings) / 2**30:.2f}", ranks
    eight, many = (
        f"{ranks} ranks: {cells[ranks, few]} GiB in {few} domains, {cells[ranks, most]} in {most}"
        for ranks, few, most in ((8, 2, 4), (64, 8, 32))
    )
    assert f"| {eight}. {many} (" in (docs / "maintainers" / "decisions.md").read_text()


def adapter_bytes(adapter: str, ranks: int, factor: float | None) -> int:
    """Window of an adapter for DeepSeek-V3; `factor` math.inf: with room for the worst case."""
    tokens = 4096 if adapter in ("normal", "Megatron") else 4096 + _MORE_TOKENS
    settings = settings_of(ranks, tokens, capacity_factor=factor)
    if adapter != "Megatron":
        layout: Any = "expert" if adapter == "expanding" else "flat"
        settings = replace(settings, window_bytes=room_for(settings, layout).window)
    return window_bytes(settings)


def test_the_table_of_adapters_in_the_documents() -> None:
    text = (Path(__file__).parents[1] / "docs" / "memory.md").read_text()
    names = {
        "DeepEP's `Buffer`, normal; vLLM's standard format": "normal",
        "DeepEP's `ElasticBuffer`": "elastic",
        "DeepEP's `ElasticBuffer` with `do_expand`, `HybridEPBuffer`": "expanding",
        "Megatron": "Megatron",
    }
    gib = r" ([\d.]+) GiB \|"
    found = re.findall(r"^\| (.*?) \| [a-z, 0-9]+ \|" + 4 * gib + "$", text, re.MULTILINE)
    assert [row[0] for row in found] == list(names)
    for name, *cells in found:
        sizes = [adapter_bytes(names[name], ranks, factor) for ranks in (8, 64) for factor in (None, math.inf)]
        assert cells == [f"{size / 2**30:.1f}" for size in sizes], name


def test_a_small_factor_leaves_room_for_a_fused_layer() -> None:
    """It publishes rows and receives one for each entry."""
    settings = settings_of(8, 4096, capacity_factor=0.1)
    assert settings.default_heap() > 4096 * (row_pitch(torch.bfloat16, 7168) + 8 * 2 * 7168)


def stays(settings: Settings, heap: int, parts: tuple[int, int], layout: str, **payload: int) -> int:
    """Dispatch into a heap that is divided so, while outputs of all rounds are alive: how many rounds stay there."""
    args = _native.DispatchArgs()
    args.ctx.set_shape(settings.shape(backends.load("lsa")))
    args.layout, args.idx_bytes, args.alignment = LAYOUTS.index(layout), 8, 128 if layout == "expert" else 1
    args.row_bytes, args.scale_bytes = payload["row"], payload["scales"]
    plan = _native.DispatchPlan(args, bool(payload["by_column"]), None, None, None, None)
    rows = settings.capacity_rows(layout, args.alignment)
    memory = WindowMemory(_native.Arena(args.ctx.window.heap, heap), lambda: False, *parts)
    kept: list[Any] = []
    while True:
        blocks = memory.allocate(plan.kept_bytes(rows), plan.payload_bytes(rows))
        if not all(map(memory.stays, blocks)):
            return len(kept)
        kept.append(blocks)


PAYLOADS = {
    "plain": {"row": 2 * 7168, "scales": 0, "by_column": 0},
    "FP8": {"row": 7168, "scales": 224, "by_column": 0},
    "FP8, scales by column": {"row": 7168, "scales": 224, "by_column": 1},
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize(("ranks", "tokens"), [(1, 4096), (2, 512), (4, 128), (8, 4096), (8, 1), (64, 4096)])
def test_a_round_stays_in_a_default_window_of_gpus(ranks: int, tokens: int, payload: str) -> None:
    """Without a copy: the other half, which is the reserve, has room for the next one."""
    settings = settings_of(ranks, tokens)
    heap = settings.default_heap()
    for layout in LAYOUTS:
        if layout == "batched" and settings.capacity_rows("batched") * 2 * 7168 > 2 << 30:
            continue
        assert stays(settings, heap, settings.heap_parts(heap), layout, **PAYLOADS[payload]) >= 1, layout


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize(("layout", "most"), [("flat", 3), ("expert", 1), ("batched", 3)])
def test_rounds_stay_in_windows_behind_deep_ep(layout: Any, most: int, payload: str) -> None:
    for ranks, tokens in ((2, 64), (8, 128), (8, 4096)):
        if (layout, tokens) == ("batched", 4096):
            continue
        settings = settings_of(ranks, tokens, capacity_factor=math.inf)
        room = batched_room(settings) if layout == "batched" else room_for(settings, layout)
        given = PAYLOADS[payload]
        assert stays(settings, room.window, (room.tables, room.reserve), layout, **given) >= most, (ranks, tokens)


@pytest.mark.parametrize("domain_ranks", [None, 2])
@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_two_rounds_fit_the_default_window(layout: str, domain_ranks: int | None) -> None:
    """Without a wait, so with room for all that a round may bring."""

    def body(group: Any) -> None:
        sizes = {**SIZES, "domain_ranks": domain_ranks, "dtype": torch.float32, "capacity_factor": 1.0}
        with moecomm.Buffer(group, **sizes) as buffer:
            x = torch.randn(TOKENS, SIZES["hidden"])
            ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(TOKENS)])
            how: dict[str, Any] = {"layout": layout, "sync": False, "overflow": "drop"}
            alignment = {"expert_alignment": 128} if layout == "expert" else {}
            first = buffer.dispatch(x, ids, **how, **alignment)
            second = buffer.dispatch(x, ids, **how, **alignment)
            assert torch.equal(buffer.combine(first.x, first.handle), buffer.combine(second.x, second.handle))

    run_ranks(RANKS, body)


@pytest.mark.parametrize("factor", [-1, 0, True, math.nan, "2"])
def test_a_factor_that_is_none(factor: Any) -> None:
    with pytest.raises(moecomm.BadInput, match="capacity_factor"):
        moecomm.Buffer("self", **SIZES, capacity_factor=factor)


def test_ranks_agree_on_the_factor() -> None:
    def body(group: Any) -> str:
        with pytest.raises(moecomm.Mismatch) as caught:
            moecomm.Buffer(group, **SIZES, capacity_factor=2.0 if group.rank else None)
        return str(caught.value)

    assert "capacity_factor: this rank has None, rank 1 has 2.0" in run_ranks(2, body)[0]
