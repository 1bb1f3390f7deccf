"""Combine: check the arguments, find a plan, bind the tensors to it, run it on the session, return the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.base.arrays import note_written, refuse_gradients
from moecomm.combine import in_window, verify
from moecomm.combine.arguments import Tensors, check, dequantized
from moecomm.combine.in_window import empty
from moecomm.combine.options import Key, Options, Request, check_options
from moecomm.combine.plan import Combining, Plan
from moecomm.dispatch import tables
from moecomm.dispatch.arguments import check_handle
from moecomm.dispatch.routed import ChunkedHandle, Handle
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import collective, several_rounds

__all__ = [
    "Combining",
    "Options",
    "Plan",
    "Request",
    "combine",
    "empty",
    "finish",
    "launch",
    "prepare",
    "run",
    "stages",
]


@collective()
def combine(
    rounds: Rounds,
    request: Request,
    y: Any,
    handle: Handle,
    out: Any = None,
    bias: Any = None,
    weight_grads: Any = None,
    topk_weights: Any = None,
) -> Any:
    """Buffer.combine."""
    options = request.options
    is_counted = options.num_sms is None or type(options.num_sms) is int
    if not (is_counted and type(options.weighted) is bool):  # equal to a known call's, whose plan would be found
        check_options(options, rounds.dtype)
    if isinstance(handle, ChunkedHandle):
        return _combine_chunks(rounds, request, y, handle, out, bias, weight_grads, topk_weights)
    given = (y, handle, out, bias, weight_grads, topk_weights)
    if rounds.plain and rounds.sampling is None:
        result, is_over = rounds.known_calls.combine(rounds, request, *given)
        if result is not None:
            if not is_over:
                rounds.raise_failure()
            rounds.unfinished.clear()
            return result
    return _round(rounds, prepare(rounds, request, *given))


def prepare(
    rounds: Rounds,
    request: Request,
    y: Any,
    handle: Handle,
    out: Any = None,
    bias: Any = None,
    weight_grads: Any = None,
    topk_weights: Any = None,
    same_call: bool = False,
) -> Combining:
    """Check the arguments of Buffer.combine and make room for the reduced rows.

    Args:
        rounds, request, y, handle, out, bias, weight_grads, topk_weights: see Buffer.combine and Request.
        same_call: the dispatch belongs to the same call of the user.  The error that it may have left behind is not
            raised yet: ranks that see it early would leave, and the others would wait for them.
    """
    if same_call:
        rounds.require_open()
    else:
        rounds.require_usable()
    in_window.check_arrived(rounds, handle)
    is_pair = isinstance(y, tuple)
    if is_pair:
        y = dequantized(rounds, request.options, handle, y, weight_grads)
    if getattr(y, "requires_grad", False) or bias is not None or weight_grads is not None or topk_weights is not None:
        refuse_gradients(y=y, bias=bias, weight_grads=weight_grads, topk_weights=topk_weights)
    if handle.weights_read is not None and request.options.weighted and topk_weights is None:
        handle.check_row_weights()
    combining: Combining | None = None
    if isinstance(y, torch.Tensor):
        key = (handle.layout, y.dtype, request)  # Key, which takes longer to make
        combining = rounds.plans.start(key, (handle, y, out, bias, weight_grads, topk_weights))
    if combining is None:
        combining = _start_checked(rounds, request, handle, y, out, bias, weight_grads, topk_weights)
    if is_pair:
        combining.inputs = y
    if out is not None:
        note_written("out", out)
    if rounds.sampling is not None:
        combining.check = verify.checked(rounds, combining, handle, y)
    return combining


def launch(combining: Combining) -> None:
    """Run a prepared combine on the executor.  If it is verified, stages() follow."""
    if combining.check is not None:
        combining.check.launch()
    else:
        combining.plan.run(combining.args)


def stages(combining: Combining) -> tuple[Callable[[], None], ...]:
    """Return the steps that verify a combine: see DispatchCheck.stages."""
    check, combining.check = combining.check, None  # which refers to `combining`
    return () if check is None else check.stages()


def run(combining: Combining) -> None:
    """Run a prepared combine on the executor, and verify it."""
    launch(combining)
    for stage in stages(combining):
        stage()


def finish(rounds: Rounds, combining: Combining) -> Any:
    """Return the result; on CPUs, after raising the error of a failed round."""
    combining.inputs = combining.reduced_rows = None
    if rounds.on_cpu:
        rounds.raise_failure()
    rounds.unfinished.clear()
    back, grads = combining.back, combining.out_weight_grads
    if grads is None:
        return combining.out
    return combining.out, grads if back is None else back(grads)


def _round(rounds: Rounds, combining: Combining) -> Any:
    run(combining)
    rounds.count_round()
    return finish(rounds, combining)


def _combine_chunks(
    rounds: Rounds,
    request: Request,
    y: Any,
    handle: ChunkedHandle,
    out: Any,
    bias: Any,
    weight_grads: Any,
    topk_weights: Any,
) -> Any:
    rounds.require_usable()
    check_handle(rounds, handle)
    if request.options.weighted and topk_weights is None:
        handle.check_row_weights()
    refuse_gradients(y=y, bias=bias, weight_grads=weight_grads, topk_weights=topk_weights)
    if isinstance(y, tuple):
        y = dequantized(rounds, request.options, handle, y, weight_grads)
    given = check(rounds, request.options, handle, y, out, bias, weight_grads, topk_weights)

    def one(y: torch.Tensor, handle: Handle, bias: Any, weight_grads: Any, topk_weights: Any) -> Any:
        return _round(rounds, prepare(rounds, part, y, handle, None, bias, weight_grads, topk_weights))

    part = request._replace(call="combine", layer=0, gradients=False)
    found = several_rounds(rounds, lambda: _in_chunks(given, handle, rounds.topk, one))
    if out is not None:
        note_written("out", out)
    if given.back is None:
        return found
    if weight_grads is None:
        return given.back(found) if out is None else out
    return given.back(found[0]) if out is None else out, given.back(found[1])


def _in_chunks(given: Tensors, handle: ChunkedHandle, topk: int, one: Callable[..., Any]) -> Any:
    """Combine in as many rounds as the dispatch took.

    Args:
        given: the tensors of the combine, checked.
        handle: of the dispatch.
        topk: experts a token picks.
        one: combines such tensors with the handle of one chunk: y, handle, out, bias, weight_grads, topk_weights.
    """
    y = given.y.detach()
    out = y.new_empty((handle.num_tokens, y.shape[-1])) if given.out is None else given.out
    grads = None if given.weight_grads is None else y.new_empty((handle.num_tokens, topk), dtype=torch.float32)
    for chunk in handle.chunks:
        tokens = chunk.tokens
        bias = given.bias if given.bias is None or given.bias.ndim == 1 else given.bias[tokens]
        wanted = None if given.weight_grads is None else chunk.of(given.weight_grads)
        weights = None if given.topk_weights is None else given.topk_weights[tokens]
        found = one(chunk.of(y), tables.in_window(chunk.handle), bias, wanted, weights)
        if grads is not None:
            found, grads[tokens] = found
        out[tokens] = found
    return out if grads is None else (out, grads)


def _start_checked(
    rounds: Rounds,
    request: Request,
    handle: Handle,
    y: Any,
    out: Any,
    bias: Any,
    weight_grads: Any,
    topk_weights: Any,
) -> Combining:
    """Prepare a combine for which there is no plan yet, or whose arguments have to be converted."""
    given = check(rounds, request.options, handle, y, out, bias, weight_grads, topk_weights)
    if request.options.unsummed:
        given.y = in_window.where_peers_read(rounds, handle, given.y)
    key = Key(handle.layout, given.y.dtype, request)
    tensors = (handle, given.y, given.out, given.bias, given.weight_grads, given.topk_weights)
    combining: Combining = rounds.plans.start_checked(
        key, handle.num_tokens, tensors, lambda: Plan(rounds, key, handle, given)
    )
    if out is not None:
        combining.out = out
    elif given.back is not None:
        combining.out = given.back(combining.out)
    combining.back, combining.inputs = given.back, given
    return combining
