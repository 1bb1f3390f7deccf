"""The tables that a dispatch keeps for rounds with its handle: one block of memory, which may be copied.

They contain no addresses, so a copy at another address, for example one that was offloaded and loaded again, works as
well.  A handle over such a copy has a tensor in the place of its block of the window.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple, cast

import torch

from moecomm import _native
from moecomm.base.arrays import window_tensor
from moecomm.dispatch.routed import DispatchPlan, Handle, Routed

_OF_ROUTE = ("token_rows", "token_owner", "token_slot", "sent", "ranges", "rows", "row_weights", "src", "forwarded")
_COUNTS = ("tokens_per_expert", "rows_per_expert", "num_rows")
_OFFSETS = ("out_src", "out_topk_idx", "out_weights")  # from the begin of the window
_MOST = (1 << 64) - 1  # addresses and offsets wrap around


def tables_of(routed: Routed) -> torch.Tensor:
    """Return the tables of a dispatch as a uint8 tensor."""
    handle = routed.handle
    memory: Any = handle.block
    if isinstance(memory, torch.Tensor):
        return memory
    plan = handle.plan
    return window_tensor(memory, plan.base + memory.offset, (memory.nbytes,), torch.uint8, plan.device, plan.owner)


def begin(handle: Handle) -> int:
    """Return the address of a handle's tables."""
    memory: Any = handle.block
    return memory.data_ptr() if isinstance(memory, torch.Tensor) else handle.plan.base + memory.offset


def table(handle: Handle, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return one of a handle's tables, in the window or outside.  The tensor keeps them alive."""
    memory: Any = handle.block
    if not isinstance(memory, torch.Tensor):
        return window_tensor(memory, address, shape, dtype, handle.plan.device, handle.plan.owner)
    first = (address & _MOST) - memory.data_ptr()
    return memory[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class _Kept(NamedTuple):
    handle: Handle
    plan: DispatchPlan


def kept(handle: Handle, name: str) -> torch.Tensor:
    """Return a tensor of Routed that a handle keeps, by its name there: any but x, scales and extras."""
    found = handle.plan.tensor(name, _Kept(handle, handle.plan))
    assert found is not None, "of this layout"
    return found


def moved(args: _native.DispatchArgs, distance: int) -> _native.DispatchArgs:
    """Return the arguments of a dispatch whose tables lie so many bytes further."""
    args = copy.copy(args)
    for field in _OF_ROUTE:
        if (address := getattr(args.route, field)) != 0:  # flat has neither rows nor row_weights
            setattr(args.route, field, address + distance)
    for field in _COUNTS:
        setattr(args, field, getattr(args, field) + distance)
    for field in _OFFSETS:
        if (offset := getattr(args, field)) != 0:
            setattr(args, field, (offset + distance) & _MOST)
    return args


def in_window(handle: Handle) -> Handle:
    """Return a handle whose tables are a copy in the window, where peers read weights."""
    rounds, memory = handle.rounds, cast("torch.Tensor", handle.block)
    block = rounds.memory.scratch(memory.nbytes)
    copied = rounds.copy_to(block, memory)
    return Handle(rounds, handle.plan, moved(handle.args, copied.data_ptr() - memory.data_ptr()), block)


def over(memory: torch.Tensor, made: Handle) -> Handle:
    """Return a handle like `made` over `memory`: its tables, or a copy of them."""
    args = moved(made.args, memory.data_ptr() - begin(made))
    # The tensor stands in for a block of the window: rounds only need it to keep the tables alive.
    return Handle(made.rounds, made.plan, args, cast("_native.Block", memory))
