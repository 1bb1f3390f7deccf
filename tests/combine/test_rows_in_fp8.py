"""combine(y=Fp8(...)): rows with scales are those that a caller would have dequantized."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm.combine import arguments
from moecomm.dispatch.routed import ChunkedHandle
from moecomm.errors import BadInput
from moecomm.fused import Fp8
from moecomm.testing import LocalBuffers

RANKS, HIDDEN, TOPK, TOKENS = 4, 208, 3, 20
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": 8, "topk": TOPK, "max_tokens": TOKENS, "backend": "host"}
FP8 = torch.float8_e4m3fn


def tokens(rank: int, layout: str, dtype: torch.dtype) -> dict[str, Any]:
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, 8, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    return {"x": torch.randn(TOKENS, HIDDEN, generator=g).to(dtype), "topk_idx": ids, "layout": layout}


def rows(shape: Any, groups: int, by_column: bool) -> Fp8:
    """Make rows of any e4m3 values but NaN, with scales of any magnitude."""
    g = torch.Generator().manual_seed(9)
    data = torch.randn(shape, generator=g).mul(100).clamp(-448, 448).to(FP8)
    scales = 10.0 ** (4 * torch.rand(*shape[:-1], groups, generator=g) - 2)
    return Fp8(data, scales.transpose(-1, -2).contiguous().transpose(-1, -2) if by_column else scales)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wire", [None, "exact", "fp8", "int8"])
def test_values_times_scales_are_rounded_once(wire: Any, dtype: torch.dtype, layout: str, groups: int) -> None:
    with LocalBuffers(RANKS, **SIZES, dtype=dtype) as buffers:
        arrived = buffers.dispatch([tokens(rank, layout, dtype) for rank in range(RANKS)])
        given = [rows(here.handle.y_shape, groups, by_column=rank % 2 == 0) for rank, here in enumerate(arrived)]
        wide = [y.scales.repeat_interleave(128 if groups > 1 else HIDDEN, dim=-1)[..., :HIDDEN] for y in given]
        plain = [(y.data.float() * scales).to(dtype) for y, scales in zip(given, wide, strict=True)]
        outs, want = (
            buffers.combine(
                [{"y": y, "handle": here.handle, "wire": wire} for y, here in zip(ys, arrived, strict=True)]
            )
            for ys in (given, plain)
        )
    assert all(map(torch.equal, outs, want))


def test_more_rows_than_are_dequantized_at_once() -> None:
    """Rows are dequantized in parts; with as many as two parts and a half, each row of `out` is its own."""
    count = arguments._AT_ONCE * 5 // 2
    sizes = {**SIZES, "hidden": 16, "topk": 1, "max_tokens": count}
    x, ids = torch.zeros(count, 16).bfloat16(), torch.zeros(count, 1, dtype=torch.int64)
    with moecomm.Buffer("self", **sizes) as buffer:
        routed = buffer.dispatch(x, ids, layout="expert")
        y = rows(routed.handle.y_shape, 1, by_column=False)
        assert torch.equal(buffer.combine(y, routed.handle), (y.data.float() * y.scales).bfloat16())


def test_chunks_of_rows_are_taken() -> None:
    call = tokens(0, "expert", torch.bfloat16)
    with moecomm.Buffer("self", **SIZES, capacity_factor=0.5) as buffer:
        routed = buffer.dispatch(**call, overflow="chunks")
        assert isinstance(routed.handle, ChunkedHandle)
        y = rows(routed.handle.y_shape, 2, by_column=False)
        wide = y.data.float() * y.scales.repeat_interleave(128, dim=1)[:, :HIDDEN]
        assert torch.equal(buffer.combine(y, routed.handle), buffer.combine(wide.bfloat16(), routed.handle))


def test_what_can_not_be_dequantized_is_named() -> None:
    call = tokens(0, "expert", torch.bfloat16)
    with moecomm.Buffer("self", **SIZES) as buffer:
        routed = buffer.dispatch(**call)
        data, scales = rows(routed.handle.y_shape, 2, by_column=False)
        for y, text in (
            ((data, scales, scales), "y: got a tuple of 3"),
            (Fp8(data.to(torch.int8), scales), "y: got torch.int8; want torch.float8_e4m3fn"),
            (Fp8(data[:-1], scales), "y: got shape"),
            (Fp8(data, scales.double()), "y: got torch.float64; want torch.float32"),
            (Fp8(data, scales[:-1]), "y: got shape"),
            (Fp8(data, torch.cat([scales, scales], dim=1)), "y: got 4 scales of a row; want 1 or 2"),
            (Fp8(data, scales.clone().requires_grad_()), "y: got a tensor that requires grad"),
        ):
            with pytest.raises(BadInput, match=text):
                buffer.combine(y, routed.handle)
        buffer.combine(Fp8(data, scales), routed.handle)
