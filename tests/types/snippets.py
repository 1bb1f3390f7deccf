"""Programs of users, for mypy --strict.  An unneeded ignore is an error, so mypy must refuse each marked line."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import assert_type

import moecomm
from moecomm import Buffer, Handle, Routed
from moecomm.fused import Fp8

T = torch.Tensor


def words(buffer: Buffer, x: T, idx: T, layer: Any) -> None:
    buffer.dispatch(x, idx, layout="exprt")  # type: ignore[call-overload]
    buffer.dispatch(x, idx, quantize="fp4")  # type: ignore[call-overload]
    buffer.dispatch(x, idx, quantize="fp8", scale_format="ue8m1")  # type: ignore[call-overload]
    buffer.dispatch(x, idx, quantize="fp8", scale_layout="columns")  # type: ignore[call-overload]
    buffer.dispatch(x, idx, max_row=4)  # type: ignore[call-overload]
    buffer.dispatch_begin(x, idx, layout="exprt")  # type: ignore[call-overload]
    buffer.dispatch_begin(x, idx, sync=True)  # type: ignore[call-overload]
    buffer.combine(x, buffer.dispatch(x, idx).handle, wire="bf16")  # type: ignore[call-overload]
    buffer.moe(x, idx, None, x, x, activation="gelu")  # type: ignore[call-overload]
    buffer.moe(x, idx, None, x, x, fused="three launches")  # type: ignore[call-overload]
    Buffer(hidden=64, num_experts=8, topk=2, max_tokens=4, backend="nvlink")  # type: ignore[arg-type]
    moecomm.ops.dispatch(buffer, x, idx, layout="exprt")  # type: ignore[arg-type]
    moecomm.ops.moe(buffer, x, idx, None, x, x, fused="yes")  # type: ignore[arg-type]
    moecomm.Router(64, 8, 2, gate="softmin")  # type: ignore[arg-type]
    workspace = moecomm.overlap.Workspace("self", 4096)
    assert_type(moecomm.overlap.all_gather_matmul(x, x, workspace), T)
    assert_type(moecomm.overlap.all_gather_matmul(x, x, workspace, return_gathered=True), tuple[T, T])
    fp8 = moecomm.fused.Fp8(x, x)
    assert_type(moecomm.overlap.all_gather_matmul(fp8, fp8, workspace), T)
    assert_type(
        moecomm.overlap.all_gather_matmul((x, x), fp8, workspace, return_gathered=True), tuple[T, moecomm.fused.Fp8]
    )
    moecomm.overlap.matmul_all_reduce(x, x, workspace, fused="yes")  # type: ignore[arg-type]
    moecomm.overlap.Workspace("self", 4096, backend="nvlink")  # type: ignore[arg-type]
    sizes = moecomm.nn.ExpertParallel(hidden=64, intermediate=64, num_experts=8, topk=2, max_tokens=4)
    assert_type(sizes.open(), Buffer)
    moecomm.nn.ExpertParallel(
        hidden=64,
        intermediate=64,
        num_experts=8,
        topk=2,
        max_tokens=4,
        gate="softmin",  # type: ignore[arg-type]
        backend="nvlink",  # type: ignore[arg-type]
    )


def arrays(buffer: Buffer, x: T, idx: T, weights: T, scales: T) -> None:
    plain = buffer.dispatch(x, idx, weights, sync=True)
    assert_type(plain, Routed[T, None, None, T])
    assert_type(plain.x, T)
    assert_type(plain.scales, None)
    assert_type(plain.row_weights, T)
    assert_type(plain.num_rows, T)
    assert_type(plain.handle, Handle)
    cast = buffer.dispatch_begin(x, idx, layout="batched", quantize="fp8", scale_format="ue8m0", max_rows=4)
    assert_type(cast.scales, T)
    assert_type(buffer.dispatch_end(cast).x, T)
    flat = buffer.dispatch(x, idx, layout="flat", scales=scales)
    assert_type(flat.scales, T)
    assert_type(flat.topk_idx, T)
    assert_type(flat.row_weights, None)
    again = buffer.dispatch(x, handle=flat.handle)
    assert_type(again, Routed)
    assert_type(again.x, T)
    assert_type(again.scales, T | None)
    for routed in (plain, flat, again):
        of_any_layout(routed)


def of_any_layout(routed: Routed) -> T:
    return routed.x + 1


def chosen_later(buffer: Buffer, x: T, idx: T, layout: moecomm.base.choices.Layout, quantize: bool) -> None:
    routed = buffer.dispatch(x, idx, layout=layout, quantize="fp8" if quantize else None)
    assert_type(routed, Routed)


def of_another_library(buffer: Buffer, x: Any, idx: Any) -> None:
    assert_type(buffer.dispatch(x, idx).x, Any)


def back(buffer: Buffer, y: T, handle: Handle, grads: T) -> None:
    assert_type(buffer.combine(y, handle), T)
    assert_type(buffer.combine(y, handle, weight_grads=grads), tuple[T, T])
    assert_type(buffer.combine(y, handle, wire=torch.bfloat16, weighted=False), T)
    assert_type(buffer.combine(y, handle, wire="fp8"), T)
    assert_type(buffer.combine(y, handle, wire="int8"), T)
    assert_type(buffer.combine(Fp8(y, y), handle), Any)
    assert_type(buffer.moe(y, y, None, y, y, fused=True), T)
    assert_type(moecomm.ops.dispatch(buffer, y, y, layout="flat").x, T)
