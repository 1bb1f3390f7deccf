"""Rounds prepared by native code: which tensors it takes, and where outputs lie."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from moecomm import _native

RANKS, EXPERTS, TOPK, TOKENS, HIDDEN = 2, 6, 3, 20, 64
FLAT, EXPERT, BATCHED = 0, 1, 2
BASE = 1 << 40  # of our window: nothing here touches it


def context() -> _native.Context:
    ctx = _native.Context()
    ctx.set_shape(_native.Shape(RANKS, EXPERTS, TOPK, TOKENS, 32, HIDDEN * 4 + 16, 1 << 24))
    ctx.rank, ctx.peers = 1, [1 << 20, BASE]
    return ctx


def inputs(tokens: int = 5, **other: Any) -> dict[str, Any]:
    given = {
        "x": torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16),
        "scales": None,
        "topk_idx": torch.zeros(tokens, TOPK, dtype=torch.int64),
        "topk_weights": torch.zeros(tokens, TOPK),
    }
    return {**given, **other}


def dispatch_plan(
    layout: int = EXPERT, columns: bool = False, scale_bytes: int = 0, **like: Any
) -> _native.DispatchPlan:
    args = _native.DispatchArgs()
    args.ctx, args.hidden, args.layout = context(), HIDDEN, layout
    args.row_bytes, args.idx_bytes, args.scale_bytes = HIDDEN * 2, 8, scale_bytes
    plan = _native.DispatchPlan(args, columns, **inputs(**like))
    for tokens in (0, 1, 5, TOKENS):
        plan.schedule(tokens, 3 + tokens, 16)
    return plan


def blocks(plan: _native.DispatchPlan, max_rows: int) -> tuple[_native.Block, _native.Block]:
    arena = _native.Arena(1 << 20, 1 << 24)
    found = [arena.allocate(n) for n in (plan.payload_bytes(max_rows), plan.kept_bytes(max_rows))]
    assert found[0] is not None and found[1] is not None
    return found[0], found[1]


def bind(plan: _native.DispatchPlan, max_rows: int = 120, **given: Any) -> _native.DispatchArgs | None:
    payload, kept = blocks(plan, max_rows)
    return plan.bind(payload, kept, max_rows, **inputs(**given))


def test_what_differs_from_call_to_call_is_filled_in() -> None:
    plan = dispatch_plan()
    given = inputs(5, x=torch.zeros(5, 2 * HIDDEN, dtype=torch.bfloat16)[:, :HIDDEN])
    args = bind(plan, **given)
    assert args is not None
    assert (args.x, args.x_stride, args.num_tokens) == (given["x"].data_ptr(), 4 * HIDDEN, 5)
    assert (args.topk_idx, args.topk_weights) == (given["topk_idx"].data_ptr(), given["topk_weights"].data_ptr())
    assert (args.workers, args.chunk_tokens, args.max_rows, args.ctx.rank) == (8, 16, 120, 1)
    assert (args.in_scales, args.out_scales, args.scale_columns, args.scale_stride) == (0, 0, 0, 0)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("layout", [FLAT, EXPERT, BATCHED])
@pytest.mark.parametrize("rows", [0, 3, 120])
def test_outputs_lie_beside_each_other(layout: int, columns: bool, rows: int) -> None:
    scales = torch.zeros(5, 3)
    plan = dispatch_plan(layout, columns, 12, scales=scales)
    payload, kept = blocks(plan, rows)
    args = plan.bind(payload, kept, rows, **inputs(scales=scales))
    assert args is not None
    assert (args.in_scales, args.in_scales_stride) == (scales.data_ptr(), 12)

    groups = EXPERTS // RANKS if layout == BATCHED else 1
    group_rows = rows // groups
    arriving = {args.out_x: rows * HIDDEN * 2, args.out_scales: 12 * (RANKS * TOKENS if columns else rows)}
    if columns:
        assert args.scale_stride == -(-group_rows // 4) * 4
        arriving[args.scale_columns - BASE] = groups * 3 * args.scale_stride * 4
    else:
        assert (args.scale_columns, args.scale_stride) == (0, 0)
    route, flat = args.route, layout == FLAT
    stays = {
        args.out_src: 8 * rows,
        args.out_weights: 4 * rows * (TOPK if flat else 1),
        route.token_rows - BASE: 4 * TOKENS * TOPK,
        route.token_owner - BASE: 4 * TOKENS * TOPK,
        route.token_slot - BASE: 4 * TOKENS * RANKS,
        route.sent - BASE: 8 * RANKS + 16,  # and the round and the seal of the dispatch
        route.ranges - BASE: 4 * RANKS * TOKENS,
        args.tokens_per_expert - BASE: 4 * EXPERTS // RANKS,
        args.num_rows - BASE: 4,
    }
    if flat:
        stays[args.out_topk_idx] = 8 * rows * TOPK
        assert (args.out_rows, route.rows, route.row_weights) == (0, 0, 0)
    else:
        stays[args.out_rows] = 4 * RANKS * TOKENS * TOPK
        assert args.out_topk_idx == 0
        assert (route.rows - BASE, route.row_weights - BASE) == (args.out_rows, args.out_weights)
    assert route.src - BASE == args.out_src
    for block, pieces in ((payload, arriving), (kept, stays)):
        ends = [(at, at + nbytes) for at, nbytes in sorted(pieces.items())]
        assert all(at % 256 == 0 for at, _ in ends)
        assert block.offset <= ends[0][0] and ends[-1][1] <= block.offset + block.nbytes
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert args.out_x == max(arriving), "what no row has come to can be given back"


WRONG: dict[str, dict[str, Any]] = {
    "no tensor": {"x": [[0.0] * HIDDEN] * 5},
    "nothing": {"x": None},
    "dtype": {"x": torch.zeros(5, HIDDEN, dtype=torch.float16)},
    "device": {"x": torch.zeros(5, HIDDEN, dtype=torch.bfloat16, device="meta")},
    "dimensions": {"x": torch.zeros(5, 8, 8, dtype=torch.bfloat16)},
    "columns": {"x": torch.zeros(5, HIDDEN + 8, dtype=torch.bfloat16)},
    "columns apart": {"x": torch.zeros(HIDDEN, 5, dtype=torch.bfloat16).t()},
    "row not aligned": {"x": torch.zeros(5, HIDDEN + 4, dtype=torch.bfloat16)[:, :HIDDEN]},
    "start not aligned": {"x": torch.zeros(5 * HIDDEN + 1, dtype=torch.bfloat16)[1:].view(5, HIDDEN)},
    "too many tokens": inputs(TOKENS + 1),
    "tokens without a schedule": inputs(7),
    "other tokens": {"topk_idx": torch.zeros(4, TOPK, dtype=torch.int64)},
    "id dtype": {"topk_idx": torch.zeros(5, TOPK, dtype=torch.int32)},
    "ids apart": {"topk_idx": torch.zeros(5, 2 * TOPK, dtype=torch.int64)[:, ::2]},
    "ids by column": {"topk_idx": torch.zeros(TOPK, 5, dtype=torch.int64).t()},
    "no ids": {"topk_idx": None},
    "ids of more experts": {"topk_idx": torch.zeros(5, TOPK + 1, dtype=torch.int64)},
    "no weights": {"topk_weights": None},
    "weights dtype": {"topk_weights": torch.zeros(5, TOPK).double()},
    "other weights": {"topk_weights": torch.zeros(5, 1)},
    "scales": {"scales": torch.zeros(5, 3)},
}


@pytest.mark.parametrize("name", WRONG)
def test_other_tensors_are_left_to_python(name: str) -> None:
    plan = dispatch_plan()
    assert bind(plan, **WRONG[name]) is None
    assert bind(plan) is not None


def test_scales_are_rows_of_their_own() -> None:
    plan = dispatch_plan(scale_bytes=6, scales=torch.zeros(5, 3, dtype=torch.int16))
    args = bind(plan, scales=torch.zeros(5, 7, dtype=torch.int16)[:, 1:4])
    assert args is not None and args.in_scales_stride == 14
    for scales in (
        None,
        torch.zeros(5, 2, dtype=torch.int16),
        torch.zeros(4, 3, dtype=torch.int16),
        torch.zeros(3, 5, dtype=torch.int16).t(),
        torch.zeros(5, 3, dtype=torch.uint8),
    ):
        assert bind(plan, scales=scales) is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    args = bind(dispatch_plan(), **inputs(tokens))
    assert args is not None and (args.num_tokens, args.x_stride) == (tokens, 2 * HIDDEN)


def test_a_repeat_has_the_route_of_the_first() -> None:
    first = bind(dispatch_plan(), max_rows=33)
    assert first is not None
    first.chunk_tokens = 2  # whatever the plan of the repeat has
    plan = dispatch_plan(topk_idx=None, topk_weights=None)
    payload, _ = blocks(plan, 33)
    given = inputs()
    again = plan.repeat(payload, first, given["x"], None)
    assert again is not None
    assert (again.num_tokens, again.max_rows, again.chunk_tokens, again.out_x) == (5, 33, 2, payload.offset)
    for name in ("token_rows", "token_owner", "token_slot", "sent", "ranges", "rows", "row_weights", "src"):
        assert getattr(again.route, name) == getattr(first.route, name)
    assert (again.out_src, again.num_rows, again.topk_idx) == (0, 0, 0)
    assert again.tokens_per_expert == first.tokens_per_expert
    assert plan.repeat(payload, first, inputs(1)["x"], None) is None


def test_a_plan_wants_tensors_to_be_like() -> None:
    with pytest.raises(ValueError, match="tensors"):
        dispatch_plan(x=[1, 2])
    args = _native.CombineArgs()
    args.ctx = context()
    with pytest.raises(ValueError, match="tensors"):
        _native.CombinePlan(args, "y", None, None)  # type: ignore[arg-type]


def combine_plan(layout: int = EXPERT, bias: Any = None, grads: Any = None) -> _native.CombinePlan:
    args = _native.CombineArgs()
    args.ctx, args.hidden, args.layout = context(), HIDDEN, layout
    plan = _native.CombinePlan(args, torch.zeros(1, HIDDEN), bias, grads)
    plan.schedule(5, 11, 1)
    return plan


def dispatched(layout: int, tokens: int = 5, rows: int = 9) -> _native.DispatchArgs:
    args = _native.DispatchArgs()
    args.ctx = context()
    args.layout, args.num_tokens, args.max_rows, args.chunk_tokens = layout, tokens, rows, 4
    args.route.sent = 1234
    return args


def test_a_combine_is_filled_in() -> None:
    y, out = torch.zeros(9, 2 * HIDDEN)[:, :HIDDEN], torch.zeros(5, HIDDEN)
    args = combine_plan().bind(dispatched(EXPERT), y, out, None, None, None)
    assert args is not None
    assert (args.y, args.y_stride, args.out, args.out_stride) == (y.data_ptr(), 512, out.data_ptr(), 256)
    assert (args.num_tokens, args.workers, args.chunk_tokens, args.route.sent) == (5, 11, 4, 1234)
    assert (args.bias, args.bias_stride, args.weight_grads, args.out_weight_grads) == (0, 0, 0, 0)


@pytest.mark.parametrize("layout", [FLAT, EXPERT, BATCHED])
def test_everything_a_combine_takes(layout: int) -> None:
    rows = (3, 3) if layout == BATCHED else (9,)
    y, out, returned = torch.zeros(*rows, HIDDEN), torch.zeros(5, HIDDEN), torch.zeros(5, TOPK)
    grads = torch.zeros(*rows, TOPK) if layout == FLAT else torch.zeros(rows)
    row, matrix = torch.zeros(HIDDEN), torch.zeros(5, HIDDEN)
    plan = combine_plan(layout, bias=row, grads=grads)
    for bias, stride in ((row, 0), (matrix, 256)):
        args = plan.bind(dispatched(layout), y, out, bias, grads, returned)
        assert args is not None
        assert (args.bias, args.bias_stride, args.y_stride) == (bias.data_ptr(), stride, 256)
        assert (args.weight_grads, args.out_weight_grads) == (grads.data_ptr(), returned.data_ptr())
    wrong: dict[str, list[Any]] = {
        "y": [y[:-1], y.double(), y[..., : HIDDEN // 2], y.to("meta"), None],
        "out": [out[:-1], out.double(), out.t().contiguous().t()],
        "bias": [None, row[1:], matrix[1:], row.double(), torch.zeros(HIDDEN + 1)[1:]],
        "weight_grads": [None, grads[1:], grads.double(), grads.unsqueeze(0)],
        "out_weight_grads": [None, returned[1:], torch.zeros(TOPK, 5).t()],
    }
    good = {"y": y, "out": out, "bias": row, "weight_grads": grads, "out_weight_grads": returned}
    for name, values in wrong.items():
        for value in values:
            assert plan.bind(dispatched(layout), **{**good, name: value}) is None, (name, value)
    assert plan.bind(dispatched((layout + 1) % 3), **good) is None
    assert plan.bind(dispatched(layout, tokens=4), **good) is None


def test_gradients_of_no_rows_still_travel() -> None:
    grads = torch.zeros(0)
    plan = combine_plan(grads=grads)
    y, out, returned = torch.zeros(0, HIDDEN), torch.zeros(5, HIDDEN), torch.zeros(5, TOPK)
    args = plan.bind(dispatched(EXPERT, rows=0), y, out, None, grads, returned)
    assert args is not None and args.weight_grads != 0


def test_rows_in_the_window_are_a_plan_of_their_own() -> None:
    window = _native.HostWindow(1 << 20)
    arena = _native.Arena(0, window.nbytes)
    args = _native.CombineArgs()
    ctx = context()
    ctx.set_shape(_native.Shape(1, EXPERTS, TOPK, 1, 32, 16, 1 << 18))
    ctx.rank, ctx.peers = 0, [window.address]
    args.ctx, args.hidden, args.layout = ctx, HIDDEN, EXPERT
    heap = ctx.window.heap
    block = arena.allocate(1 << 19)
    assert block is not None
    capsule = block.tensor(window.address + heap, (9, HIDDEN), 2, 32, 1, 0, window)
    inside, outside = torch.utils.dlpack.from_dlpack(capsule), torch.zeros(9, HIDDEN)
    out = torch.zeros(5, HIDDEN)
    for like, other in ((inside, outside), (outside, inside)):
        plan = _native.CombinePlan(args, like, None, None)
        plan.schedule(5, 1, 1)
        assert plan.bind(dispatched(EXPERT), like, out, None, None, None) is not None
        assert plan.bind(dispatched(EXPERT), other, out, None, None, None) is None
        room = plan.bind(dispatched(EXPERT), like, out, None, None, None, window.address + heap + 256)
        assert room is not None and (room.y, room.reduced_rows) == (like.data_ptr(), window.address + heap + 256)
