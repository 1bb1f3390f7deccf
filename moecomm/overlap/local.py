"""Computations of one rank in plain torch: products, sums over ranks, and bags of embedding rows.

Sums are in float32, and rounded to the dtype once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn.functional import embedding_bag

from moecomm.errors import BadInput
from moecomm.fused.fp8 import Fp8, widen
from moecomm.fused.gemm import grouped_gemm
from moecomm.fused.kernels import MOST_GROUPS, unfit
from moecomm.overlap.sizes import GROUP, OF_FP8, Matrix


def product(x: Matrix, w: Matrix) -> torch.Tensor:
    """Compute `x @ w.mT` in the dtype of x, which is that of w; both may be batched alike.  FP8: in bfloat16."""
    values = x.data if isinstance(x, Fp8) else x
    device = values.device.type
    if torch.is_autocast_enabled(device):  # it would choose another dtype
        with torch.autocast(device, enabled=False):
            return product(x, w)
    if isinstance(x, Fp8) or isinstance(w, Fp8):
        if device != "cpu" and isinstance(x, Fp8) and isinstance(w, Fp8) and _has_kernel(w.data):
            return _by_kernel(x, w)
        return multiply(x, wide_weights(w), OF_FP8)
    if device == "cpu":  # some of torch's 16-bit products on CPUs round between blocks of K
        return multiply(x, w.float(), x.dtype)
    return x @ w.mT


def multiply(x: Matrix, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `x @ w.mT` in float32, rounded to `dtype`; w: in float32.  Autocast is off."""
    x = widen(*x, 1) if isinstance(x, Fp8) else x.float()
    return (x @ w.mT).to(dtype)


def wide_weights(w: Matrix) -> torch.Tensor:
    """Return weights in float32; FP8: times their scales."""
    return widen(*w, GROUP) if isinstance(w, Fp8) else w.float()


def _has_kernel(w: torch.Tensor) -> bool:
    """Return whether the grouped GEMM multiplies by such FP8 weights on their device."""
    columns, depth = w.shape[-2:]
    hopper = w.is_cuda and torch.cuda.get_device_capability(w.device) == (9, 0)
    experts = w.shape[0] if w.ndim == 3 else 1
    return hopper and w.numel() > 0 and experts <= MOST_GROUPS and not unfit(columns, depth, True, False, True)


def _by_kernel(x: Fp8, w: Fp8) -> torch.Tensor:
    """Compute the product by the grouped GEMM: each matrix of w is an expert, for as many rows."""
    rows = x.data.shape[-2]
    if w.data.ndim == 2:
        w = Fp8(w.data.unsqueeze(0), w.scales.unsqueeze(0))
    counts = torch.full((len(w.data),), rows, dtype=torch.int32, device=x.data.device)
    return grouped_gemm(x, w, counts)


def sum_in_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Add tensors of one dtype in float32, in their order, and round once."""
    first, *others = parts
    total = first.float()
    for part in others:
        total = total + part.float()
    return total.to(first.dtype)


class _Entries(NamedTuple):
    """Entries of all bags, in the order in which a bag adds them.

    Attributes:
        bag: int64 `[entries]`: table * batch + sample.
        row: int64 `[entries]`: table * V + index, or T * V for an entry without a row.
    """

    bag: torch.Tensor
    row: torch.Tensor


def check_bags(indices: torch.Tensor, offsets: torch.Tensor | None, rows: int) -> None:
    """Raise BadInput for indices of no row or offsets of no bags.  It reads the values: CPUs only."""
    if indices.numel():
        least, most = map(int, indices.aminmax())
        if least < -1 or most >= rows:
            raise BadInput("indices", least if least < -1 else most, f"-1 to {rows - 1}")
    if offsets is not None:
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(indices):
            raise BadInput("offsets", f"{int(offsets[0])} to {int(offsets[-1])}", f"0 to {len(indices)}")
        if bool((offsets.diff() < 0).any()):
            raise BadInput("offsets", "offsets that decrease", "the end of each bag at or after its begin")


def bag_sums(tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, batch: int) -> torch.Tensor:
    """Add up bags in float32, in the order of their entries, and round once.

    Args:
        tables: `[T, V, D]`.
        indices: int64 `[T, batch, L]`, or `[total]` with offsets; other indices than 0 to V - 1 add nothing.
        offsets: int64 `[T * batch + 1]`.
        batch: samples.

    Returns:
        `[T, batch, D]` of the dtype of tables.
    """
    count, rows, width = tables.shape
    if not (rows and batch and indices.numel()):
        return tables.new_zeros(count, batch, width)
    if tables.is_cuda:
        return bag_sums_by_torch(tables, indices, offsets, batch)
    bag, row = _entries(indices, offsets, count, rows, batch)
    there = row < count * rows
    total = torch.zeros(count * batch, width, dtype=torch.float32, device=tables.device)
    total.index_add_(0, bag[there], tables.flatten(0, 1)[row[there]].float())
    return total.to(tables.dtype).view(count, batch, width)


def bag_sums_by_torch(
    tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, batch: int
) -> torch.Tensor:
    """Compute `bag_sums` with torch's embedding_bag, which waits for no size.  No size but D may be 0."""
    count, rows, width = tables.shape
    if offsets is None:
        offsets = torch.arange(count * batch + 1, device=indices.device) * indices.shape[2]
    flat = indices.flatten()
    place = torch.arange(len(flat), device=flat.device)
    table = torch.bucketize(place, offsets[batch::batch].contiguous(), right=True).clamp(max=count - 1)
    valid = (flat >= 0) & (flat < rows)
    found = embedding_bag(
        table * rows + flat.clamp(0, rows - 1),
        tables.flatten(0, 1),
        offsets,
        mode="sum",
        per_sample_weights=valid.to(tables.dtype),
        include_last_offset=True,
    )
    return found.view(count, batch, width)


def scatter_bags(grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Add gradients of bags to the rows that they consist of, in float32, and round once.

    Args:
        grad: `[T, batch, D]`.
        indices: as in `bag_sums`.
        offsets: as in `bag_sums`.
        rows: V.

    Returns:
        `[T, V, D]` of the dtype of grad: for each row the sum over its entries in order, with deterministic bits.
    """
    count, batch, width = grad.shape
    bag, row = _entries(indices, offsets, count, rows, batch)
    total = torch.zeros(count * rows + 1, width, dtype=torch.float32, device=grad.device)
    given = grad.flatten(0, 1)[bag].float()
    # On GPUs index_add is not deterministic, and index_put is.  On CPUs it is the other way round.
    total = total.index_put((row,), given, accumulate=True) if grad.is_cuda else total.index_add(0, row, given)
    return total[:-1].to(grad.dtype).view(count, rows, width)


def _entries(indices: torch.Tensor, offsets: torch.Tensor | None, tables: int, rows: int, batch: int) -> _Entries:
    flat = indices.flatten()
    place = torch.arange(len(flat), device=flat.device)
    if offsets is None:
        bag = place.div(max(indices.shape[2], 1), rounding_mode="floor")
    else:
        bag = torch.bucketize(place, offsets[1:], right=True)
    row = bag.div(max(batch, 1), rounding_mode="floor") * rows + flat
    return _Entries(bag, torch.where((flat >= 0) & (flat < rows), row, tables * rows))
