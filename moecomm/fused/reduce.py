"""The reduce step of a fused layer: weights and adds up, at the source rank, the rows that a token's experts sent."""

from __future__ import annotations

from functools import lru_cache

import torch

from moecomm import _native
from moecomm.fused.kernels import TYPES, SharedKernel

# Shared memory of a block, slots of a warp, bytes of all rows in a slot, most warps of a block.
_BYTES, _SLOTS, _SLOT, _WARPS = 220 * 1024, 3, 9216, 8
_STEP_BYTES = 512  # bytes of a row that a warp reads at once: 16 a lane


@lru_cache(maxsize=64)
def reduce_kernel(dtype: torch.dtype, hidden: int, topk: int) -> SharedKernel:
    """Return the kernel that reduces received rows of `dtype`, `topk` a token."""
    whole = -(-2 * hidden // _STEP_BYTES) * _STEP_BYTES
    piece = min(whole, 4 * _STEP_BYTES, max(1, _SLOT // (topk + 1) // _STEP_BYTES) * _STEP_BYTES)
    slot = _native.reduce_slot_bytes(topk, piece)
    warps = min(_WARPS, _BYTES // (_SLOTS * slot))
    config = f".type = Type::{TYPES[dtype]}, .hidden = {hidden}, .topk = {topk}"
    config += f", .warps = {warps}, .slots = {_SLOTS}, .piece_bytes = {piece}"
    entry = f"reduce_layer<ReduceConfig{{{config}}}>"
    return SharedKernel("fused/reduce", entry, "LayerArgs", 32 * warps, shared=warps * _SLOTS * slot)
