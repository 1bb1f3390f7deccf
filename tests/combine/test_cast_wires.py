"""The wires "fp8" and "int8" of combine on CPU ranks: their bits, bounds of errors, and where they can't be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native, ops
from moecomm.base import formats
from moecomm.base.choices import CAST_WIRES, WIRES
from moecomm.base.protocol import TYPES
from moecomm.combine import reference
from moecomm.errors import BadInput, Mismatch
from moecomm.testing import LocalBuffers

from ..conftest import Ranks

RANKS, HIDDEN, TOPK, TOKENS = 4, 336, 3, 24
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": 8, "topk": TOPK, "max_tokens": TOKENS}
CASTS = ("fp8", "int8")


def lost(sums: torch.Tensor, wire: str) -> torch.Tensor:
    """Return the bound that reference.travelled() states, of float64 [T, H]."""
    groups = torch.nn.functional.pad(sums.abs(), (0, -sums.shape[1] % 128)).unflatten(1, (-1, 128))
    least = {"fp8": 1e-4, "int8": 1e-10}[wire]
    amax = groups.amax(dim=2).clamp(min=least).repeat_interleave(128, dim=1)[:, : sums.shape[1]]
    if wire == "int8":
        return (1 + 2**-22) * amax / 254 + 2**-22 * sums.abs()
    return (2**-4 + 2**-21) * sums.abs() + (1 + 2**-21) * 2**-10 * amax / 448


def call(rank: int, layout: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Make tokens whose groups of columns have magnitudes of their own."""
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=g) * 10.0 ** torch.randint(-3, 3, (TOKENS, HIDDEN), generator=g)
    ids = torch.rand(TOKENS, 8, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    return {
        "x": x.to(dtype),
        "topk_idx": ids,
        "topk_weights": torch.rand(TOKENS, TOPK, generator=g),
        "layout": layout,
    }


@pytest.mark.parametrize("wire", CASTS)
def test_every_bfloat16_value_comes_back_as_the_reference_says(wire: Any) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    by_magnitude = x[x.float().abs().nan_to_num(nan=torch.inf).argsort(stable=True)]
    rows = torch.cat([x.view(-1, 1024), by_magnitude.view(-1, 1024), x.view(1024, -1).T])
    sizes: dict[str, Any] = {"hidden": 1024, "num_experts": 1, "topk": 1, "max_tokens": len(rows)}
    with moecomm.Buffer("self", **sizes, backend="host", wire=wire) as buffer:
        routed = buffer.dispatch(rows, torch.zeros(len(rows), 1, dtype=torch.int64), layout="flat")
        out = buffer.combine(routed.x, routed.handle)
    want = reference.travelled(rows.float(), WIRES[wire])
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(), want.bfloat16().nan_to_num())
    groups = rows.double().unflatten(1, (-1, 128))
    whole = groups.isfinite().all(dim=2, keepdim=True).expand_as(groups).flatten(1)
    assert bool(want.isnan().eq(~whole).all()), "what is not finite makes NaN of its group"
    small = whole & (groups.abs().amax(dim=2, keepdim=True) <= 2.0**126).expand_as(groups).flatten(1)
    error = (want.double() - rows.double()).abs()
    bound = lost(rows.double().nan_to_num(), wire)
    assert bool((error <= bound)[small].all())
    assert bool(small.any()) and bool((error > 0.9 * bound)[small & (rows != 0)].any()), "the bound is tight"


@pytest.mark.parametrize("domain_ranks", [None, 2])
@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
@pytest.mark.parametrize("wire", CASTS)
def test_the_error_of_a_result_is_within_its_bound(wire: Any, layout: str, domain_ranks: int | None) -> None:
    calls = [call(rank, layout, torch.float32) for rank in range(RANKS)]
    domains: dict[str, Any] = {} if domain_ranks is None else {"domain_ranks": domain_ranks}
    with LocalBuffers(RANKS, **SIZES, **domains, dtype=torch.float32, backend="host") as buffers:
        arrived = buffers.dispatch(calls)
        outs = buffers.combine([{"y": here.x, "handle": here.handle, "wire": wire} for here in arrived])
    size = domain_ranks or RANKS
    for rank, (out, given) in enumerate(zip(outs, calls, strict=True)):
        x, owners = given["x"].double(), given["topk_idx"] // 2
        exact, bound = torch.zeros_like(x), torch.zeros_like(x)
        for first in range(0, RANKS, size):
            domain, off = torch.zeros_like(x), torch.zeros_like(x)
            for p in range(first, first + size):
                weights = (given["topk_weights"].double() * (owners == p)).sum(dim=1, keepdim=True)
                if layout == "flat":
                    weights = (owners == p).any(dim=1, keepdim=True).double()
                there = (owners == p).any(dim=1, keepdim=True)
                rounded = 2 * TOPK * 2.0**-24 * (weights * x).abs()  # of the float32 sum, which is what is cast
                domain += weights * x
                off += torch.where(there, lost((weights * x).abs() + rounded, wire) + rounded, 0.0)
            if first // size != rank // size:
                off += torch.where(domain != 0, lost(domain.abs() + off, wire), 0.0)
            exact, bound = exact + domain, bound + off
        bound += 2 * RANKS * 2.0**-24 * (exact.abs() + bound)
        error = (out.double() - exact).abs()
        assert bool((error <= bound).all()), (error - bound).max()
        assert bool((error > bound / 8).any()), "the bound says something"


@pytest.mark.parametrize("layout", ["flat", "expert"])
@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("name", CASTS)
def test_it_is_a_setting_of_the_buffer_and_has_a_dtype(name: Any, layout: str, in_window: bool) -> None:
    found = []
    for setting, wire in ((name, None), (None, name), ("exact", WIRES[name])):
        with LocalBuffers(RANKS, **SIZES, backend="host", wire=setting) as buffers:
            arrived = buffers.dispatch([call(rank, layout) for rank in range(RANKS)])
            ys = [here.x if in_window else here.x.clone() for here in arrived]
            found.append(
                buffers.combine(
                    [{"y": y, "handle": here.handle, "wire": wire} for y, here in zip(ys, arrived, strict=True)]
                )
            )
            plain = buffers.combine(
                [{"y": y, "handle": here.handle, "wire": y.dtype} for y, here in zip(ys, arrived, strict=True)]
            )
    for outs in found[1:]:
        assert all(map(torch.equal, outs, found[0]))
    assert not all(map(torch.equal, plain, found[0])), "this case rounds"


@pytest.mark.parametrize("wire", CASTS)
def test_operators_and_layers_pass_it_on(wire: Any) -> None:
    g = torch.Generator().manual_seed(1)
    x, ids = torch.randn(6, 64, generator=g), torch.randint(0, 2, (6, 2), generator=g)
    weights = torch.rand(6, 2, generator=g)
    w13, w2 = torch.randn(2, 64, 64, generator=g), torch.randn(2, 64, 32, generator=g)
    sizes: dict[str, Any] = {"hidden": 64, "num_experts": 2, "topk": 2, "max_tokens": 8, "dtype": torch.float32}
    with moecomm.Buffer("self", **sizes, backend="host") as buffer:
        sent = ops.dispatch(buffer, x, ids, weights, layout="expert")
        y = sent.x.clone().requires_grad_()
        out = ops.combine(y, sent.handle, wire=wire)
        routed = buffer.dispatch(x, ids, weights, layout="expert")
        assert torch.equal(out, buffer.combine(routed.x, routed.handle, wire=wire))
        out.sum().backward()
        assert y.grad is not None and bool(y.grad.any()), "gradients pass the cast as they are"
        layer = buffer.moe(x, ids, weights, w13, w2, wire=wire)
        exact = buffer.moe(x, ids, weights, w13, w2)
        assert torch.equal(layer, ops.moe(buffer, x, ids, weights, w13, w2, wire=wire))
        assert torch.equal(layer, reference.travelled(exact, WIRES[wire]))


@pytest.mark.parametrize("wire", CASTS)
def test_columns_that_are_no_multiple_of_16_are_bad_input(wire: Any) -> None:
    sizes: dict[str, Any] = {"hidden": 24, "num_experts": 1, "topk": 1, "max_tokens": 8}
    with moecomm.Buffer("self", **sizes, backend="host") as buffer:
        routed = buffer.dispatch(torch.zeros(1, 24).bfloat16(), torch.zeros(1, 1, dtype=torch.int64))
        with pytest.raises(BadInput, match=rf"wire: got '{wire}' with hidden = 24; want a multiple of 16"):
            buffer.combine(routed.x, routed.handle, wire=wire)


@pytest.mark.parametrize("hidden", [16, 128, 144, 7168])
def test_a_staged_row_is_no_wider_than_a_float32_one(hidden: int) -> None:
    for dtype in CAST_WIRES:
        found = _native.staged_bytes(int(TYPES[dtype]), hidden)
        assert found % 16 == 0 and hidden + 4 * -(-hidden // 128) <= found <= 4 * hidden


@pytest.mark.parametrize("wire", CASTS)
def test_quotients_next_to_a_tie_are_rounded_as_the_format_says(wire: Any) -> None:
    """Columns around every tie of groups with odd scales, in float32."""
    g = torch.Generator().manual_seed(3)
    amax = torch.rand(64, 1, generator=g).exp() * 10.0 ** torch.randint(-12, 30, (64, 1), generator=g)
    ties = (torch.arange(-127, 127) + 0.5) / 127 * amax.double()
    rows = torch.cat([ties.float().nextafter(torch.tensor(side)) for side in (-torch.inf, 0.0, torch.inf)], dim=1)
    rows = torch.cat([rows, torch.zeros(64, -rows.shape[1] % 127)], dim=1).unflatten(1, (-1, 127))
    rows = torch.cat([amax.unsqueeze(1).expand(-1, rows.shape[1], 1), rows], dim=2).flatten(1)
    sizes: dict[str, Any] = {"hidden": rows.shape[1], "num_experts": 1, "topk": 1, "max_tokens": len(rows)}
    with moecomm.Buffer("self", **sizes, dtype=torch.float32, backend="host", wire=wire) as buffer:
        routed = buffer.dispatch(rows, torch.zeros(len(rows), 1, dtype=torch.int64), layout="flat")
        out = buffer.combine(routed.x, routed.handle)
    name = CAST_WIRES[WIRES[wire]]
    assert torch.equal(out, formats.dequantize(*formats.quantize(rows, name), name))


def differ(rank: int, group: Any, wires: tuple[Any, ...]) -> str:
    sizes: dict[str, Any] = {"hidden": 64, "num_experts": 2, "topk": 1, "max_tokens": 8}
    with moecomm.Buffer(group, **sizes, backend="host", timeout_s=20) as buffer:
        routed = buffer.dispatch(torch.zeros(1, 64).bfloat16(), torch.zeros(1, 1, dtype=torch.int64))
        with pytest.raises(Mismatch, match="wire") as caught:
            buffer.combine(routed.x, routed.handle, wire=wires[rank])
    return str(caught.value)


@pytest.mark.parametrize("wires", [("fp8", None), ("int8", None), ("int8", "fp8")])
def test_ranks_that_differ_are_named(wires: tuple[Any, ...], ranks: Ranks) -> None:
    shown = [wire or "torch.bfloat16" for wire in wires]
    for rank, text in enumerate(ranks.run(2, differ, wires)):
        assert f"this rank has {shown[rank]}, rank {1 - rank} has {shown[1 - rank]}" in text
