"""combine: check what the caller passed, say it in one struct; the backend's executor does the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from moecomm import packets
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
    if isinstance(y, torch.Tensor):
        if handle.layout == "flat" and buffer.session.pulls_flat_rows and weight_grads is None:
            y = _in_window(buffer, y, handle)
        for plan in buffer.combine_plans.get((handle.layout, y.dtype, weighted, wire, num_sms), ()):
            combining = plan.start(handle, y, out, bias, weight_grads)
            if combining is not None:
                return combining
    return _start_anew(buffer, y, handle, out, bias, weighted, weight_grads, wire, num_sms)


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
    shape, session = handle.y_shape, buffer.session
    (block,) = buffer.memory.allocate(math.prod(shape) * dtype.itemsize)
    address = session.context.peers[buffer.rank] + block.offset
    return window_tensor(block, address, shape, dtype, buffer.device, session.owner)


def _in_window(buffer: Buffer, y: torch.Tensor, handle: Handle) -> torch.Tensor:
    """Flat rows where peers can read them: `y` itself, or a copy in the window.

    Left alone where our tokens come home in packets, where there is no room, where most rows would be those that did
    not come (a copy does not know how many came, staging does), and where it is not what combine takes, which is found
    out later.
    """
    if y.layout is not torch.strided or buffer.session.context.in_heap(y.data_ptr()):
        return y
    if packets.carry_home(buffer.hidden * y.itemsize, handle.num_tokens, buffer.topk, buffer.packet_room):
        return y
    most_rows = _COPIED_ROWS * buffer.num_ranks * handle.num_tokens
    fits = y.shape == handle.y_shape and y.shape[0] <= most_rows and y.dtype in DTYPES and y.device == buffer.device
    if not fits:
        return y
    try:
        return empty(buffer, handle, y.dtype).copy_(y)
    except BadInput:  # no room
        return y


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
) -> Combining:
    """The first combine of its kind, or with so many tokens; or one with arguments that have to be made usable."""
    given = check(buffer, y, handle, out, bias, weight_grads, wire, num_sms)
    options = Options(handle.layout, given.y.dtype, weighted, wire, num_sms)
    plans = buffer.combine_plans.setdefault(options, [])
    for plan in plans:
        plan.schedule(handle.num_tokens)
        combining = plan.start(handle, given.y, given.out, given.bias, given.weight_grads)
        if combining is not None:
            break
    else:
        plan = Plan(buffer, options, given)
        plan.schedule(handle.num_tokens)
        combining = plan.start(handle, given.y, given.out, given.bias, given.weight_grads)
        assert combining is not None, "what was checked fits a plan made for it"
        plans.append(plan)
    if out is not None:
        combining.out = out
    elif given.back is not None:
        combining.out = given.back(combining.out)
    combining.back, combining.inputs = given.back, given
    return combining
