"""The reduction of a layer: what the experts of a token have sent, weighted and added up at its source rank."""

from __future__ import annotations

import torch

from moecomm import _native
from moecomm.fused.kernels import TYPES, SharedKernel

# Bytes of a block's shared memory, slots of a warp, and, of a slot, bytes of all rows together.
_BYTES, _SLOTS, _SLOT, _WARPS = 220 * 1024, 3, 9216, 8
_STEP_BYTES = 512  # of a row: 16 a lane


def reduce_kernel(dtype: torch.dtype, hidden: int, topk: int) -> SharedKernel:
    """Adds up what has been received."""
    whole = -(-2 * hidden // _STEP_BYTES) * _STEP_BYTES
    piece = min(whole, 4 * _STEP_BYTES, max(1, _SLOT // (topk + 1) // _STEP_BYTES) * _STEP_BYTES)
    slot = _native.reduce_slot_bytes(topk, piece)
    warps = min(_WARPS, _BYTES // (_SLOTS * slot))
    config = f".type = Type::{TYPES[dtype]}, .hidden = {hidden}, .topk = {topk}"
    config += f", .warps = {warps}, .slots = {_SLOTS}, .piece_bytes = {piece}"
    entry = f"reduce_layer<ReduceConfig{{{config}}}>"
    return SharedKernel("fused/reduce", entry, "LayerArgs", 32 * warps, shared=warps * _SLOTS * slot)
