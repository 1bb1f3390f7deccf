"""Dispatch: check the arguments, find a plan, bind the tensors to it, run it on the session, hand out tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from moecomm import _native
from moecomm.base.arrays import refuse_gradients, window_tensor
from moecomm.base.validation import check_flag
from moecomm.dispatch import chunks, observers, outputs, verify
from moecomm.dispatch.arguments import check, check_handle, check_max_rows
from moecomm.dispatch.drop import drop_checked
from moecomm.dispatch.options import Gradients, Key, Options, Request, check_options, check_overflow, check_types
from moecomm.dispatch.payloads import Packed, Payload, pack
from moecomm.dispatch.plan import Plan
from moecomm.dispatch.routed import BEGIN, END, ChunkedHandle, Handle, Routed
from moecomm.errors import BadInput, TooManyRows
from moecomm.gpu import quantize_rows
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import collective, several_rounds

__all__ = [
    "Gradients",
    "Options",
    "Plan",
    "Request",
    "dispatch",
    "dispatch_begin",
    "dispatch_end",
    "finish",
    "is_of",
    "launch",
    "prepare",
    "prepare_end",
    "run",
    "stages",
]


class PublishedOffsets(NamedTuple):
    """Offsets in this rank's window of the rows of x that owners fetch and of the rows that experts return.

    csrc/protocol/row_descriptor.h has the descriptor that carries them.
    """

    rows: int
    pitch: int  # bytes from one row to the next
    result_rows: int  # room for `[T, K, H]` of x's dtype


@dataclass
class Ending:
    """The second half of a split dispatch, ready to run."""

    routed: Routed[Any, Any, Any, Any]
    plan: Any
    args: _native.DispatchArgs  # those of `routed`, with the part END
    check: verify.DispatchCheck | None


@collective()
def dispatch(
    rounds: Rounds,
    request: Request,
    x: Any,
    topk_idx: Any = None,
    topk_weights: Any = None,
    scales: Any = None,
    max_rows: int | None = None,
    handle: Handle | None = None,
    sync: bool | None = None,
    extras: Sequence[Any] = (),
    global_scale: Any = None,
    first_token: int | None = None,
    copies: Callable[[], None] | None = None,
) -> Routed:
    """Buffer.dispatch.  `global_scale`: pack(); `first_token`, `copies`: see prepare()."""
    options = request.options
    is_counted = options.num_sms is None or type(options.num_sms) is int
    if not (is_counted and type(options.expert_alignment) is int and type(options.check_weights) is bool):
        check_types(options)
    asks_for_more = request.grow or first_token is not None or copies is not None or options.overflow is not None
    asks_for_more = asks_for_more or bool(observers.active)
    packs = type(extras) is not tuple or len(extras) > 0 or global_scale is not None
    packs = packs or getattr(x, "dtype", None) is torch.uint8
    words: tuple[object, object] = options.quantize, options.scale_layout  # any other object is refused later
    packs = packs or (isinstance(words[0], str) and words[0] in quantize_rows.NAMES)
    packs = packs or (isinstance(words[1], str) and words[1] == "swizzled")
    routed: Routed | None
    routed, is_over, payload, scale = None, False, None, None
    if isinstance(handle, ChunkedHandle):
        packed = pack(rounds, options, x, scales, extras, global_scale)
        return _repeat_in_chunks(rounds, options, packed, topk_idx, topk_weights, handle, sync)
    may_be_known = rounds.plain and rounds.begun is None and rounds.sampling is None and not asks_for_more
    how = (max_rows, handle, sync)
    if may_be_known and not packs:
        routed, is_over = rounds.known_calls.dispatch(rounds, request, x, topk_idx, topk_weights, scales, *how)
    if routed is None:
        rounds.require_usable()
        x, scales, payload, scale = pack(rounds, options, x, scales, extras, global_scale)
        tensors = (x, topk_idx, topk_weights, scales)
        if may_be_known and payload is not None and scale is None:
            routed, is_over = rounds.known_calls.dispatch(rounds, request, *tensors, *how, payload)
        if routed is None:
            routed = prepare(rounds, request, *tensors, *how, None, first_token, copies, payload, scale)
            if first_token is None:  # else the whole has been shown
                observers.show(rounds, topk_idx, topk_weights)
            run(routed)
            rounds.expect_more(_may_go_in_chunks(options, routed, max_rows))  # before it counts as the last round
            rounds.count_round()
    if is_over:
        rounds.unfinished.clear()
        return routed
    try:
        routed = finish(rounds, routed)
        rounds.expect_more(False)
        return routed
    except TooManyRows as error:
        in_chunks = _may_go_in_chunks(options, routed, max_rows) and is_of(routed, error)
        _free(routed)
        if not in_chunks:
            raise
    except BaseException:
        _free(routed)
        raise
    return _dispatch_in_chunks(rounds, options, x, topk_idx, topk_weights, scales, payload)


@collective()
def dispatch_begin(
    rounds: Rounds,
    request: Request,
    x: Any,
    topk_idx: Any = None,
    topk_weights: Any = None,
    scales: Any = None,
    max_rows: int | None = None,
    handle: Handle | None = None,
    early: bool = False,
    extras: Sequence[Any] = (),
    global_scale: Any = None,
) -> Routed:
    """Buffer.dispatch_begin.  `early`: the tensors of its plan are made before dispatch_end()."""
    check_types(request.options)
    x, scales, payload, scale = pack(rounds, request.options, x, scales, extras, global_scale)
    request = request._replace(begin=True)
    how: dict[str, Any] = {"payload": payload, "global_scale": scale}
    routed = prepare(rounds, request, x, topk_idx, topk_weights, scales, max_rows, handle, **how)
    observers.show(rounds, topk_idx, topk_weights)
    run(routed)
    rounds.expect_more()  # to the end of this call: nobody can end a dispatch that Ctrl-C keeps from its caller
    rounds.count_round()
    finish(rounds, routed)
    if early:
        outputs.place_rows(rounds, routed)
    return routed


@collective(rounds=0)
def dispatch_end(rounds: Rounds, routed: Routed, *, sync: bool | None = None) -> Routed:
    """Buffer.dispatch_end."""
    ending = prepare_end(rounds, routed, sync=sync)
    rounds.calls += 1  # which ranks must not take for the first half
    rounds.expect_more(rounds.domain_ranks < rounds.num_ranks)  # ranks here wait for rows that this one forwards
    run(ending)
    rounds.expect_more(False)
    return finish(rounds, ending)


def prepare(
    rounds: Rounds,
    request: Request,
    x: Any,
    topk_idx: Any = None,
    topk_weights: Any = None,
    scales: Any = None,
    max_rows: int | None = None,
    handle: Handle | None = None,
    sync: bool | None = None,
    descriptors: PublishedOffsets | None = None,
    first_token: int | None = None,
    copies: Callable[[], None] | None = None,
    payload: Payload | None = None,
    global_scale: float | torch.Tensor | None = None,
) -> Routed:
    """Check the arguments of Buffer.dispatch and make room for the outputs.

    Args:
        rounds, request, x, topk_idx, topk_weights, scales, max_rows, handle, sync: see Buffer.dispatch and Request.
        descriptors: row descriptors travel in the place of rows.  The previous kernel in the stream publishes the rows.
            It has waited for all kernels before it, and dispatch reads nothing else that it writes.
        first_token: x has some tokens of a call, from this one on (chunks.py), and earlier ones go in other rounds.
            None: all.
        copies: copies experts to empty slots of this rank for this round (balance="replicate").  Called on GPUs between
            the kernel that chooses them and the dispatch, on CPU ranks behind the dispatch.
        payload, global_scale: of pack(), which has made `x` and `scales`.
    """
    if copies is not None:
        request = request._replace(replicates=True)
    if descriptors is not None and not request.row_descriptors:
        request = request._replace(row_descriptors=True)
    rounds.require_usable()
    if sync is not None:
        check_flag("sync", sync)
    if rounds.begun is not None:
        raise BadInput("dispatch", "a second dispatch before dispatch_end()", "dispatch_end(routed) first")
    if getattr(x, "requires_grad", False) or getattr(topk_weights, "requires_grad", False):
        refuse_gradients(x=x, topk_weights=topk_weights)
    options, dropped = request.options, None
    layout = options.layout
    if options.overflow is not None:
        check_overflow(options.overflow, max_rows)
        if options.overflow == "drop":
            topk_idx, dropped = _drop(rounds, options, topk_idx, topk_weights, max_rows, handle)
    if handle is not None:
        check_handle(rounds, handle)
        if isinstance(handle, ChunkedHandle):
            raise BadInput("handle", "one of a dispatch that took several rounds", "dispatch(handle=) or combine()")
        layout = handle.layout
        if topk_idx is not None or topk_weights is not None:
            raise BadInput(
                "handle", "topk_idx or topk_weights beside it", "rows only: a handle repeats an earlier routing"
            )
    # Not a Key, which takes longer to make.
    key = (
        layout,
        handle is not None,
        first_token is not None,
        payload,
        isinstance(global_scale, torch.Tensor),
        request,
    )
    tensors = (x, topk_idx, topk_weights, scales, max_rows, handle)
    routed: Routed | None = rounds.plans.start(key, (rounds, *tensors, global_scale))
    if routed is None:
        routed = _start_checked(rounds, Key(*key), *tensors, global_scale)
    routed.unpack = None if payload is None else payload.tensor
    routed.sync = rounds.on_cpu if sync is None else sync
    routed.copies = copies
    if first_token is not None:
        routed.args.route.first_token = first_token
    if dropped is not None:
        routed.dropped = dropped
        routed.inputs = routed.inputs, topk_idx  # ids that nobody else keeps
    if options.overflow == "chunks" and (request.begin or not routed.sync):
        got, want = ("in dispatch_begin()", "dispatch()") if request.begin else ("without sync=True", "sync=True")
        raise BadInput("overflow", f"'chunks' {got}", f"{want}, or another word")
    if max_rows is not None and not routed.sync and handle is None and layout == "flat":
        routed.args.clear_rows = routed.args.max_rows
    if descriptors is not None:
        args = routed.args
        args.x, args.x_stride, args.result_rows = descriptors
    elif rounds.sampling is not None and not request.grow:
        routed.check = verify.checked(rounds, routed, options, x, scales)
    return routed


def run(pending: Routed | Ending) -> None:
    """Run a prepared dispatch, or the end of one, on the executor."""
    launch(pending)
    if pending.check is not None:
        for stage in stages(pending):
            stage()


def launch(pending: Routed | Ending) -> None:
    """Run a prepared dispatch, or the end of one, without the stages() that verify it."""
    if isinstance(pending, Routed) and pending.copies is not None and not pending.handle.rounds.on_cpu:
        pending.handle.rounds.session.choose(pending.args)
        pending.copies()
    pending.plan.run(pending.args)


def stages(pending: Routed | Ending) -> tuple[Callable[[], None], ...]:
    """Return the steps behind launch() that verify a dispatch, in order; none if it is not verified."""
    check = pending.check
    if check is None or pending.args.part == BEGIN:
        return ()
    pending.check = None
    return check.stages()


def prepare_end(rounds: Rounds, routed: Routed, *, sync: bool | None = None) -> Ending:
    """Check the arguments of Buffer.dispatch_end."""
    rounds.require_open()
    if sync is not None:
        check_flag("sync", sync)
    if not isinstance(routed, Routed) or routed is not rounds.begun:
        raise BadInput("routed", "no dispatch that has begun and has not ended", "what dispatch_begin returned, once")
    args = copy.copy(routed.args)  # those of `routed` say END when the dispatch has ended without an error
    args.part = END
    routed.sync = rounds.on_cpu if sync is None else sync
    check, routed.check = routed.check, None  # which refers to `routed`
    return Ending(routed, routed.plan, args, check)


def finish(rounds: Rounds, pending: Routed | Ending, *, copied: bool = False) -> Routed:
    """Return the outputs; with `sync`, wait for the rows and return exactly those that arrived.

    `copied`: the caller copies them before its call returns, so they may lie where no outputs stay.
    """
    routed = pending.routed if isinstance(pending, Ending) else pending
    rounds.unfinished += (routed.payload, routed.handle.block)
    if isinstance(pending, Ending):
        rounds.begun = None
        rounds.raise_failure()
        routed.args.part = END
        if not routed.args.repeat:
            routed.handle.args.part = END
        outputs.fill(routed)
    else:
        routed.inputs = None
        if routed.args.part == BEGIN:
            if rounds.on_cpu:
                rounds.raise_failure()  # the round is invalid on every rank: there is nothing to end
            rounds.begun = routed  # keeps the memory that peers write to
            rounds.unfinished.clear()
            outputs.place_tables(rounds, routed)  # the handle may be in use before the rest
            return routed
    if routed.sync:
        rounds.wait()
    if routed.sync or rounds.on_cpu:  # there the round is over when the call is
        rounds.raise_failure()
    if routed.copies is not None and rounds.on_cpu:
        routed.copies()
    routed.copies = None
    rounds.unfinished.clear()
    if routed.sync and not rounds.on_cpu:
        rounds.flight.settle()
    if routed.sync and routed.plan.layout != "batched" and not routed.args.repeat:
        routed.plan.trim(routed, int(outputs.num_rows(routed)))
    stays, tables = rounds.memory.stays, routed.handle.block
    outside = not stays(routed.payload) or (type(tables) is outputs.BLOCK and not stays(tables))
    if outside and not (copied or routed.args.descriptors):  # a layer frees its memory before its call returns
        outputs.copy_out(rounds, routed)
    return routed


def _free(routed: Routed[Any, Any, Any, Any]) -> None:
    """Free the memory of a dispatch that failed, which the traceback of its error refers to."""
    routed.payload = cast("_native.Block", None)
    if not routed.args.repeat:
        routed.handle.block = cast("_native.Block", None)


def _drop(
    rounds: Rounds,
    options: Options,
    topk_idx: Any,
    topk_weights: Any,
    max_rows: int | None,
    handle: Handle | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if handle is not None:
        raise BadInput("overflow", "'drop' beside a handle", "None: a handle repeats an earlier routing")
    check_options(options)
    check_max_rows(max_rows)
    return drop_checked(rounds, options.layout, options.expert_alignment, max_rows, topk_idx, topk_weights)


def _may_go_in_chunks(options: Options, routed: Routed, max_rows: int | None) -> bool:
    """Return whether other rounds follow where rows of this one have no room.  The host then waits for it."""
    return bool(routed.sync) and max_rows is None and options.overflow in (None, "chunks")


def is_of(routed: Routed, error: TooManyRows) -> bool:
    """Return whether this dispatch has failed with the error, not an earlier one that nobody has waited for."""
    args, plan = routed.handle.args, routed.plan
    sent = args.route.sent + 8 * routed.handle.rounds.num_ranks
    tag = window_tensor(routed.handle.block, sent, (1,), torch.int32, plan.device, plan.owner)
    return (int(tag) & 0xFFFFFFFF) // 2 == error.round


def _dispatch_in_chunks(
    rounds: Rounds,
    options: Options,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    scales: Any,
    payload: Payload | None,
) -> Routed:
    """A dispatch whose rows had no room, on every rank."""
    given = check(rounds, options, x, topk_idx, topk_weights, scales, None, None)
    small = Request(options._replace(expert_alignment=1))

    def one(tokens: slice) -> Routed:
        ids, weights = (None if tensor is None else tensor[tokens] for tensor in (given.topk_idx, given.topk_weights))
        scales = chunks.scales_of(options, given.x, given.scales, tokens)
        x = given.x.detach()[tokens]
        rounds.flight.retries += 1
        how: dict[str, Any] = {"sync": True, "first_token": tokens.start, "payload": payload}
        return _round(rounds, prepare(rounds, small, x, ids, weights, scales, **how))

    routed = several_rounds(rounds, lambda: chunks.dispatch(rounds, options, len(given.x), one))
    routed.back, routed.sync = given.back, True
    routed.unpack = None if payload is None else payload.tensor
    return routed


def _repeat_in_chunks(
    rounds: Rounds,
    options: Options,
    packed: Packed,
    topk_idx: Any,
    topk_weights: Any,
    handle: ChunkedHandle,
    sync: bool | None,
) -> Routed:
    rounds.require_usable()
    check_handle(rounds, handle)
    tensors = (packed.x, topk_idx, topk_weights, packed.scales)
    given = check(rounds, options._replace(layout=handle.layout), *tensors, None, handle)
    of_payload = packed.payload, packed.global_scale

    def one(x: torch.Tensor, scales: torch.Tensor | None, handle: Handle) -> Routed:
        how: dict[str, Any] = {"sync": sync, "payload": of_payload[0], "global_scale": of_payload[1]}
        return _round(rounds, prepare(rounds, Request(options), x, scales=scales, handle=handle, **how))

    routed = several_rounds(rounds, lambda: chunks.repeat(options, given.x, given.scales, handle, one))
    routed.back, routed.unpack = given.back, None if packed.payload is None else packed.payload.tensor
    return routed


def _round(rounds: Rounds, routed: Routed) -> Routed:
    """Run the round of a chunk, whose rows stay bytes until they are joined."""
    routed.unpack = None
    run(routed)
    rounds.count_round()
    return finish(rounds, routed, copied=True)


def _start_checked(
    rounds: Rounds,
    key: Key,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    scales: Any,
    max_rows: int | None,
    handle: Handle | None,
    global_scale: float | torch.Tensor | None,
) -> Routed:
    """Start a dispatch for which there is no plan yet, or whose arguments have to be converted."""
    given = check(
        rounds, key.request.options._replace(layout=key.layout), x, topk_idx, topk_weights, scales, max_rows, handle
    )
    tensors = (rounds, given.x, given.topk_idx, given.topk_weights, given.scales, max_rows, handle, global_scale)
    routed: Routed = rounds.plans.start_checked(key, len(given.x), tensors, lambda: Plan(rounds, key, given))
    routed.back, routed.inputs = given.back, given
    return routed
