"""combine: check what the caller passed, say it in one struct; the backend's executor does the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from moecomm import _native, packets
from moecomm.arrays import window_tensor
from moecomm.combine.arguments import check
from moecomm.combine.plan import Combining, Options, Plan
from moecomm.dispatch.arguments import check_handle
from moecomm.errors import BadInput
from moecomm.routed import Handle
from moecomm.settings import DTYPES

if TYPE_CHECKING:
    from moecomm.buffer import Buffer

_COPIED_ROWS = 2  # rows of y for each token of all ranks, if they have as many as this one

__all__ = ["Combining", "Plan", "empty", "finish", "prepare", "run"]


def prepare(
    buffer: Buffer,
    y: Any,
    handle: Handle,
    *,
    out: Any = None,
    bias: Any = None,
    weighted: bool = True,
    weight_grads: Any = None,
    wire: torch.dtype | None = None,
    num_sms: int | None = None,
    topk_weights: Any = None,
    goes_on: bool = False,
) -> Combining:
    """Checks the arguments; see Buffer.combine.

    `goes_on`: the dispatch is of the same call.  What it has left behind is not looked at: some ranks would see it
    already, and others wait for them in vain.
    """
    if goes_on:
        buffer.require_open()
    else:
        buffer.require_usable()
    _check_ended(buffer, handle)
    copy: _native.Block | None = None
    if isinstance(y, torch.Tensor):
        if handle.layout == "flat" and buffer.session.pulls_flat_rows and weight_grads is None:
            copy = _copied_in(buffer, y, handle)
        address = 0 if copy is None else handle.plan.base + copy.offset
        for plan in buffer.combine_plans.get((handle.layout, y.dtype, weighted, wire, num_sms), ()):
            combining = plan.start(handle, y, out, bias, weight_grads, topk_weights, address)
            if combining is not None:
                return combining
        if copy is not None:
            y = window_tensor(copy, address, handle.y_shape, y.dtype, buffer.device, buffer.session.owner)
    return _start_anew(buffer, y, handle, out, bias, weighted, weight_grads, wire, num_sms, topk_weights)


def run(combining: Combining) -> None:
    """Hands what was prepared to the executor."""
    combining.plan.run(combining.args)


def finish(buffer: Buffer, combining: Combining) -> Any:
    """Hands the result out; on CPUs after a look at how the round went."""
    combining.inputs = None
    if buffer.on_cpu:
        buffer.raise_failure()
    back, grads = combining.back, combining.out_weight_grads
    if grads is None:
        return combining.out
    return combining.out, grads if back is None else back(grads)


def empty(buffer: Buffer, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
    """See Buffer.empty."""
    buffer.require_usable()
    _check_ended(buffer, handle)
    if dtype not in DTYPES:
        raise BadInput("dtype", dtype, " or ".join(map(str, DTYPES)))
    (block,) = buffer.memory.allocate(math.prod(handle.y_shape) * dtype.itemsize)
    address = handle.plan.base + block.offset
    return window_tensor(block, address, handle.y_shape, dtype, buffer.device, buffer.session.owner)


def _copied_in(buffer: Buffer, y: torch.Tensor, handle: Handle) -> _native.Block | None:
    """Flat rows where peers can read them: a copy in the window, or None where they are read, or staged, as they are.

    Left alone where they are in the window, where our tokens come home in packets, where there is no room, where most
    rows would be those that did not come (a copy does not know how many came, staging does), and where it is not what
    combine takes, which is found out later.
    """
    if y.layout is not torch.strided or buffer.session.context.in_heap(y.data_ptr()):
        return None
    if packets.carry_home(buffer.hidden * y.itemsize, handle.num_tokens, buffer.topk, buffer.packet_room):
        return None
    most_rows = _COPIED_ROWS * buffer.num_ranks * handle.num_tokens
    fits = y.shape == handle.y_shape and y.shape[0] <= most_rows and y.dtype in DTYPES and y.device == buffer.device
    if not fits:
        return None
    nbytes = y.numel() * y.itemsize
    try:
        (block,) = buffer.memory.allocate(nbytes)
    except BadInput:  # no room
        return None
    if nbytes:
        rows = y.contiguous()
        buffer.session.copy_in(handle.plan.base + block.offset, rows.data_ptr(), nbytes)
    return block


def _check_ended(buffer: Buffer, handle: Handle) -> None:
    check_handle(buffer, handle)
    if not handle.ended:
        raise BadInput("handle", "one of a dispatch that has only begun", "dispatch_end(routed) first")


def _start_anew(
    buffer: Buffer,
    y: Any,
    handle: Handle,
    out: Any,
    bias: Any,
    weighted: bool,
    weight_grads: Any,
    wire: torch.dtype | None,
    num_sms: int | None,
    topk_weights: Any,
) -> Combining:
    """The first combine of its kind, or with so many tokens; or one with arguments that have to be made usable."""
    given = check(buffer, y, handle, out, bias, weighted, weight_grads, wire, num_sms, topk_weights)
    options = Options(handle.layout, given.y.dtype, weighted, wire, num_sms)
    plans = buffer.combine_plans.setdefault(options, [])
    for plan in plans:
        plan.schedule(handle.num_tokens)
        combining = plan.start(handle, given.y, given.out, given.bias, given.weight_grads, given.topk_weights)
        if combining is not None:
            break
    else:
        plan = Plan(buffer, options, given)
        plan.schedule(handle.num_tokens)
        combining = plan.start(handle, given.y, given.out, given.bias, given.weight_grads, given.topk_weights)
        assert combining is not None, "what was checked fits a plan made for it"
        plans.append(plan)
    if out is not None:
        combining.out = out
    elif given.back is not None:
        combining.out = given.back(combining.out)
    combining.back, combining.inputs = given.back, given
    return combining
