"""Copies of a dispatch's metadata with defined values, 0 and -1, in rows without a token."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from moecomm.gpu import padding, plain_kernel, row_pass
from moecomm.gpu.structs import fields_of


class About(NamedTuple):
    """Metadata of rows, as in Routed; weights: `topk_weights` `[rows, K]` (flat) or `row_weights`; ids: `topk_idx`."""

    weights: torch.Tensor
    ids: torch.Tensor | None
    src: torch.Tensor
    tokens_per_expert: torch.Tensor
    num_rows: torch.Tensor


class _Args(ctypes.Structure):
    """TidyArgs of csrc/elementwise/args.h."""

    _fields_ = fields_of("TidyArgs", PaddingArgs=padding.Args)


def kernel(ids: str) -> plain_kernel.PlainKernel:
    """Return the kernel for ids of C++ type `ids`."""
    return row_pass.kernel("elementwise/used_rows", f"tidy<{ids}>", "TidyArgs")


def tidied(layout: str, found: About) -> About:
    """Copy metadata out of the window, on the current stream; rows without a token get weight 0 and ids and src -1."""
    told = padding.told(layout, found.src, found.tokens_per_expert, found.num_rows)
    if found.src.is_cuda:
        return _by_kernel(found, told)
    empty = padding.empty(found.src.shape[:-1], **told)
    of_row = empty.unsqueeze(-1) if layout == "flat" else empty
    return About(
        found.weights.masked_fill(of_row, 0.0),
        None if found.ids is None else found.ids.masked_fill(of_row, -1),
        found.src.masked_fill(empty.unsqueeze(-1), -1),
        found.tokens_per_expert.clone(),
        found.num_rows.clone(),
    )


def _by_kernel(found: About, told: dict[str, torch.Tensor]) -> About:
    made = About(*(None if tensor is None else torch.empty_like(tensor) for tensor in found))  # type: ignore[arg-type]
    rows = found.src.shape[:-1]
    count = rows.numel()
    each = found.weights.numel() // max(1, count)
    at = map(row_pass.address, (*found, *made))
    args = _Args(padding.args_of(0, 0, rows, **told), *at, each, len(found.tokens_per_expert))
    ids = "i64" if found.ids is None else row_pass.IDS[found.ids.dtype]
    row_pass.launch(kernel(ids), found.src.device, count * each, args)
    return made
