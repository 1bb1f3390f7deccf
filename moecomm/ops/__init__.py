"""dispatch, combine and the whole layer as operators of torch: with gradients, and in graphs of torch.compile.

    routed = moecomm.ops.dispatch(buffer, x, topk_idx, topk_weights)
    y = experts(routed.x, routed.tokens_per_expert)
    out = moecomm.ops.combine(y, routed.handle)

    out = moecomm.ops.moe(buffer, x, topk_idx, topk_weights, w13, w2)  # with SwiGLU experts, in one

They differ from Buffer's own in three things.  Shapes never depend on what arrives: there are `max_rows` rows, and
counts on the device.  x, y and the routing weights have gradients, whose rounds are collective too: every rank that
took part in the forward pass runs the backward pass, and in the same order.  And a handle is plain: a tensor, strings
and numbers.

A compiler may change the order of rounds that do not depend on each other, and not alike on ranks whose tensors have
other sizes.  Layers one after the other do depend on each other; what stands side by side should share a dispatch, or
be compiled apart.

A gradient of a dispatch or of a layer can't be differentiated again, and there is no forward-mode AD: Unsupported.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moecomm.buffer import Buffer
from moecomm.core import shown, tangents
from moecomm.core.arrays import as_tensor
from moecomm.core.choices import Activation, Layout
from moecomm.core.integers import check_alignment
from moecomm.core.validation import check_flag, check_flags, check_name, check_same_device
from moecomm.dispatch.arguments import check_max_rows
from moecomm.dispatch.options import LAYOUTS, check_num_sms
from moecomm.errors import BadInput
from moecomm.fused.fp8_experts import as_weights
from moecomm.fused.layer import fused_or_not
from moecomm.ops import gradients, layer, rounds
from moecomm.ops.counted import counted
from moecomm.ops.handles import Handle

__all__ = ["Dispatched", "Handle", "combine", "dispatch", "dispatch_again", "moe"]

gradients.register()


class Dispatched(NamedTuple):
    """The tokens that arrived, as moecomm.Routed has them, in tensors of `max_rows` rows.

    Attributes:
        x: `[rows, H]` (batched `[E/R, rows, H]`, and so on) of the Buffer's dtype.  Rows where no token arrived are
            zeros, or not initialised with `zero_padding=False`.
        tokens_per_expert: int32 `[E/R]`.
        num_rows: int32 `[1]`: rows in use, as in moecomm.Routed.
        src: int32 `[rows, 2]`: source rank and token of each row, or -1, -1.
        row_weights: expert, batched: float32 `[rows]`: the routing weight of each row, or 0.
        topk_idx: flat: int64 `[rows, K]`: this rank's expert, or -1.
        topk_weights: flat: float32 `[rows, K]`, 0 beside -1: the caller's experts apply them.
        handle: for combine() and dispatch_again().
    """

    x: torch.Tensor
    tokens_per_expert: torch.Tensor
    num_rows: torch.Tensor
    src: torch.Tensor
    row_weights: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: Handle

    def __repr__(self) -> str:
        return shown.of_tensors("moecomm.ops.Dispatched", self._asdict())


@counted("buffer", 0)
def dispatch(
    buffer: Buffer | str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    layout: Layout = "expert",
    expert_alignment: int = 1,
    max_rows: int | None = None,
    zero_padding: bool = True,
    num_sms: int | None = None,
) -> Dispatched:
    """Buffer.dispatch as an operator.  Collective.  Gradients: x, topk_weights.

    Args:
        buffer: a Buffer, or its `name`.
        x: `[T, H]` of the Buffer's dtype.
        topk_idx: int64 or int32 `[T, K]`; -1 picks none.
        topk_weights: floating `[T, K]`, used in float32; None: every weight is 1.
        layout: "expert", "flat" or "batched".
        expert_alignment: expert: groups start at multiples of this.
        max_rows: rows to make room for, batched: of each expert; default: the worst case.  More is bad input on every
            rank.
        zero_padding: rows where no token arrived are zeros, and so are those of the gradient of y: sums over all
            rows are then right.  False saves a pass over the rows where experts go by the counts.
        num_sms: see Buffer.dispatch; of all rounds with the handle, and of backward passes.

    Raises:
        As Buffer.dispatch.
    """
    name = _name_of(buffer)
    x, topk_idx, weights = _routed(x, topk_idx, topk_weights)
    check_name("layout", layout, LAYOUTS)
    check_alignment("expert_alignment", expert_alignment)
    check_flag("zero_padding", zero_padding)
    check_max_rows(max_rows)  # -1 is the operator's word for the worst case
    check_num_sms(num_sms)
    tangents.refuse("moecomm.ops.dispatch", x, weights)
    rows, weights, local_idx, src, tokens_per_expert, num_rows, memory = rounds.dispatch(
        x,
        topk_idx.long() if topk_idx.dtype == torch.int32 else topk_idx,
        weights,
        name,
        layout,
        expert_alignment,
        -1 if max_rows is None else max_rows,
        bool(zero_padding),
        num_sms,
    )
    room = rows.shape[0] * (rows.shape[1] if layout == "batched" else 1)
    flat = layout == "flat"
    row_weights = None if flat else weights
    handle = Handle(memory, row_weights, name, layout, x.shape[0], room, bool(zero_padding), num_sms)
    return Dispatched(
        rows,
        tokens_per_expert,
        num_rows,
        src,
        row_weights,
        local_idx if flat else None,
        weights if flat else None,
        handle,
    )


@counted("handle", 1)
def dispatch_again(x: torch.Tensor, handle: Handle) -> torch.Tensor:
    """Sends other rows the way of an earlier dispatch, without routing.  Collective.  Gradient: x.

    Args:
        x: `[T, H]`, as many tokens as that dispatch had.
        handle: of it.

    Returns:
        Rows as `Dispatched.x` of that dispatch.

    Raises:
        As Buffer.dispatch; BadInput as well for a handle that is none.
    """
    _check_handle(handle)
    x = as_tensor("x", x)[0]
    check_same_device(x=x, handle=handle.memory)
    if x.ndim != 2:
        raise BadInput("x", f"shape {tuple(x.shape)}", "[tokens, hidden]")
    tangents.refuse("moecomm.ops.dispatch_again", x)
    rows: torch.Tensor = rounds.dispatch_again(
        x,
        handle.memory,
        handle.buffer,
        handle.layout,
        handle.max_rows,
        handle.zero_padding,
        handle.num_sms,
    )
    return rows


@counted("handle", 1)
def combine(y: torch.Tensor, handle: Handle, *, weighted: bool = True, wire: torch.dtype | None = None) -> torch.Tensor:
    """Buffer.combine as an operator.  Collective.  Gradients: y, and the weights in the handle, whose way home to
    topk_weights is that of the gradient of the dispatch.

    Args:
        y: rows as in `Dispatched.x`.  The gradient is computed in the Buffer's dtype and returned in that of y.
        handle: of the dispatch.
        weighted: expert, batched: multiply each row by `handle.row_weights`.
        wire: see Buffer.combine.

    Returns:
        `[T, H]` of the dtype of y: see Buffer.combine.

    Raises:
        As Buffer.combine; BadInput as well for a handle that is none.
    """
    _check_handle(handle)
    check_flag("weighted", weighted)
    y, row_weights = as_tensor("y", y)[0], handle.row_weights if weighted else None
    _check_wire(wire, y)
    check_same_device(y=y, handle=handle.memory, row_weights=row_weights)
    tangents.refuse("moecomm.ops.combine", y, row_weights)
    out: torch.Tensor = rounds.combine(
        y,
        row_weights,
        handle.memory,
        handle.buffer,
        handle.layout,
        handle.max_rows,
        handle.num_tokens,
        wire,
        handle.zero_padding,
        handle.num_sms,
    )
    return out


@counted("buffer", 0, rounds=2)
def moe(
    buffer: Buffer | str,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    w13: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    w2: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    activation: Activation = "swiglu",
    interleaved: bool = False,
    bias: torch.Tensor | None = None,
    max_rows: int | None = None,
    wire: torch.dtype | None = None,
    num_sms: int | None = None,
    check_weights: bool = False,
    fused: bool | None = None,
) -> torch.Tensor:
    """Buffer.moe as an operator: its bits, and gradients.  Collective.  Gradients: x, topk_weights, w13, w2, bias.

    The backward pass keeps the inputs alone and computes the rest again, in three rounds: x and the gradient are
    dispatched, their gradients combined.  Its grouped products are torch's, in the Buffer's dtype (on GPUs bfloat16,
    or what torch.nn.functional.grouped_mm takes besides), with SwiGLU in float32 between them; it takes room for
    `max_rows` rows, and neither `wire`, `num_sms` nor `fused` matter to it.  Gradients of w13, w2 are those of all
    ranks' tokens, that of a bias `[H]` of this rank's.

    Args:
        buffer: a Buffer, or its `name`.
        x: `[T, H]` of the Buffer's dtype.
        topk_idx: int64 or int32 `[T, K]`; -1 picks none.
        topk_weights: floating `[T, K]`, used in float32; None: every weight is 1.
        w13: `[E/R, 2 I, H]` of the Buffer's dtype.
        w2: `[E/R, H, I]`.  Both in FP8: pairs of float8_e4m3fn and float32 scales.
        activation, interleaved, bias, max_rows, wire, num_sms, check_weights, fused: see Buffer.moe.

    Returns:
        `[T, H]` of the dtype of x: see Buffer.moe.

    Raises:
        As Buffer.moe; Unsupported as well, at once, where a gradient of a layer with weights in FP8 is wanted.
    """
    name = _name_of(buffer)
    x, topk_idx, topk_weights = _routed(x, topk_idx, topk_weights)
    check_name("activation", activation, ("swiglu",))
    check_flags(interleaved=interleaved, check_weights=check_weights)
    check_max_rows(max_rows)
    _check_wire(wire, x)
    check_num_sms(num_sms)
    (w13, w13_scales), (w2, w2_scales) = (
        weights if isinstance(weights, tuple) else (weights, None)
        for weights in (as_weights("w13", w13), as_weights("w2", w2))
    )
    bias = None if bias is None else as_tensor("bias", bias)[0]
    check_same_device(x=x, w13=w13, w2=w2, bias=bias)
    for argument, scales in (("w13", w13_scales), ("w2", w2_scales)):
        check_same_device(x=x, **{argument: scales})
    tangents.refuse("moecomm.ops.moe", x, topk_weights, w13, w2, bias)
    out: torch.Tensor = layer.moe(
        x,
        topk_idx,
        topk_weights,
        w13,
        w13_scales,
        w2,
        w2_scales,
        bias,
        name,
        activation,
        bool(interleaved),
        max_rows,
        wire,
        num_sms,
        bool(check_weights),
        fused_or_not(fused),
    )
    return out


def _name_of(buffer: Buffer | str) -> str:
    if not isinstance(buffer, (Buffer, str)):
        raise BadInput("buffer", type(buffer).__name__, "a Buffer, or its .name")
    return buffer if isinstance(buffer, str) else buffer.name


def _routed(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens and their routing, with weights in float32.  An operator of torch does not name what is no tensor."""
    x, topk_idx = as_tensor("x", x)[0], as_tensor("topk_idx", topk_idx)[0]
    weights = None if topk_weights is None else as_tensor("topk_weights", topk_weights)[0]
    check_same_device(x=x, topk_idx=topk_idx, topk_weights=weights)
    if weights is None:
        return x, topk_idx, None
    if not weights.is_floating_point():
        raise BadInput("topk_weights", str(weights.dtype), "a floating dtype")
    return x, topk_idx, weights.float()


def _check_wire(wire: torch.dtype | None, y: torch.Tensor) -> None:
    """Rounds see to the rest."""
    if wire is not None and not isinstance(wire, torch.dtype):
        raise BadInput("wire", wire, f"None or the dtype of y, {y.dtype}")


def _check_handle(handle: Handle) -> None:
    """Buffer's own have other fields."""
    if not isinstance(handle, Handle):
        raise BadInput("handle", type(handle).__name__, "the .handle of what moecomm.ops.dispatch returned")
