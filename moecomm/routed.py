"""What a dispatch hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moecomm import _native

if TYPE_CHECKING:
    from moecomm.buffer import Buffer


class Handle:
    """Where the tokens of one dispatch went: what combine, and a dispatch that repeats it, need.  Opaque.

    It holds on to window memory until it is gone; one handle serves any number of combines and repeats.
    """

    def __init__(self, buffer: Buffer, layout: str, num_tokens: int, topk_idx: torch.Tensor) -> None:
        self.buffer = buffer
        self.layout = layout
        self.num_tokens = num_tokens
        self.topk_idx = topk_idx  # keeps the ids alive: the device may still read them
        self.route = _native.Route()
        self.block: _native.Block | None = None
        self.y_shape: tuple[int, ...] = ()  # what combine's y must be
        self.failed = False  # the round was void: nothing to combine
        self.routed: Routed | None = None


@dataclass
class Routed:
    """The tokens that arrived at this rank's experts.  R ranks, K = topk, H = hidden, E = num_experts.

    Attributes:
        x: rows of the payload's dtype: `[rows, H]` (flat, expert) or `[E/R, R * max_tokens, H]` (batched).
        scales: a row of scales beside each row of `x`, or None.
        tokens_per_expert: int32 `[E/R]`, without padding, on the device.
        num_rows: int32 `[1]`, on the device: flat: rows in use; expert: the end of the last group, padding included;
            batched: the sum of `tokens_per_expert`.  Rows past it are not initialised.
        src: int32 `[rows, 2]` (batched `[E/R, R * max_tokens, 2]`): source rank and token of each row; -1, -1 in
            padding.
        topk_idx: flat: `[rows, K]` in the dtype of the ids given: this rank's expert, 0 to E/R - 1, or -1 where it
            is elsewhere.
        topk_weights: flat: float32 `[rows, K]`, 0 beside -1.
        row_weights: expert, batched: float32 `[rows]` (`[E/R, R * max_tokens]`), the routing weight of each row, 0
            in padding.
        handle: for combine, and to repeat the dispatch.
    """

    x: Any
    scales: Any | None
    tokens_per_expert: Any
    num_rows: Any
    src: Any
    topk_idx: Any | None
    topk_weights: Any | None
    row_weights: Any | None
    handle: Handle
