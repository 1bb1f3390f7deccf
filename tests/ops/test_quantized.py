"""Operators whose rows travel in formats, forward and backward: the bits of casts in the same places on one process."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import moecomm
from moecomm import formats, ops
from moecomm.base.choices import Layout
from moecomm.base.protocol import LAYOUTS
from moecomm.combine import reference as combine_reference
from moecomm.dispatch import reference as dispatch_reference
from moecomm.ops.combine_gradients import combine_gradients
from tests.ops.ranks import Case, case
from tests.ops.test_rounds import arrived_of, filled

from ..backends.conftest import all_ranks
from ..few import few

GLOBAL = {"fp8_tensor": 0.01, "nvfp4": 100.0}


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def travelled(x: torch.Tensor, name: str | None, scale_format: str = "fp32") -> torch.Tensor:
    if name is None:
        return x
    of_all = GLOBAL.get(name)
    values, scales = formats.quantize(x, name, scale_format=scale_format, global_scale=of_all)
    return formats.dequantize(values, scales, name, global_scale=of_all, dtype=x.dtype)


def factors(hidden: int) -> torch.Tensor:
    """What the experts of these tests multiply columns with."""
    return torch.linspace(-2, 2, hidden)


def a_step(buffer: moecomm.Buffer, c: Case, given: dict[str, Any], back: dict[str, Any]) -> dict[str, Any]:
    """Run a layer forward and backward."""
    rank = buffer.rank
    x, weights = (t[rank].clone().requires_grad_() for t in (c.x, c.topk_weights))
    routed = ops.dispatch(buffer, x, c.topk_idx[rank], weights, **given)
    y = routed.x * factors(c.hidden).to(c.dtype)
    out = ops.combine(y, routed.handle, **back)
    wanted = (x,) if given["layout"] == "flat" else (x, weights)
    grads = torch.autograd.grad(out, wanted, c.drawn(out.shape, 10 + rank))
    return {"routed": routed._replace(handle=None), "out": out.detach(), "grads": grads, "y": y.detach()}


def expected(
    c: Case, given: dict[str, Any], back: dict[str, Any], domain_ranks: int | None
) -> list[tuple[dispatch_reference.Arrived, torch.Tensor, list[torch.Tensor]]]:
    """Return the rows, the result and the gradients of every rank, by the specifications of rounds and casts."""
    layout, alignment = given["layout"], given["expert_alignment"]
    columns = factors(c.hidden).to(c.dtype)
    sent = [travelled(x, given.get("quantize"), given.get("scale_format", "fp32")) for x in c.x]
    arrived = arrived_of(c, sent, layout, alignment)
    of: dict[str, Any] = {"layout": layout, "domain_ranks": domain_ranks}
    ys = [a.x * columns for a in arrived]
    outs = combine_reference.combine(ys, arrived, **of)
    grads = [c.drawn(x.shape, 10 + rank) for rank, x in enumerate(c.x)]
    rows = [a.x for a in arrived_of(c, [travelled(g, back.get("grad_wire")) for g in grads], layout, alignment)]
    of_weights = None
    if layout != "flat":
        pairs = [combine_gradients(r, a.row_weights, y, c.dtype) for r, a, y in zip(rows, arrived, ys, strict=True)]
        rows = [grad_y for grad_y, _ in pairs]
        of_weights = combine_reference.combine_weight_grads([w for _, w in pairs], arrived, layout=layout)
    of_x = combine_reference.combine(
        [r * columns for r in rows], arrived, **of, weighted=False, wire=given.get("grad_wire")
    )
    return [
        (arrived[r], outs[r], [of_x[r]] if of_weights is None else [of_x[r], of_weights[r]]) for r in range(c.ranks)
    ]


def compare(c: Case, given: dict[str, Any], back: dict[str, Any], domain_ranks: int | None = None) -> None:
    def body(group: Any) -> dict[str, Any]:
        with c.buffer(group, domain_ranks=domain_ranks) as buffer:
            return a_step(buffer, c, given, back)

    whole = expected(c, given, back, domain_ranks)
    for rank, (got, (arrived, out, grads)) in enumerate(zip(all_ranks(c.ranks, body), whole, strict=True)):
        x = got["routed"].x
        assert x.dtype is c.dtype and torch.equal(x, filled(arrived.x, x)), f"rank {rank}: x, zeros in padding included"
        assert torch.equal(got["out"], out), f"rank {rank}"
        for mine, want in zip(got["grads"], grads, strict=True):
            assert torch.equal(mine, want), f"gradients of rank {rank}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", formats.FORMATS)
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 24), (torch.bfloat16, 160)])
def test_rows_and_gradients_are_those_of_casts_in_the_same_places(
    layout: Layout, name: str, dtype: torch.dtype, hidden: int
) -> None:
    c = case(2, dtype=dtype, hidden=hidden, seed=2)
    given: dict[str, Any] = {"layout": layout, "expert_alignment": 1, "quantize": name}
    given |= {"x_global_scale": GLOBAL.get(name)}
    back = {"grad_wire": name if name in ops.GRAD_WIRES else "mxfp8"}
    if layout == "expert":
        given["expert_alignment"] = 128
    compare(c, given, back)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_wire", [None, "exact", torch.bfloat16])
def test_over_domains(layout: Layout, grad_wire: Any) -> None:
    """The gradient of a dispatch travels in `grad_wire` of the dispatch."""
    c = case(4, dtype=torch.bfloat16, hidden=48, seed=1)
    given: dict[str, Any] = {"layout": layout, "expert_alignment": 1, "quantize": "fp8", "scale_format": "ue8m0"}
    compare(c, given | {"grad_wire": grad_wire}, {"grad_wire": "fp8"}, domain_ranks=2)


@pytest.mark.parametrize("layout", ["expert", "batched"])
def test_one_direction_alone(layout: Layout) -> None:
    c = case(2, dtype=torch.bfloat16, hidden=48, seed=1)
    for given, back in (({"quantize": "mxfp8"}, {}), ({}, {"grad_wire": "mxfp8"}), ({"grad_wire": "exact"}, {})):
        compare(c, {"layout": layout, "expert_alignment": 1, **given}, back)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_take_several_rounds(layout: Layout) -> None:
    c = case(2, dtype=torch.bfloat16, hidden=48, seed=1)
    given: dict[str, Any] = {"layout": layout, "expert_alignment": 1, "quantize": "mxfp8"}

    def body(group: Any, factor: float) -> tuple[dict[str, Any], list[torch.Tensor | None], int]:
        with c.buffer(group, capacity_factor=factor) as buffer:
            got = a_step(buffer, c, given, {"grad_wire": "mxfp8"})
            raw = ops.dispatch(buffer, c.x[group.rank], c.topk_idx[group.rank], **given, dequantize=False)
            rounds = len(raw.handle.chunks) if isinstance(raw.handle, ops.ChunkedHandle) else 1
            return got, [None if t is None else t.clone() for t in (raw.x, raw.scales)], rounds

    want = all_ranks(2, lambda group: body(group, math.inf))
    got = all_ranks(2, lambda group: body(group, 0.4))
    for (whole, raw, once), (parts, raw_parts, rounds) in zip(want, got, strict=True):
        assert once == 1 and rounds > 1
        assert all(map(torch.equal, (whole["out"], *whole["grads"]), (parts["out"], *parts["grads"])))
        count = parts["routed"].x.shape[-2]
        for first, second in zip(raw, raw_parts, strict=True):
            assert first is not None and second is not None and first.dtype is second.dtype
            assert torch.equal(first.view(torch.uint8)[..., :count, :], second.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", formats.FORMATS)
def test_values_and_scales(layout: Layout, name: str) -> None:
    """For experts that multiply in the format: what Buffer.dispatch returns, and zeros in the rows without a token."""
    c, of_all = case(1, dtype=torch.bfloat16, hidden=48, seed=1), GLOBAL.get(name)
    options: dict[str, Any] = {"layout": layout, "quantize": name, "x_global_scale": of_all}
    if of_all is not None:
        options["x_global_scale"] = torch.tensor([of_all])
    with c.buffer(None) as buffer:
        got = ops.dispatch(buffer, c.x[0], c.topk_idx[0], **options, dequantize=False)
        found: dict[str, Any] = {"x": got.x, "scales": got.scales}
        plain = buffer.dispatch(c.x[0], c.topk_idx[0], **options)
        held = (
            plain.src[..., 0] >= 0
            if layout != "batched"
            else torch.arange(plain.x.shape[1]) < (plain.tokens_per_expert[:, None])
        )
        for key, tensor in found.items():
            want = getattr(plain, key)
            assert (tensor is None) == (want is None)
            if tensor is None:
                continue
            assert tensor.dtype is want.dtype and tensor.shape[-1] == want.shape[-1]
            rows = tensor.view(torch.uint8)
            mine = rows if layout == "batched" else rows[: len(want)]
            assert torch.equal(mine[held], want.contiguous().view(torch.uint8)[held])
            assert not rows[got.src[..., 0] < 0].any()
        rows = formats.dequantize(
            got.x.flatten(0, -2),
            None if got.scales is None else got.scales.flatten(0, -2),
            name,
            global_scale=of_all,
            dtype=c.dtype,
        )
        assert torch.equal(rows.view(*got.x.shape[:-1], -1), ops.dispatch(buffer, c.x[0], c.topk_idx[0], **options).x)


def test_groups_padded_to_128_with_counts_on_the_device() -> None:
    """As grouped GEMMs of block-scaled formats take them: counts and ends of groups never reach the host."""
    c = case(2, dtype=torch.bfloat16, hidden=64, seed=1)
    given: dict[str, Any] = {"quantize": "mxfp8", "expert_alignment": 128}

    def body(group: Any) -> None:
        x, idx = c.x[group.rank], c.topk_idx[group.rank]
        with c.buffer(group) as buffer:
            got = ops.dispatch(buffer, x, idx, **given, dequantize=False)
            counts = got.tokens_per_expert
            groups = (counts + 127) // 128 * 128
            found = got.x.view(torch.uint8).clone(), got.scales, got.src.clone()
            plain = buffer.dispatch(x, idx, **given)
            assert torch.equal(plain.rows_per_expert, groups.long()) and int(groups.sum()) == int(got.num_rows)
            for mine, theirs in zip(found[:2], (plain.x, plain.scales), strict=True):
                assert mine is not None and theirs is not None
                held = plain.src[:, 0] >= 0
                assert torch.equal(
                    mine.view(torch.uint8)[: len(held)][held], theirs.contiguous().view(torch.uint8)[held]
                )
            rows = formats.dequantize(got.x, got.scales, "mxfp8")
            weights = torch.rand(len(counts), 64, 8)
            y = torch.nn.functional.grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=groups.cumsum(0).int())
            begin = 0
            for e, (count, size) in enumerate(zip(counts.tolist(), groups.tolist(), strict=True)):
                assert (found[2][begin : begin + count, 0] >= 0).all()
                assert (found[2][begin + count : begin + size] == -1).all()
                mine, want = y[begin : begin + size], rows[begin : begin + size].bfloat16() @ weights[e].bfloat16()
                assert torch.equal(mine, want) and not mine[count:].any()
                begin += size

    all_ranks(2, body)


def test_handles_are_those_of_any_rows() -> None:
    """Rows in a format and rows of the Buffer's dtype repeat each other's routes."""
    c = case(2, dtype=torch.bfloat16, hidden=48, seed=1)

    def body(group: Any) -> None:
        x, idx, weights = c.x[group.rank], c.topk_idx[group.rank], c.topk_weights[group.rank]
        for first, second in itertools.permutations((None, "mxfp8", "fp8"), 2):
            with c.buffer(group) as buffer:
                sent = [
                    ops.dispatch(buffer, x, idx, weights, quantize=name)  # type: ignore[arg-type]
                    for name in (first, second)
                ]
                again = [ops.dispatch_again(x, routed.handle) for routed in sent]
                assert torch.equal(*again)
                assert torch.equal(*(ops.combine(y, routed.handle) for y, routed in zip(again, sent, strict=True)))

    all_ranks(2, body)


def test_ranks_that_differ() -> None:
    c = case(2, dtype=torch.bfloat16, hidden=48, seed=1)

    def body(group: Any) -> None:
        x, idx = c.x[group.rank].clone().requires_grad_(), c.topk_idx[group.rank]
        name: Any = ("fp8", "mxfp8")[group.rank]
        with c.buffer(group) as buffer, pytest.raises(moecomm.Mismatch) as raised:
            ops.dispatch(buffer, x, idx, quantize=name)
        assert raised.value.field == "quantize"
        for given, back, field in (
            ({}, {"grad_wire": name}, "quantize"),
            ({"grad_wire": (None, "exact")[group.rank]}, {}, "wire"),
        ):
            with c.buffer(group) as buffer:
                routed = ops.dispatch(buffer, x, idx, **given)  # type: ignore[arg-type]
                out = ops.combine(routed.x, routed.handle, **back)
                with pytest.raises(moecomm.Mismatch) as raised:
                    out.sum().backward()
                assert raised.value.field == field

    all_ranks(2, body)


@pytest.mark.parametrize("name", ops.GRAD_WIRES)
def test_small_gradients(name: str) -> None:
    """What the docstring of combine says about them."""
    least = {"fp8": 2.2e-10, "fp8_token": 4.3e-9, "int8_group": 3.9e-13}.get(name)
    if least is None:
        row = 1e-30 * torch.tensor([[1.0, -0.5]])
        assert ((travelled(row, name) - row).abs() <= 0.25 * row.abs()).all()
    else:
        assert not travelled(torch.full((1, 2), 0.98 * least), name).any()
        assert travelled(torch.full((1, 2), 1.02 * least), name).all()


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no format": ("quantize", {"quantize": "fp9"}),
    "a scale format of another": ("scale_format", {"quantize": "mxfp8", "scale_format": "ue8m0"}),
    "no scale of all values": ("x_global_scale", {"quantize": "fp8_tensor"}),
    "a scale that no format takes": ("x_global_scale", {"quantize": "mxfp8", "x_global_scale": 2.0}),
    "a scale without a format": ("x_global_scale", {"x_global_scale": 2.0}),
    "a negative scale": ("x_global_scale", {"quantize": "nvfp4", "x_global_scale": -1.0}),
    "two scales": ("x_global_scale", {"quantize": "nvfp4", "x_global_scale": torch.ones(2)}),
    "values without a format": ("dequantize", {"dequantize": False}),
    "no flag": ("dequantize", {"quantize": "fp8", "dequantize": "no"}),
    "values with gradients": ("dequantize", {"quantize": "fp8", "dequantize": False, "grad": True}),
    "a wire of no dtype": ("grad_wire", {"grad_wire": "mxfp8"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    c, (argument, given) = case(1, hidden=48, seed=1), REFUSED[what]
    with c.buffer(None) as buffer:
        x, options = c.x[0].clone().requires_grad_(given.get("grad", False)), {**given}
        options.pop("grad", None)
        with pytest.raises(moecomm.BadInput) as raised:
            ops.dispatch(buffer, x, c.topk_idx[0], **options)
        assert raised.value.argument == argument
        routed = ops.dispatch(buffer, x, c.topk_idx[0], quantize="fp8")
        with pytest.raises(moecomm.BadInput, match="grad_wire"):
            ops.combine(routed.x, routed.handle, grad_wire="nvfp4")


def test_gradients_of_a_dispatch_return_in_fp8() -> None:
    c = case(1, hidden=48, seed=1)
    with c.buffer(None) as buffer:
        x = c.x[0].clone().requires_grad_()
        routed = ops.dispatch(buffer, x, c.topk_idx[0], grad_wire="fp8", overflow="error")
        grad = torch.randn(routed.x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
        routed.x.backward(grad)
        handle = buffer.dispatch(c.x[0], c.topk_idx[0], sync=False).handle
        want = buffer.combine(grad, handle, weighted=False, wire="fp8")
        assert x.grad is not None and torch.equal(x.grad, want)
        assert not torch.equal(want, buffer.combine(grad, handle, weighted=False))


def layer(
    buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, layout: Layout, name: Any
) -> torch.Tensor:
    given: dict[str, Any] = {"layout": layout, "max_rows": 9 if layout == "batched" else 60}
    given |= {"quantize": name, "x_global_scale": GLOBAL.get(name), "grad_wire": "exact"}
    routed = ops.dispatch(buffer, x, idx, weights, **given)
    back: Any = name if name in ops.GRAD_WIRES else "mxfp8"
    return ops.combine(torch.tanh(routed.x), routed.handle, grad_wire=back) + x


@pytest.mark.parametrize(
    ("layout", "name"),
    few(itertools.product(LAYOUTS, formats.FORMATS), ("expert", "mxfp8"), ("batched", "nvfp4"), ("flat", "fp8")),
)
def test_a_compiled_layer_has_no_break_and_the_same_bits(layout: Layout, name: str) -> None:
    c = case(1, dtype=torch.bfloat16, hidden=48, seed=1)
    with c.buffer(None) as buffer:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for tokens in (9, 7, 1, 0):
            found = []
            for function in (compiled, layer):
                x, weights = (t[0][:tokens].clone().requires_grad_() for t in (c.x, c.topk_weights))
                out = function(buffer, x, c.topk_idx[0][:tokens], weights, layout, name)
                wanted = (x,) if layout == "flat" else (x, weights)
                found.append((out.detach(), *torch.autograd.grad(out.square().sum(), wanted)))
            assert all(map(torch.equal, *found)), f"{tokens} tokens"


def test_compiled_values_and_scales() -> None:
    c = case(1, dtype=torch.bfloat16, hidden=48, seed=1)

    def values(buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor, name: Any) -> list[torch.Tensor]:
        given: dict[str, Any] = {"quantize": name, "x_global_scale": GLOBAL.get(name), "dequantize": False}
        routed = ops.dispatch(buffer, x, idx, **given, overflow="error")
        return [t.view(torch.uint8) for t in (routed.x, routed.scales) if t is not None]

    with c.buffer(None) as buffer:
        for name in formats.FORMATS:
            compiled = torch.compile(values, fullgraph=True, backend="aot_eager")
            given = buffer, c.x[0], c.topk_idx[0], name
            assert all(map(torch.equal, compiled(*given), values(*given))), name
