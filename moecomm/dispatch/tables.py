"""The tables that a dispatch keeps for rounds with its handle: one block of memory, which may be copied.

They contain no addresses, so a copy at another address, for example one that was offloaded and loaded again, works as
well.
"""

from __future__ import annotations

import copy
from typing import cast

import torch

from moecomm import _native
from moecomm.core.arrays import window_tensor
from moecomm.routed import Handle, Routed

_OF_ROUTE = ("token_rows", "token_owner", "token_slot", "sent", "ranges", "rows", "row_weights", "src")
_COUNTS = ("tokens_per_expert", "rows_per_expert", "num_rows")


def tables_of(routed: Routed) -> torch.Tensor:
    """Return the tables of a dispatch, in the window, as a uint8 tensor."""
    block = routed.handle.block
    address = routed.plan.base + block.offset
    return window_tensor(block, address, (block.nbytes,), torch.uint8, routed.plan.device, routed.plan.owner)


def moved(args: _native.DispatchArgs, distance: int) -> _native.DispatchArgs:
    """Return the arguments of a dispatch whose tables lie so many bytes further."""
    args = copy.copy(args)
    for field in _OF_ROUTE:
        if (address := getattr(args.route, field)) != 0:  # flat has neither rows nor row_weights
            setattr(args.route, field, address + distance)
    for field in _COUNTS:
        setattr(args, field, getattr(args, field) + distance)
    return args


def in_window(handle: Handle) -> Handle:
    """Return a handle whose tables are a copy in the window, where peers read weights."""
    rounds, memory = handle.rounds, cast("torch.Tensor", handle.block)
    (block,) = rounds.memory.allocate(memory.nbytes)
    address = handle.plan.base + block.offset
    rounds.session.order()  # a round on another stream may still use this memory
    window_tensor(block, address, memory.shape, torch.uint8, rounds.device, rounds.session.owner).copy_(memory)
    return Handle(rounds, handle.plan, moved(handle.args, address - memory.data_ptr()), block)


def over(memory: torch.Tensor, made: Handle) -> Handle:
    """Return a handle like `made` over `memory`: its tables, or a copy of them."""
    args = moved(made.args, memory.data_ptr() - made.plan.base - made.block.offset)
    # The tensor stands in for a block of the window: rounds only need it to keep the tables alive.
    return Handle(made.rounds, made.plan, args, cast("_native.Block", memory))
