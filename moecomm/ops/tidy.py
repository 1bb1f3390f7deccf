"""Copies of a dispatch's metadata with defined values, 0 and -1, in rows without a token, and zeros in these rows."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from moecomm.gpu import padding, plain_kernel, row_pass
from moecomm.gpu.structs import fields_of


class About(NamedTuple):
    """Metadata of rows, as in Routed; weights: `topk_weights` `[rows, K]` (flat) or `row_weights`; ids: `topk_idx`."""

    weights: torch.Tensor
    src: torch.Tensor
    tokens_per_expert: torch.Tensor
    num_rows: torch.Tensor
    ids: torch.Tensor | None


class _Args(ctypes.Structure):
    """TidyArgs of csrc/elementwise/args.h."""

    _fields_ = fields_of("TidyArgs", PaddingArgs=padding.Args)


def kernel(ids: str, word: str) -> plain_kernel.PlainKernel:
    """Return the kernel for ids of C++ type `ids`; `word`: see padding.word_of()."""
    return row_pass.kernel("elementwise/used_rows", f"tidy<{ids}, {word}>", "TidyArgs")


def tidied(layout: str, found: About, rows: torch.Tensor | None = None) -> About:
    """Copy metadata out of the window, on the current stream; rows without a token get weight 0 and ids and src -1.

    `rows`: rows of the dispatch, contiguous `[rows, n]` or `[groups, rows of each, n]`; zeros are written into those
    without a token.
    """
    told = padding.told(layout, found.src, found.tokens_per_expert, found.num_rows)
    if found.src.is_cuda:
        return _by_kernel(found, told, rows)
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


def _by_kernel(found: About, told: dict[str, torch.Tensor], padded: torch.Tensor | None = None) -> About:
    made = About(*(None if tensor is None else torch.empty_like(tensor) for tensor in found))  # type: ignore[arg-type]
    rows = found.src.shape[:-1]
    count = rows.numel()
    each = found.weights.numel() // max(1, count)
    at, nbytes = (0, 0) if padded is None else (padded.data_ptr(), padded.shape[-1] * padded.itemsize)
    fields = [row_pass.address(tensor) for about in (found, made) for tensor in _in_order(about)]
    args = _Args(padding.args_of(at, nbytes, rows, **told), *fields, each, len(found.tokens_per_expert))
    ids = "i64" if found.ids is None else row_pass.IDS[found.ids.dtype]
    threads = count * each if padded is None else count * max(each, row_pass.ROW)
    row_pass.launch(kernel(ids, padding.word_of(at | nbytes)), found.src.device, threads, args)
    return made


def _in_order(about: About) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors in the order of TidyArgs."""
    return about.weights, about.ids, about.src, about.tokens_per_expert, about.num_rows
