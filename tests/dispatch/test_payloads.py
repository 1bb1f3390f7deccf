"""Rows of any type and width, and tensors beside them, arrive as they were sent; random cases have more of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import moecomm
from moecomm.base import formats
from moecomm.testing import LocalBuffers

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 5, "topk": 2, "max_tokens": 8, "dtype": torch.bfloat16}
T, H = 6, 64


@pytest.fixture(scope="module")
def buffer() -> Iterator[moecomm.Buffer]:
    with moecomm.Buffer("self", **SIZES, backend="host") as opened:
        yield opened


def ids() -> torch.Tensor:
    return torch.rand(T, 5, generator=torch.Generator().manual_seed(1)).argsort(dim=1)[:, :2]


def tokens_of(routed: moecomm.Routed) -> torch.Tensor:
    """The token of each row."""
    return routed.src[:, 1].long()


def test_a_list_of_payloads(buffer: moecomm.Buffer) -> None:
    """As FlashInfer sends them: values of 4 bits, their scales, and two tensors more."""
    x, scales = formats.quantize(torch.randn(T, H).bfloat16(), "nvfp4")
    extras = (torch.rand(T, 3, 2), torch.arange(T))
    routed = buffer.dispatch(x, ids(), scales=scales, extras=extras)
    token = tokens_of(routed)
    assert scales is not None and routed.scales is not None
    assert torch.equal(routed.x, x[token])
    assert torch.equal(routed.scales.view(torch.uint8), scales.view(torch.uint8)[token])
    assert [torch.equal(got, sent[token]) for got, sent in zip(routed.extras, extras, strict=True)] == [True, True]
    assert routed.extras[0].dtype is torch.float32 and routed.extras[1].dtype is torch.int64


def test_extras_beside_rows_of_the_buffer(buffer: moecomm.Buffer) -> None:
    x = torch.randn(T, H).bfloat16()
    routed = buffer.dispatch(x, ids(), extras=[torch.arange(T, dtype=torch.int32)])
    assert torch.equal(routed.x, x[tokens_of(routed)]) and torch.equal(routed.extras[0].long(), tokens_of(routed))
    assert torch.equal(buffer.combine(routed.x, routed.handle), x + x)
    assert buffer.dispatch(x, ids()).extras == ()


def test_arrays_of_other_libraries(buffer: moecomm.Buffer) -> None:
    x, more = np.arange(T * 7, dtype=np.int16).reshape(T, 7), np.arange(T, dtype=np.float32)
    routed = buffer.dispatch(x, ids().numpy(), extras=(more,))
    token = torch.from_dlpack(routed.src)[:, 1].numpy() if not isinstance(routed.src, np.ndarray) else routed.src[:, 1]
    assert (np.asarray(routed.x) == x[token]).all() and (np.asarray(routed.extras[0]) == more[token]).all()


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_cast_in_dispatch_is_the_cast_before_it(name: str, buffer: moecomm.Buffer) -> None:
    x, of_all = torch.randn(T, H).bfloat16(), {"fp8_tensor": 0.01, "nvfp4": torch.tensor([100.0])}.get(name)
    routed = buffer.dispatch(x, ids(), quantize=name, x_global_scale=of_all)  # type: ignore[call-overload]
    rows, scales = formats.quantize(x, name, global_scale=of_all)
    token = tokens_of(routed)
    assert routed.x.dtype is rows.dtype and torch.equal(routed.x.view(torch.uint8), rows.view(torch.uint8)[token])
    assert (routed.scales is None) == (scales is None)
    if scales is not None:
        assert torch.equal(routed.scales.view(torch.uint8), scales.view(torch.uint8)[token])
    assert routed.handle.y_shape == (2 * T, H)


@pytest.mark.parametrize("layout", ["expert", "flat", "batched"])
def test_swizzled_scales(layout: str, buffer: moecomm.Buffer) -> None:
    given: dict[str, Any] = {"quantize": "mxfp8", "layout": layout}
    x = torch.randn(T, H).bfloat16()
    plain, swizzled = buffer.dispatch(x, ids(), **given), buffer.dispatch(x, ids(), **given, scale_layout="swizzled")
    back = formats.unswizzle(swizzled.scales, *plain.scales.shape[-2:]).view(torch.uint8)
    used = slice(None)
    if layout == "batched":
        used = torch.arange(plain.x.shape[1]) < plain.tokens_per_expert[:, None]  # type: ignore[assignment]
    assert torch.equal(back[used], plain.scales.view(torch.uint8)[used])


def test_halves_and_chunks() -> None:
    x, more = torch.arange(T * 9).view(T, 9).to(torch.int8), torch.arange(T)
    with moecomm.Buffer("self", **SIZES, backend="host", capacity_factor=0.3) as buffer:
        routed = buffer.dispatch(x, ids(), extras=(more,))
        assert isinstance(routed.handle, moecomm.Handle) and hasattr(routed.handle, "chunks")
        assert torch.equal(routed.x, x[tokens_of(routed)]) and torch.equal(routed.extras[0], tokens_of(routed))
        again = buffer.dispatch(x.flip(0), handle=routed.handle, extras=(more,))
        assert torch.equal(again.x, x.flip(0)[tokens_of(routed)])
        few = ids()[:1]
        routed = buffer.dispatch_begin(x[:1], few, extras=(more[:1],))
        buffer.dispatch_end(routed)
        assert torch.equal(routed.x, x[:1].expand(2, -1)) and routed.extras[0].tolist() == [0, 0]


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "wider than a row of the Buffer": ("x", {"x": torch.zeros(T, 2 * H + 1).char()}),
    "narrow rows of the Buffer's dtype": ("x", {"x": torch.zeros(T, H // 2).bfloat16()}),
    "... beside extras": ("x", {"x": torch.zeros(T, H // 2).bfloat16(), "extras": (torch.zeros(T),)}),
    "... beside a format": ("x", {"x": torch.zeros(T, H // 2).bfloat16(), "quantize": "mxfp8"}),
    "... and no tokens": ("x", {"x": torch.zeros(0, H // 2).bfloat16(), "topk_idx": ids()[:0]}),
    "8 bytes": ("x", {"x": torch.zeros(T, H, dtype=torch.int64)}),
    "no bytes": ("x", {"x": torch.zeros(T, 0).char()}),
    "extras of other tokens": ("extras[1]", {"extras": (torch.zeros(T), torch.zeros(T + 1, 2))}),
    "extras that are one tensor": ("extras", {"extras": torch.zeros(T, 2)}),
    "too many bytes": ("extras", {"extras": (torch.zeros(T, 1 << 18),)}),
    "a scale that no format takes": ("x_global_scale", {"x_global_scale": 2.0}),
    "no scale of all values": ("x_global_scale", {"quantize": "fp8_tensor"}),
    "swizzled scales of 4 bytes": ("scale_layout", {"quantize": "fp8_token", "scale_layout": "swizzled"}),
    "no scales to swizzle": ("scale_layout", {"scale_layout": "swizzled"}),
    "a cast of rows that were cast": ("x", {"quantize": "mxfp8", "x": torch.zeros(T, H).char()}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_travel(what: str, buffer: moecomm.Buffer) -> None:
    argument, given = REFUSED[what]
    with pytest.raises(moecomm.BadInput) as caught:
        buffer.dispatch(**{"x": torch.zeros(T, H).bfloat16(), "topk_idx": ids(), **given})
    assert caught.value.argument == argument
    buffer.dispatch(torch.zeros(T, H).bfloat16(), ids())


def test_narrow_rows_of_the_buffers_dtype_travel_as_bytes_or_with_scales(buffer: moecomm.Buffer) -> None:
    x = torch.randn(T, H // 2).bfloat16()
    as_bytes = buffer.dispatch(x.view(torch.uint8), ids())
    scaled = buffer.dispatch(x, ids(), scales=torch.ones(T, 1))
    for routed in (as_bytes, scaled):
        assert torch.equal(routed.x.view(torch.bfloat16), x[tokens_of(routed)])


@pytest.mark.parametrize("name", formats.FORMATS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, -torch.nan])
def test_what_is_no_number_is_cast_alike(name: str, value: float, buffer: moecomm.Buffer) -> None:
    """Bit by bit: x86 gives infinity * 0 a sign."""
    scale = 1.0 if name == "fp8_tensor" else None
    x = torch.linspace(-2, 2, T * H).view(T, H).bfloat16()
    x[0, 1], x.view(torch.int16)[1, 2] = value, -1  # and a NaN with other bits
    for scale_format in ("fp32", "ue8m0") if name == "fp8" else ("fp32",):
        how: dict[str, Any] = {"quantize": name, "scale_format": scale_format}
        routed = buffer.dispatch(x, ids(), **how, x_global_scale=scale)
        wanted = formats.quantize(x, name, scale_format=scale_format, global_scale=scale)
        for got, want in zip((routed.x, routed.scales), wanted, strict=True):
            if want is not None:
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)[tokens_of(routed)])


def test_extras_without_room_between_domains() -> None:
    with LocalBuffers(**SIZES, ranks=4, domain_ranks=2, backend="host") as ranks:
        calls: list[dict[str, Any]] = [{"x": torch.zeros(T, H).bfloat16(), "topk_idx": ids()} for _ in range(4)]
        with pytest.raises(moecomm.BadInput, match="between domains"):
            ranks.dispatch([{**call, "extras": (torch.zeros(T, 4096),)} for call in calls])
