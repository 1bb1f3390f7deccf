"""The tensors of a Routed: views of the window memory that a dispatch has filled, or copies outside of the window.

Outputs whose blocks do not stay (moecomm/rounds/memory.py) are copied out before the call returns, on the stream of the
round.  Peers do not access the outputs of a round that has ended, so each rank decides alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from moecomm import _native
from moecomm.base.arrays import DLPACK_WORDS
from moecomm.dispatch.routed import DispatchPlan, Routed
from moecomm.dispatch.tables import begin, moved, table, tables_of
from moecomm.gpu import used_rows
from moecomm.rounds.rounds import Rounds


def x(routed: Routed) -> torch.Tensor:
    """The rows."""
    return routed.plan.rows_tensor(routed)


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


BLOCK = _native.Block  # isinstance(..., torch.Tensor) takes much longer
_NOTHING = cast("_native.Block", _native.Arena(0, 256).allocate(0))


class Outside(DispatchPlan):
    """The DispatchPlan of a Routed with tensors outside of the window."""

    def __init__(self, inside: DispatchPlan) -> None:
        self._inside = inside
        self.layout, self.base, self.topk, self.local_experts = (
            inside.layout,
            inside.base,
            inside.topk,
            inside.local_experts,
        )
        self.x_dtype, self.scales_dtype = inside.x_dtype, inside.scales_dtype
        self.device, self.owner = inside.device, inside.owner
        self.rows_shape, self.run, self.record, self.trim = inside.rows_shape, inside.run, inside.record, inside.trim
        self.placed: dict[str, torch.Tensor | None] = {}  # x and scales, if they lie outside
        self.sources: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies that are not made yet: to, from

    def rows_tensor(self, routed: Any) -> torch.Tensor:
        placed = self.placed.get("x")
        return self._inside.rows_tensor(routed) if placed is None else placed

    def tensor(self, name: str, routed: Any) -> torch.Tensor | None:
        return self.placed[name] if name in self.placed else MAKE[name](routed)


def place_tables(rounds: Rounds, routed: Routed[Any, Any, Any, Any]) -> None:
    """Give the tables of a dispatch a place outside of the window, unless they stay there; copy_out() fills it."""
    handle = routed.handle
    if type(handle.block) is not BLOCK or rounds.memory.stays(handle.block):
        return
    inside = tables_of(routed)
    outside = torch.empty_like(inside)
    _outside(routed).sources.append((outside, inside))
    # `routed.args` is what the round itself still needs.
    handle.args = moved(handle.args, outside.data_ptr() - begin(handle))
    handle.block = cast("_native.Block", outside)


def place_rows(rounds: Rounds, routed: Routed[Any, Any, Any, Any]) -> None:
    """Give rows and scales a place outside of the window, unless they stay there; copy_out() fills it.

    Their tensors may be made from then on, also before the dispatch has arrived.
    """
    if rounds.memory.stays(routed.payload):
        return
    rounds.warn_of_copies()
    inside = {"x": x(routed), "scales": scales(routed)}
    plan = _outside(routed)
    for name, tensor in inside.items():
        if tensor is None:
            plan.placed[name] = None
            continue
        # torch.empty_like() would drop the gap behind a column of scales.
        outside = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        plan.placed[name] = outside
        plan.sources.append((outside, tensor))
    routed.payload = _NOTHING  # the tensors in `sources` keep the block


def copy_out(rounds: Rounds, routed: Routed[Any, Any, Any, Any]) -> None:
    """Copy outputs that do not stay out of the window, once they have arrived, and free their memory."""
    place_tables(rounds, routed)
    place_rows(rounds, routed)
    fill(routed)


def fill(routed: Routed[Any, Any, Any, Any]) -> None:
    """Copy arrived outputs to those places outside of the window that they have so far."""
    plan: Any = routed.plan
    if type(plan) is not Outside:
        return
    sources, plan.sources = plan.sources, []
    # The counts may move with the tables, which come first.
    for to, inside in sources:
        if to is not plan.placed.get("x"):
            as_bytes(to).copy_(as_bytes(inside))
        elif plan.layout == "batched":
            used_rows.copy(as_bytes(to), as_bytes(inside), counts=tokens_per_expert(routed))
        else:
            used_rows.copy(as_bytes(to), as_bytes(inside), num_rows=num_rows(routed))


def _outside(routed: Routed[Any, Any, Any, Any]) -> Outside:
    plan = routed.plan
    if not isinstance(plan, Outside):
        routed.plan = plan = Outside(plan)
    return plan


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return float8 as bytes: not every operation knows such types."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _payload(routed: Routed, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    plan = routed.plan
    return routed.payload.torch_tensor(address, shape, *DLPACK_WORDS[dtype, plan.device], plan.owner)


def _kept(routed: Routed, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return table(routed.handle, address, shape, dtype)
