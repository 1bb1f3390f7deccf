"""Copies of a dispatch's metadata with defined values, 0 and -1, in rows without a token, and zeros in these rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moecomm.gpu import padding, row_pass
from moecomm.gpu.structs import struct


class About(NamedTuple):
    """Metadata of rows, as in Routed; weights: `topk_weights` `[rows, K]` (flat) or `row_weights`; ids: `topk_idx`."""

    weights: torch.Tensor
    src: torch.Tensor
    tokens_per_expert: torch.Tensor
    num_rows: torch.Tensor
    ids: torch.Tensor | None


def tidied(layout: str, found: About, rows: torch.Tensor | None = None) -> About:
    """Copy metadata out of the window, on the current stream; rows without a token get weight 0 and ids and src -1.

    `rows`: rows of the dispatch, contiguous `[rows, n]` or `[groups, rows of each, n]`; zeros are written into those
    without a token.
    """
    told = padding.told(layout, found.src, found.tokens_per_expert, found.num_rows)
    if found.src.is_cuda:
        return _on_gpu(found, told, rows)
    empty = padding.empty(found.src.shape[:-1], **told)
    if rows is not None:
        padding.clear(rows, empty)
    of_row = empty.unsqueeze(-1) if layout == "flat" else empty
    return About(
        found.weights.masked_fill(of_row, 0.0),
        found.src.masked_fill(empty.unsqueeze(-1), -1),
        found.tokens_per_expert.clone(),
        found.num_rows.clone(),
        None if found.ids is None else found.ids.masked_fill(of_row, -1),
    )


def _on_gpu(found: About, told: dict[str, torch.Tensor], padded: torch.Tensor | None) -> About:
    made = About(*(None if tensor is None else torch.empty_like(tensor) for tensor in found))  # type: ignore[arg-type]
    rows = found.src.shape[:-1]
    count = rows.numel()
    each = found.weights.numel() // max(1, count)
    at, nbytes = (0, 0) if padded is None else (padded.data_ptr(), padded.shape[-1] * padded.itemsize)
    ids = "i64" if found.ids is None else row_pass.IDS[found.ids.dtype]
    row_pass.run(
        row_pass.kernel("tidy", ids, padding.word_of(at | nbytes)),
        found.src.device,
        count * each if padded is None else count * max(each, row_pass.ROW),
        of=struct("PaddingArgs")(**padding.fields_of(at, nbytes, rows, **told)),
        weights=found.weights.data_ptr(),
        ids=row_pass.address(found.ids),
        src=found.src.data_ptr(),
        counts=found.tokens_per_expert.data_ptr(),
        num_rows=found.num_rows.data_ptr(),
        to_weights=made.weights.data_ptr(),
        to_ids=row_pass.address(made.ids),
        to_src=made.src.data_ptr(),
        to_counts=made.tokens_per_expert.data_ptr(),
        to_num_rows=made.num_rows.data_ptr(),
        each=each,
        experts=len(found.tokens_per_expert),
    )
    return made
