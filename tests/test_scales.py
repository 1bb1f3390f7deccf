"""Scales beside rows: formats, layouts, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing import LocalBuffers

HIDDEN, TOKENS = 640, 6  # five groups of 128 columns
SIZES = {"hidden": HIDDEN, "num_experts": 4, "topk": 2, "max_tokens": 8, "dtype": torch.bfloat16}
LAYOUTS = ["flat", "expert", "batched"]


def call(rank: int, layout: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(rank)
    x = (torch.randn(TOKENS, HIDDEN, generator=g) * 2.0 ** torch.arange(TOKENS).unsqueeze(1)).bfloat16()
    return {"x": x, "topk_idx": torch.rand(TOKENS, 4, generator=g).argsort(dim=1)[:, :2], "layout": layout}


def valid(routed: moecomm.Routed) -> torch.Tensor:
    """Which rows of a Routed came: there is no padding here."""
    if routed.x.ndim == 2:
        return torch.arange(len(routed.x)) < routed.num_rows
    return torch.arange(routed.x.shape[1]) < routed.tokens_per_expert.unsqueeze(1)


def rows(routed: moecomm.Routed, tensor: Any) -> torch.Tensor:
    """The rows of a tensor of a Routed that came, all experts' one after the other."""
    came: torch.Tensor = tensor[valid(routed)]
    return came


def exponents(packed: torch.Tensor) -> torch.Tensor:
    """[rows, n] int32 -> [rows, 4 n]: the bytes, the lowest first."""
    return torch.stack([packed >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=-1).flatten(1)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_give_the_rows_back(layout: str, scale_format: str) -> None:
    with LocalBuffers(2, **SIZES, backend="host") as ranks:
        calls = [call(rank, layout) for rank in range(2)]
        options = {"quantize": "fp8", "scale_format": scale_format}
        for here in ranks.dispatch([{**c, **options} for c in calls]):
            q, scales, src = (rows(here, t) for t in (here.x.float(), here.scales, here.src))
            assert scales.shape == (len(q), 5)
            assert scales.dtype is (torch.float32 if scale_format == "fp32" else torch.float8_e8m0fnu)
            sent = torch.stack([calls[rank]["x"][token] for rank, token in src.tolist()]).float()
            got = q * scales.float().repeat_interleave(128, dim=1)
            assert bool(((got - sent).abs() <= sent.abs() / 16 + scales.float().amax() * 2**-9).all())
            if scale_format == "ue8m0":
                amax = sent.view(-1, 5, 128).abs().amax(dim=2)
                assert bool((scales.float() * 448 >= amax).all() and (scales.float() * 224 < amax).all())


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_hold_the_same_scales(layout: str, sync: bool) -> None:
    with LocalBuffers(2, **SIZES, backend="host") as ranks:
        calls = [{**call(rank, layout), "quantize": "fp8", "sync": sync} for rank in range(2)]
        for scale_format in ("fp32", "ue8m0"):
            by_row = ranks.dispatch([{**c, "scale_format": scale_format} for c in calls])
            by_column = ranks.dispatch([{**c, "scale_format": scale_format, "scale_layout": "column"} for c in calls])
            for one, two in zip(by_row, by_column, strict=True):
                assert two.scales is not None and one.scales is not None
                step = -(-two.x.shape[-2] // 4) * 4
                assert two.scales.shape[:-1] == two.x.shape[:-1]
                assert two.scales.stride()[-2:] == (1, step)
                assert two.scales.data_ptr() % 16 == 0
                mine, theirs = rows(one, one.scales.view(torch.uint8)), rows(two, two.scales)
                if scale_format == "fp32":
                    assert torch.equal(mine, theirs.contiguous().view(torch.uint8))
                else:
                    assert theirs.dtype is torch.int32 and theirs.shape[-1] == 2
                    assert torch.equal(exponents(theirs)[:, :5], mine.int())
                    assert not exponents(theirs)[:, 5:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8, torch.int16, torch.float8_e8m0fnu])
def test_scales_of_every_dtype_travel(dtype: torch.dtype, layout: str) -> None:
    with LocalBuffers(2, **SIZES, backend="host") as ranks:
        calls = [call(rank, layout) for rank in range(2)]
        columns = ["row", "column"] if dtype.itemsize == 4 else ["row"]
        for rank, given in enumerate(calls):
            given["x"] = given["x"].to(torch.float8_e4m3fn)
            numbers = torch.arange(rank * 100, rank * 100 + 3 * TOKENS).view(TOKENS, 3)
            given["scales"] = numbers.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else numbers.to(dtype)
        for scale_layout in columns:
            for here in ranks.dispatch([{**c, "scale_layout": scale_layout} for c in calls]):
                assert here.scales is not None and here.scales.dtype is dtype
                plain = here.scales.view(torch.uint8) if dtype.itemsize == 1 else here.scales
                got = rows(here, plain).tolist()
                want = [
                    [(100 * rank + 3 * token + i) for i in range(3)] for rank, token in rows(here, here.src).tolist()
                ]
                assert got == want


def test_a_repeat_may_have_scales_of_its_own() -> None:
    with LocalBuffers(2, **SIZES, backend="host") as ranks:
        calls = [call(rank, "expert") for rank in range(2)]
        first = ranks.dispatch([{**c, "quantize": "fp8"} for c in calls])
        again = ranks.dispatch(
            [
                {"x": c["x"], "handle": r.handle, "quantize": "fp8", "scale_layout": "column"}
                for c, r in zip(calls, first, strict=True)
            ]
        )
        for one, two in zip(first, again, strict=True):
            assert one.scales is not None and two.scales is not None
            assert torch.equal(one.scales, two.scales)
            assert two.scales.stride() == (1, -(-len(two.x) // 4) * 4)
            assert torch.equal(one.x.view(torch.uint8), two.x.view(torch.uint8))
