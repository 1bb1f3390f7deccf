"""combine: check what the caller passed, say it in one struct; the backend's executor does the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from moecomm.combine.arguments import check
from moecomm.combine.plan import Combining, Options, Plan, kind_of
from moecomm.core.arrays import note_written, warn_of_gradients, window_tensor
from moecomm.core.settings import DTYPES
from moecomm.core.validation import check_dtype
from moecomm.dispatch.arguments import check_handle, check_hashable
from moecomm.errors import BadInput
from moecomm.routed import Handle

if TYPE_CHECKING:
    from moecomm.buffer import Buffer

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
    sum_grads: bool = False,
    goes_on: bool = False,
) -> Combining:
    """Checks the arguments; see Buffer.combine.

    `sum_grads`: see Options.  `goes_on`: the dispatch is of the same call.  What it has left behind is not looked at:
    some ranks would see it already, and others wait for them in vain.
    """
    if goes_on:
        buffer.require_open()
    else:
        buffer.require_usable()
    _check_ended(buffer, handle)
    if getattr(y, "requires_grad", False) or bias is not None or weight_grads is not None or topk_weights is not None:
        warn_of_gradients(y, bias, weight_grads, topk_weights)
    combining = None
    if isinstance(y, torch.Tensor):
        key = (handle.layout, y.dtype, weighted, wire, num_sms, sum_grads)
        try:
            plans = buffer.combine_plans.get(key, ())
        except TypeError:
            check_hashable(Options(*key))
            raise
        # One that does not fit costs as much as one that does.
        kind = kind_of(buffer, y, bias, weight_grads, topk_weights) if len(plans) > 1 else None
        for plan in plans:
            if kind is not None and plan.kind != kind:
                continue
            combining = plan.start(handle, y, out, bias, weight_grads, topk_weights)
            if combining is not None:
                break
    if combining is None:
        combining = _start_anew(
            buffer, y, handle, out, bias, weighted, weight_grads, wire, num_sms, topk_weights, sum_grads
        )
    if out is not None:
        note_written("out", out)
    return combining


def run(combining: Combining) -> None:
    """Hands what was prepared to the executor."""
    combining.plan.run(combining.args)


def finish(buffer: Buffer, combining: Combining) -> Any:
    """Hands the result out; on CPUs after a look at how the round went."""
    combining.inputs = combining.reduced_rows = None
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
    check_dtype("dtype", dtype, DTYPES)
    (block,) = buffer.memory.allocate(math.prod(handle.y_shape) * dtype.itemsize)
    address = handle.plan.base + block.offset
    return window_tensor(block, address, handle.y_shape, dtype, buffer.device, buffer.session.owner)


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
    sum_grads: bool,
) -> Combining:
    """The first combine of its kind, or with so many tokens; or one with arguments that have to be made usable."""
    given = check(buffer, y, handle, out, bias, weighted, weight_grads, wire, num_sms, topk_weights)
    options = Options(handle.layout, given.y.dtype, weighted, wire, num_sms, sum_grads)
    check_hashable(options)  # y may be another library's
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
