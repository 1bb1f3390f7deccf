"""Bags of embedding rows: their sums, and the gradient of the tables."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import embedding_bag

from moecomm.errors import BadInput


class Entries(NamedTuple):
    """Entries of all bags, in the order in which a bag adds them.

    Attributes:
        bag: int64 `[entries]`: table * batch + sample.
        row: int64 `[entries]`: table * V + index, or T * V for an entry without a row.
    """

    bag: torch.Tensor
    row: torch.Tensor


def check_values(indices: torch.Tensor, offsets: torch.Tensor | None, rows: int) -> None:
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


def sums(tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, batch: int) -> torch.Tensor:
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
        return by_embedding_bag(tables, indices, offsets, batch)
    bag, row = _entries(indices, offsets, count, rows, batch)
    there = row < count * rows
    total = torch.zeros(count * batch, width, dtype=torch.float32, device=tables.device)
    total.index_add_(0, bag[there], tables.flatten(0, 1)[row[there]].float())
    return total.to(tables.dtype).view(count, batch, width)


def by_embedding_bag(
    tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, batch: int
) -> torch.Tensor:
    """Compute `sums` with torch's embedding_bag, which waits for no size.  No size but D may be 0."""
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


def scatter(grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Add gradients of bags to the rows that they consist of, in float32, and round once.

    Args:
        grad: `[T, batch, D]`.
        indices: as in `sums`.
        offsets: as in `sums`.
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


def _entries(indices: torch.Tensor, offsets: torch.Tensor | None, tables: int, rows: int, batch: int) -> Entries:
    flat = indices.flatten()
    place = torch.arange(len(flat), device=flat.device)
    if offsets is None:
        bag = place.div(max(indices.shape[2], 1), rounding_mode="floor")
    else:
        bag = torch.bucketize(place, offsets[1:], right=True)
    row = bag.div(max(batch, 1), rounding_mode="floor") * rows + flat
    return Entries(bag, torch.where((flat >= 0) & (flat < rows), row, tables * rows))
