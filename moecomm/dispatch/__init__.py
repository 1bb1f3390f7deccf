"""dispatch: check what the caller passed, lay out what will arrive, say both in one struct; the backend's executor
does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moecomm.core.arrays import warn_of_gradients
from moecomm.core.state import collective
from moecomm.core.validation import check_flag
from moecomm.dispatch import outputs
from moecomm.dispatch.arguments import LAYOUTS, check, check_handle, check_hashable
from moecomm.dispatch.plan import END, Options, Plan, PublishedRows
from moecomm.errors import BadInput
from moecomm.routed import Handle, Routed

if TYPE_CHECKING:
    from moecomm.buffer import Buffer

__all__ = ["LAYOUTS", "Options", "Plan", "finish", "prepare", "prepare_end", "run", "with_options"]


def prepare(
    buffer: Buffer,
    x: Any,
    topk_idx: Any = None,
    topk_weights: Any = None,
    *,
    layout: str = "expert",
    expert_alignment: int = 1,
    quantize: str | None = None,
    scale_format: str = "fp32",
    scale_layout: str = "row",
    scales: Any = None,
    max_rows: int | None = None,
    sync: bool | None = None,
    handle: Handle | None = None,
    num_sms: int | None = None,
    check_weights: bool = False,
    begin: bool = False,
    descriptors: PublishedRows | None = None,
) -> Routed:
    """Checks the arguments (see Buffer.dispatch) and makes room for the outputs.  `begin`: see dispatch_begin; `slips`:
    they travel in the place of rows, which the kernel before this one in the stream offers: it has waited for all
    before it, and nothing else that it makes is read here.
    """
    if handle is not None:
        check_handle(buffer, handle)
        layout = handle.layout
    key = (  # Options, which takes longer to make
        layout,
        expert_alignment,
        quantize,
        scale_format,
        scale_layout,
        num_sms,
        check_weights,
        begin,
        handle is not None,
        descriptors is not None,
    )
    routed = _start(buffer, key, x, topk_idx, topk_weights, scales, max_rows, handle, sync)
    if descriptors is not None:
        args = routed.args
        args.x, args.x_stride, args.receive_buffer = descriptors
    return routed


@collective()
def with_options(
    buffer: Buffer,
    options: Options,
    x: Any,
    topk_idx: Any = None,
    topk_weights: Any = None,
    scales: Any = None,
    max_rows: int | None = None,
    handle: Handle | None = None,
    sync: bool | None = None,
) -> Routed:
    """Buffer.dispatch, or dispatch_begin, for callers that keep their options from call to call.  `handle`: one of this
    Buffer, and options of its layout that say `repeat`.
    """
    routed = _start(buffer, options, x, topk_idx, topk_weights, scales, max_rows, handle, sync)
    run(routed)
    buffer.made += 1
    return finish(buffer, routed)


def run(routed: Routed) -> None:
    """Hands what was prepared to the executor."""
    routed.plan.run(routed.args)


def prepare_end(buffer: Buffer, routed: Routed, *, sync: bool | None = None) -> Routed:
    """Checks the arguments; see Buffer.dispatch_end."""
    buffer.require_open()
    if sync is not None:
        check_flag("sync", sync)
    if not isinstance(routed, Routed) or routed is not buffer.begun:
        raise BadInput("routed", "what has not begun, or has ended", "what dispatch_begin returned, once")
    routed.args.part = END
    routed.sync = buffer.on_cpu if sync is None else sync
    return routed


def finish(buffer: Buffer, routed: Routed) -> Routed:
    """Hands out what arrived; with `sync` exactly that, after waiting for it."""
    routed.inputs = None
    if not routed.ended:
        _note_half(buffer, routed)
        if not routed.ended:
            return routed
    if routed.sync:
        buffer.session.synchronize()
    if routed.sync or buffer.on_cpu:  # there the round is over when the call is
        buffer.raise_failure()
    if routed.sync and routed.plan.layout != "batched" and not routed.args.repeat:
        routed.plan.trim(routed, int(outputs.num_rows(routed)))
    return routed


def _note_half(buffer: Buffer, routed: Routed) -> None:
    """Keeps a dispatch that has begun, with the memory that peers write to, until it has ended."""
    if routed.args.part != END:
        if buffer.on_cpu:
            buffer.raise_failure()  # void on every rank: there is nothing to end
        buffer.begun = routed
        return
    buffer.begun = None
    buffer.raise_failure()  # then nothing of it can be read
    routed.ended = routed.handle.ended = True


def _start(
    buffer: Buffer,
    key: tuple[Any, ...],
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    scales: Any,
    max_rows: int | None,
    handle: Handle | None,
    sync: bool | None,
) -> Routed:
    """By a plan that is there already, if one fits.  `key`: what Options are made of."""
    buffer.require_usable()
    if sync is not None:
        check_flag("sync", sync)
    if buffer.begun is not None:
        raise BadInput("dispatch", "another one while one has only begun", "dispatch_end(routed) of that first")
    if getattr(x, "requires_grad", False) or getattr(topk_weights, "requires_grad", False):
        warn_of_gradients(x, topk_weights)
    if handle is not None and (topk_idx is not None or topk_weights is not None):
        raise BadInput("handle", "topk_idx or topk_weights beside it", "rows only: a handle repeats an earlier routing")
    try:
        plans = buffer.dispatch_plans.get(key, ())
    except TypeError:
        check_hashable(Options(*key))
        raise
    # One that does not fit costs nearly as much as one that does.
    type_of_x = getattr(x, "dtype", None) if len(plans) > 1 else None
    for plan in plans:
        if type_of_x is not None and plan.type_given != type_of_x:
            continue
        routed = plan.start(buffer, x, topk_idx, topk_weights, scales, max_rows, handle)
        if routed is not None:
            break
    else:
        routed = _start_anew(buffer, Options(*key), x, topk_idx, topk_weights, scales, max_rows, handle)
    routed.sync = buffer.on_cpu if sync is None else sync
    if max_rows is not None and not routed.sync and handle is None and key[0] == "flat":
        routed.args.clear_rows = routed.args.max_rows
    return routed


def _start_anew(
    buffer: Buffer,
    options: Options,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    scales: Any,
    max_rows: int | None,
    handle: Handle | None,
) -> Routed:
    """The first dispatch of its kind, or with so many tokens; or one with arguments that have to be made usable."""
    given = check(buffer, options, x, topk_idx, topk_weights, scales, max_rows, handle)
    plans = buffer.dispatch_plans.setdefault(options, [])
    for plan in plans:
        plan.schedule(len(given.x))
        routed = plan.start(buffer, given.x, given.topk_idx, given.topk_weights, given.scales, max_rows, handle)
        if routed is not None:
            break
    else:
        plan = Plan(buffer, options, given)
        plan.schedule(len(given.x))
        routed = plan.start(buffer, given.x, given.topk_idx, given.topk_weights, given.scales, max_rows, handle)
        assert routed is not None, "what was checked fits a plan made for it"
        plans.append(plan)
    routed.back, routed.inputs = given.back, given
    return routed
