"""`y` in this rank's window: where peers read it in place, tensors for it, and copies."""

from __future__ import annotations

import math

import torch

from moecomm import _native
from moecomm.base.arrays import window_tensor
from moecomm.base.choices import CAST_WIRES, Layout
from moecomm.base.protocol import DTYPES
from moecomm.base.validation import check_dtype
from moecomm.combine.options import Options, wire_dtype
from moecomm.dispatch.arguments import check_handle
from moecomm.dispatch.routed import ChunkedHandle, Handle, has_arrived
from moecomm.dispatch.tables import kept
from moecomm.errors import BadInput
from moecomm.gpu import used_rows
from moecomm.rounds.rounds import Rounds

# Peers that read in place are awaited before the round ends, which takes longer than a copy of fewer bytes.
_LEAST: float = 2 << 20


def reads_in_place(rounds: Rounds, layout: Layout, options: Options, dtype: torch.dtype) -> bool:
    """Return whether peers read a `y` in the window where it lies, unless gradients of weights travel with it.

    Else this rank casts rows or adds them up first, wherever they lie.
    """
    if options.unsummed:
        return True
    wire = wire_dtype(options.wire or rounds.settings.wire, dtype)  # may be anything here
    return not any(wire is cast for cast in CAST_WIRES) and (layout == "flat" or rounds.on_cpu)


def empty(rounds: Rounds, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
    """Buffer.empty."""
    rounds.require_usable()
    check_arrived(rounds, handle)
    check_dtype("dtype", dtype, DTYPES)
    if isinstance(handle, ChunkedHandle):
        return torch.empty(handle.y_shape, dtype=dtype, device=rounds.device)
    try:
        block = rounds.memory.rows(_nbytes(handle, dtype))
    except BadInput:
        block = None
    if block is None or not rounds.memory.stays(block):
        rounds.warn_of_copies()
        return torch.empty(handle.y_shape, dtype=dtype, device=rounds.device)
    return _tensor(rounds, block, handle, dtype)


def least_bytes(rounds: Rounds, layout: Layout, options: Options) -> float:
    """Return from how many bytes on a `y` that a call itself makes lies in the window; math.inf: it never does."""
    if options.unsummed:  # which reads nowhere else
        return 0
    return _LEAST if reads_in_place(rounds, layout, options, rounds.dtype) else math.inf


def for_call(rounds: Rounds, handle: Handle) -> torch.Tensor | None:
    """Return an uninitialized `y` of the Buffer's dtype in the window, for a call that frees it before it returns.

    None: there is no room.  Where the tables of the dispatch have found none, the combine needs what there is for
    weights.
    """
    if type(handle.block) is not _native.Block:
        return None
    try:
        block = rounds.memory.scratch(_nbytes(handle, rounds.dtype))
    except BadInput:
        return None
    rounds.session.order()  # a round on another stream may still use this memory
    return _tensor(rounds, block, handle, rounds.dtype)


def where_peers_read(rounds: Rounds, handle: Handle, y: torch.Tensor) -> torch.Tensor:
    """Return `y` in the window: itself, or a copy of its rows in use.  Raises BadInput where there is no room."""
    if y.numel() == 0 or rounds.session.context.in_heap(y.data_ptr()):
        return y
    block = rounds.memory.rows(y.nbytes)
    rounds.session.order()
    to = _tensor(rounds, block, handle, y.dtype)
    if handle.layout == "batched":
        used_rows.copy(to, y.contiguous(), counts=kept(handle, "tokens_per_expert"))
    else:
        used_rows.copy(to, y.contiguous(), num_rows=kept(handle, "num_rows"))
    return to


def check_arrived(rounds: Rounds, handle: Handle) -> None:
    """Raise BadInput unless the handle is of a dispatch of this Buffer that has arrived."""
    check_handle(rounds, handle)
    if not has_arrived(handle.args):
        raise BadInput("handle", "one of a dispatch that has only begun", "dispatch_end(routed) first")


def _nbytes(handle: Handle, dtype: torch.dtype) -> int:
    return math.prod(handle.y_shape) * dtype.itemsize


def _tensor(rounds: Rounds, block: _native.Block, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
    address = handle.plan.base + block.offset
    return window_tensor(block, address, handle.y_shape, dtype, rounds.device, rounds.session.owner)
