"""Combine of rows whose tokens were dispatched in chunks: a round for each chunk, over the tokens of that chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.combine.arguments import Tensors
from moecomm.dispatch.routed import ChunkedHandle
from moecomm.dispatch.tables import in_window


def combine(given: Tensors, handle: ChunkedHandle, topk: int, one: Callable[..., Any]) -> Any:
    """Combine in as many rounds as the dispatch took.

    Args:
        given: the tensors of the combine, checked.
        handle: of the dispatch.
        topk: experts a token picks.
        one: combines such tensors with the handle of one chunk: y, handle, out, bias, weight_grads, topk_weights.
    """
    y = given.y.detach()
    out = y.new_empty((handle.num_tokens, y.shape[-1])) if given.out is None else given.out
    grads = None if given.weight_grads is None else y.new_empty((handle.num_tokens, topk), dtype=torch.float32)
    for chunk in handle.chunks:
        tokens = chunk.tokens
        bias = given.bias if given.bias is None or given.bias.ndim == 1 else given.bias[tokens]
        wanted = None if given.weight_grads is None else chunk.of(given.weight_grads)
        weights = None if given.topk_weights is None else given.topk_weights[tokens]
        found = one(chunk.of(y), in_window(chunk.handle), bias, wanted, weights)
        if grads is not None:
            found, grads[tokens] = found
        out[tokens] = found
    return out if grads is None else (out, grads)
