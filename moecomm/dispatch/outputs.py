"""The tensors of a Routed: views of the window memory that a dispatch has filled."""

from __future__ import annotations

import torch

from moecomm.core.arrays import window_tensor
from moecomm.routed import Routed


def x(routed: Routed) -> torch.Tensor:
    """The rows."""
    args, plan = routed.args, routed.plan
    return _payload(routed, plan.base + args.out_x, (*plan.rows_shape(args), args.hidden), plan.x_dtype)


def scales(routed: Routed) -> torch.Tensor | None:
    """The scales beside them, by row or by column."""
    args, plan = routed.args, routed.plan
    dtype = plan.scales_dtype
    if dtype is None:
        return None
    *groups, rows = plan.rows_shape(args)
    columns = args.scale_bytes // dtype.itemsize
    if args.scale_columns == 0:
        return _payload(routed, plan.base + args.out_scales, (*groups, rows, columns), dtype)
    by_column = _payload(routed, args.scale_columns, (*groups, columns, args.scale_stride), dtype)
    by_row = by_column.transpose(-1, -2)
    if rows == args.scale_stride:
        return by_row
    by_row = by_row[..., :rows, :]
    stride = -(-rows // 4) * 4
    if stride == args.scale_stride:
        return by_row
    # Fewer rows came than there was room for.  Grouped GEMMs want the stride that belongs to the number of rows.
    exact = torch.empty((*groups, columns, stride), dtype=dtype, device=by_row.device).transpose(-1, -2)[..., :rows, :]
    return exact.copy_(by_row)


def tokens_per_expert(routed: Routed) -> torch.Tensor:
    """Rows of each expert here."""
    handle = routed.handle
    return _kept(routed, handle.args.tokens_per_expert, (handle.plan.local_experts,), torch.int32)


def rows_per_expert(routed: Routed) -> torch.Tensor:
    """Rows of each expert here, padding included."""
    handle = routed.handle
    return _kept(routed, handle.args.rows_per_expert, (handle.plan.local_experts,), torch.int64)


def num_rows(routed: Routed) -> torch.Tensor:
    """Rows in use."""
    return _kept(routed, routed.handle.args.num_rows, (1,), torch.int32)


def src(routed: Routed) -> torch.Tensor:
    """Source rank and token of each row."""
    args, plan = routed.handle.args, routed.plan
    return _kept(routed, plan.base + args.out_src, (*plan.rows_shape(args), 2), torch.int32)


def topk_idx(routed: Routed) -> torch.Tensor | None:
    """flat: the experts here of each row."""
    args, plan = routed.handle.args, routed.plan
    if plan.layout != "flat":
        return None
    dtype = torch.int64 if args.idx_bytes == 8 else torch.int32
    return _kept(routed, plan.base + args.out_topk_idx, (args.max_rows, plan.topk), dtype)


def topk_weights(routed: Routed) -> torch.Tensor | None:
    """flat: their weights."""
    args, plan = routed.handle.args, routed.plan
    if plan.layout != "flat":
        return None
    return _kept(routed, plan.base + args.out_weights, (args.max_rows, plan.topk), torch.float32)


def row_weights(routed: Routed) -> torch.Tensor | None:
    """expert, batched: the weight of each row."""
    args, plan = routed.handle.args, routed.plan
    if plan.layout == "flat":
        return None
    return _kept(routed, plan.base + args.out_weights, plan.rows_shape(args), torch.float32)


MAKE = {
    "x": x,
    "scales": scales,
    "tokens_per_expert": tokens_per_expert,
    "rows_per_expert": rows_per_expert,
    "num_rows": num_rows,
    "src": src,
    "topk_idx": topk_idx,
    "topk_weights": topk_weights,
    "row_weights": row_weights,
}


def _payload(routed: Routed, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    plan = routed.plan
    return window_tensor(routed.payload, address, shape, dtype, plan.device, plan.owner)


def _kept(routed: Routed, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    plan = routed.plan
    return window_tensor(routed.handle.block, address, shape, dtype, plan.device, plan.owner)
