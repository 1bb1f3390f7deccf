"""Native casts of weights on CPU ranks have the bits of the plain torch ones, which specify them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moecomm import formats
from moecomm.base.protocol import DTYPES
from moecomm.fused import fp8
from moecomm.transfer.casts import CASTS, _quantized, kinds_of

ROWS = tuple(name for name in CASTS if name != "fp8")
FACTORS = (1.0, 2688 / 3.0, 1e-20, 1e20)  # of NVFP4


def _matrices(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Ordinary values of all magnitudes, any bits at all, subnormals, zeros, infinities and NaNs, of any width."""
    g = torch.Generator().manual_seed(0)
    for columns in (2, 16, 18, 34, 130, 256, 1000):
        for scale in (1, 1e-38, 1e-30, 1e-6, 1e30):
            yield (torch.randn(7, columns, generator=g) * scale).to(dtype)
    yield torch.randint(0, 256, (256, 512 * dtype.itemsize), generator=g, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        each = torch.arange(1 << 16).to(torch.uint16).view(dtype)
        for width in (2, 256, 512):
            yield each[torch.randperm(1 << 16, generator=g)].view(-1, width)
    else:
        tiny = torch.randint(0, 1 << 24, (64, 512), generator=g, dtype=torch.int32).view(torch.float32)
        yield from (tiny, -tiny)
    strange = torch.randn(130, 300, generator=g)
    strange[::3], strange[5, 7], strange[6, 9], strange[8, 3] = 0, torch.inf, torch.nan, -torch.nan
    yield strange.to(dtype)
    yield torch.randn(300, 129, generator=g).to(dtype)[:, :128]  # with gaps


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_cast_as_formats_does(name: str, dtype: torch.dtype) -> None:
    for x in _matrices(dtype):
        for factor in FACTORS if name == "nvfp4" else (None,):
            how = {} if factor is None else {"global_scale": torch.tensor([factor])}
            for mine, wanted in zip(_quantized(x, name, **how), formats.quantize(x, name, **how), strict=True):
                assert wanted is not None and mine.dtype is wanted.dtype and mine.shape == wanted.shape
                assert torch.equal(_bits(mine), _bits(wanted)), (x.shape, factor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_cast_as_plain_torch_does(dtype: torch.dtype) -> None:
    for x in _matrices(dtype):
        found = fp8.quantize_weights(x)
        data, scales = torch.empty_like(found.data), torch.empty_like(found.scales)
        fp8._quantize_blocks(x, data, scales)
        assert torch.equal(_bits(found.data), _bits(data)), x.shape
        # A NaN has any bits.
        assert torch.equal(found.scales.isnan(), scales.isnan())
        assert torch.equal(found.scales.nan_to_num(7.0), scales.nan_to_num(7.0)), x.shape


def test_blocks_without_addresses_are_cast_by_torch() -> None:
    """Cast fake tensors, in transformations and traces of torch, and tensors whose memory has other values."""
    w = torch.randn(130, 144)
    wanted = fp8.quantize_weights(w)
    with FakeTensorMode() as mode:
        fake = fp8.quantize_weights(mode.from_tensor(w))
    for tensors in (fake, fp8.quantize_weights(w.to("meta"))):
        assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in wanted]
    negative = fp8.quantize_weights(torch._neg_view(w))
    traced = torch.compile(fp8.quantize_weights, backend="eager")(w)
    for found, sign in ((negative, 0x80), (traced, 0)):
        assert torch.equal(_bits(found.data) ^ sign, _bits(wanted.data)) and torch.equal(found.scales, wanted.scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_factor_of_nvfp4_is_that_of_the_largest_magnitude(dtype: torch.dtype) -> None:
    for x in (*_matrices(dtype), torch.zeros(3, 16, dtype=dtype), -torch.ones(3, 16, dtype=dtype)):
        amax = x.abs().amax().float().clamp(1e-30, torch.finfo(torch.float32).max)
        kind = kinds_of({"w": x.shape}, dtype, "nvfp4")["w"]
        values, scales, factor = kind.apply(x)
        given = torch.full((1,), 2688.0) / amax
        wanted = formats.quantize(x, "nvfp4", global_scale=given)
        assert factor.isnan() if amax.isnan() else torch.equal(factor, given.reciprocal())
        if not amax.isnan():
            for mine, other in zip((values, scales), wanted, strict=True):
                assert other is not None and torch.equal(_bits(mine), _bits(other))
