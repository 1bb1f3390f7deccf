"""An expert layer in one call: dispatch, the experts of this rank, combine.  See Buffer.moe."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from moecomm import _native, combine, dispatch
from moecomm.base.arrays import as_output_tensor, as_tensor, check_tensor, note_written, refuse_gradients
from moecomm.base.choices import Overflow, is_unsummed
from moecomm.base.known import Known
from moecomm.base.validation import check_flags
from moecomm.combine import in_window
from moecomm.combine.options import check_options
from moecomm.dispatch import observers
from moecomm.dispatch.arguments import check_max_rows
from moecomm.dispatch.chunks import in_parts
from moecomm.dispatch.drop import drop_checked
from moecomm.dispatch.options import check_overflow
from moecomm.dispatch.routed import Routed
from moecomm.errors import BadInput, TooManyRows
from moecomm.fused import forms, kernels, pipeline, weight_format
from moecomm.fused.activations import GatedActivation, check_activation
from moecomm.fused.biases import check_biases
from moecomm.fused.experts import apply_experts, say_once
from moecomm.fused.formats import as_weights, format_of_both
from moecomm.fused.options import Options, Request
from moecomm.fused.pipeline import DispatchCall, Fused, Pipeline, Unfused
from moecomm.fused.weight_format import WeightFormat, parts
from moecomm.gpu.tuning.layers import Kind
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import collective, several_rounds
from moecomm.weights.copies import copies_of


@collective(rounds=2)
def moe(
    rounds: Rounds,
    request: Request,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    w13: Any,
    w2: Any,
    *,
    out: Any = None,
    bias: Any = None,
    dropped: Any = None,
    w13_bias: Any = None,
    w2_bias: Any = None,
) -> Any:
    """Buffer.moe."""
    options, experts = request.options, (w13, w2, w13_bias, w2_bias)
    waits = goes_in_parts(rounds, options.overflow, options.max_rows)
    form = _known(rounds, request, x, bias, experts)
    is_plain = form is not None and dropped is None and _is_plain(rounds, options, form, x, bias, experts)
    plain = form if is_plain else None
    given: Pipeline | None = None
    routed: Routed | None = None
    result: Any = None
    try:
        if plain is not None and (started := _started(rounds, plain, x, topk_idx, topk_weights)) is not None:
            routed, is_over = started
            if not is_over:
                dispatch.finish(rounds, routed)
            rounds.unfinished.clear()
            return _ended(rounds, plain, routed, experts, out, bias)
        more: dict[str, Any] = {"out": out, "bias": bias, "dropped": dropped, "form": form}
        given, form = prepare(rounds, request, x, topk_idx, topk_weights, *experts, **more, measures=True)
        observers.show(rounds, topk_idx, topk_weights)
        if form.measured is not None:
            rounds.expect_more()  # other ranks wait for this one until it has measured
        routed = pipeline.start(rounds, given)
        result = pipeline.finish(rounds, given, routed, wait=waits or form.measured is not None)
        if form.measured is None:
            return result
    except TooManyRows as error:
        if routed is None or not (waits and dispatch.is_of(routed, error)):
            raise
    del given, routed  # frees their memory in the window
    if result is not None:
        assert form is not None and form.measured is not None
        several_rounds(rounds, partial(_measure, rounds, request, form.measured, form.guess, experts))
        return result
    (x, back), ids = as_tensor("x", x), as_tensor("topk_idx", topk_idx)[0]
    weights = None if topk_weights is None else as_tensor("topk_weights", topk_weights)[0]
    found, shape = torch.empty_like(x), tuple(x.shape)
    about: dict[str, Any] = {"device": rounds.device, "dtypes": (rounds.dtype,)}
    written = None if out is None else as_output_tensor("out", out, **about, shape=shape)
    if bias is not None:
        bias = as_tensor("bias", bias)[0]
        check_tensor("bias", bias, **about, shape=shape[1:] if bias.ndim == 1 else shape)
    if out is not None:
        note_written("out", out)

    def of(tokens: slice) -> Any:
        some = None if weights is None else weights[tokens]
        more = bias if bias is None or bias.ndim == 1 else bias[tokens]
        given = (x[tokens], ids[tokens], some, *experts)
        part, _ = prepare(rounds, request, *given, bias=more, first_token=tokens.start)
        return pipeline.finish(rounds, part, pipeline.start(rounds, part), wait=waits)

    def parts() -> None:
        for tokens, part in in_parts(len(x), rounds.max_tokens, of):
            found[tokens] = part

    several_rounds(rounds, parts)
    if written is None:
        return found if back is None else back(found)
    written.copy_(found)  # now, because it may share memory with inputs of later parts
    return out


def _started(
    rounds: Rounds, form: _Form, x: torch.Tensor, topk_idx: Any, topk_weights: Any
) -> tuple[Routed, bool] | None:
    """Run the dispatch of an unfused layer by KnownCalls; return a Routed, and whether the call is over.

    None: there is no plan for it, and nothing has been done.
    """
    x, scales = _cast(form, x) if form.weights.casts else (x, None)
    given = (x, topk_idx, topk_weights, scales, form.max_rows)
    routed, is_over = rounds.known_calls.dispatch(rounds, form.dispatching, *given, None, None)
    return None if routed is None else (routed, is_over)


def _cast(form: _Form, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast rows ahead of the dispatch of an unfused layer; return them as it takes them, and their scales."""
    rows, scales = form.weights.cast(x, form.values)
    return rows.view(kernels.FP8), scales  # bytes are bytes: rows of int8 travel as rows of FP8


def _ended(rounds: Rounds, form: _Form, routed: Routed, experts: _Experts, out: Any, bias: Any) -> Any:
    """Compute the experts and combine, behind a dispatch of _started()."""
    y = _computed(rounds, form, experts, routed)
    found, is_over = rounds.known_calls.combine(rounds, form.combining, y, routed.handle, out, bias, None, None)
    if found is None:
        combining = combine.prepare(rounds, form.combining, y, routed.handle, out, bias, same_call=True)
        combine.run(combining)
        rounds.count_round()
        return combine.finish(rounds, combining)
    if not is_over:
        rounds.raise_failure()
    rounds.unfinished.clear()
    return found


def goes_in_parts(rounds: Rounds, overflow: Overflow | None, max_rows: int | None) -> bool:
    """Return whether tokens go in parts when their rows have no room.  The host then waits for every dispatch."""
    if isinstance(overflow, str):  # any other object is refused later
        return overflow == "chunks"
    return overflow is None and max_rows is None and rounds.on_cpu


def prepare(
    rounds: Rounds,
    request: Request,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    w13: Any,
    w2: Any,
    w13_bias: Any = None,
    w2_bias: Any = None,
    *,
    out: Any = None,
    bias: Any = None,
    dropped: Any = None,
    first_token: int | None = None,
    form: _Form | None = None,
    measures: bool = False,
) -> tuple[Pipeline, _Form]:
    """Check the arguments of moe(); return the pipeline to run, and the form of the layer.

    Weights are checked before any rank sends a row.

    Args:
        rounds, request, x, topk_idx, topk_weights, w13, w2, w13_bias, w2_bias, out, bias, dropped: of moe().
        first_token: see moecomm.dispatch.prepare.
        form: see _known().
        measures: see _checked().
    """
    rounds.require_usable()
    refuse_gradients(x=x, topk_weights=topk_weights, w13=w13, w2=w2, bias=bias, w13_bias=w13_bias, w2_bias=w2_bias)
    options, back = request.options, None
    experts: _Experts = (w13, w2, w13_bias, w2_bias)
    if form is None and (form := _known(rounds, request, x, bias, experts)) is None:
        form, x, experts, back = _checked(rounds, request, x, bias, experts, measures)
    w13, w2, *biases = experts
    drops = options.overflow is not None or dropped is not None
    count = _check_overflow(rounds, options, dropped) if drops else None
    copies, dispatching = None, form.dispatching
    if options.balance is not None:
        tensors: dict[str, Any] = {"w13": w13, "w2": w2, "w13_bias": w13_bias, "w2_bias": w2_bias}
        copies = copies_of(rounds, options.balance, form.activation, options.interleaved, **tensors)
    if copies is not None:
        dispatching = dispatching._replace(experts=copies.compared)
    if count is not None:
        topk_idx, entries = drop_checked(rounds, "expert", 1, options.max_rows, topk_idx, topk_weights)
        count.copy_(entries)
    others: dict[str, Any] = {"first_token": first_token, "copies": None if copies is None else copies.run}
    if form.runs_fused:
        if out is not None:
            note_written("out", out)
        fused = Fused(
            rounds,
            x,
            topk_idx,
            topk_weights,
            form.weights,
            w13,
            w2,
            interleaved=options.interleaved,
            activation=form.activation,
            biases=(biases[0], biases[1]),
            out=out,
            bias=bias,
            max_rows=options.max_rows,
            expected_rows=form.expected_rows,
            unsummed=is_unsummed(options.wire),
            request=dispatching,
            others=others,
        )
        return fused, form

    def computed(routed: Routed) -> torch.Tensor:
        return _computed(rounds, form, experts, routed)

    if form.weights.casts:
        x, others["scales"] = _cast(form, x)
    call = DispatchCall(dispatching, (x, topk_idx, topk_weights), {"max_rows": options.max_rows, **others})
    return Unfused(rounds, call, form.combining, {"out": out, "bias": bias}, computed, back), form


def _computed(rounds: Rounds, form: _Form, experts: _Experts, routed: Routed) -> torch.Tensor:
    """Apply the experts of this rank to the rows of an unfused layer that have arrived; return theirs."""
    rows, scales, counts = routed.plan.layer_tensors(routed)
    nbytes = len(rows) * rounds.hidden * rounds.dtype.itemsize
    y = in_window.for_call(rounds, routed.handle) if nbytes >= form.least_bytes else None
    if form.weights.casts:
        rows = rows.view(form.values)
    return apply_experts(
        form.weights,
        rows,
        experts[0],
        experts[1],
        counts,
        scales=scales,
        dtype=rounds.dtype,
        interleaved=form.interleaved,
        expected_rows=form.expected_rows,
        activation=form.activation,
        biases=experts[2:],
        lacks=form.lacks,
        out=y,
    )


_Experts = tuple[Any, Any, Any, Any]  # w13, w2, w13_bias, w2_bias


class _Form(NamedTuple):
    """All that _checked() works out for a layer: calls that differ in the values of their tensors alone share it.

    `least_bytes`: from so many on, rows of experts lie in the window.
    `dispatching`, `combining`: the requests of its two rounds; fused, the first is of row descriptors, and the second
    is not used.
    `measured`: the kind of a layer whose forms are measured behind it; None: the form is known, or can't be measured.
    `guess`: with it, whether the layer runs fused if nothing speaks against it.
    """

    weights: WeightFormat
    values: torch.dtype  # of the weights
    lacks: str  # why torch computes the experts; empty: kernels do, or the ranks are CPUs
    activation: GatedActivation
    interleaved: bool
    max_rows: int | None
    expected_rows: int
    runs_fused: bool
    least_bytes: float
    dispatching: dispatch.Request
    combining: combine.Request
    measured: Kind | None = None
    guess: bool = False


# Kept by _checked(), found by _known().
_forms: weakref.WeakKeyDictionary[Rounds, Known[_Form]] = weakref.WeakKeyDictionary()


def _known(rounds: Rounds, request: Request, x: Any, bias: Any, experts: _Experts) -> _Form | None:
    """Return the form of a layer whose tensors and request an earlier call had, too; None: _checked() has to look."""
    known = _forms.get(rounds)
    if known is None or (key := _key(rounds, request, x, bias, experts)) is None:
        return None
    return known.get(key)


def _is_plain(rounds: Rounds, options: Options, form: _Form, x: Any, bias: Any, experts: _Experts) -> bool:
    """Return whether KnownCalls may run both rounds: those of an unfused layer without what only prepare() does."""
    if (
        form.runs_fused
        or not rounds.plain
        or rounds.sampling is not None
        or rounds.begun is not None
        or observers.active
    ):
        return False
    if options.overflow is not None or options.balance is not None:
        return False
    if torch.is_grad_enabled():
        for part in (x, bias, *_parts(experts[0]), *_parts(experts[1]), *experts[2:]):
            if part is not None and part.requires_grad:
                return False
    return True


def _key(rounds: Rounds, request: Request, x: Any, bias: Any, experts: _Experts) -> tuple[Any, ...] | None:
    """Return all that _checked() looks at, to compare calls; None: a tensor is not one of torch's, or not dense."""
    here = _native.tensor_words((*_parts(experts[0]), *_parts(experts[1]), *experts[2:]))
    anywhere = _native.tensor_words((x, bias), False)
    return None if here is None or anywhere is None else (here, anywhere, *request.options, *request[1:])


def _parts(weights: Any) -> tuple[Any, ...]:
    """Return the tensors of weights: values, scales (None: there are none), and factors if they have three."""
    is_packed = isinstance(weights, tuple) and len(weights) in (2, 3) and weights[1] is not None
    return weights if is_packed else (weights, None)


def _checked(
    rounds: Rounds, request: Request, x: Any, bias: Any, experts: _Experts, measures: bool = False
) -> tuple[_Form, torch.Tensor, _Experts, Callable[[torch.Tensor], Any] | None]:
    """Check arguments of Buffer.moe that are neither routing nor outputs.

    Args:
        rounds, request, x, bias, experts: of the layer.
        measures: the caller measures forms behind the layer where they are not known.

    Returns:
        The form of the layer, which is kept for later calls unless it is a guess, its tensors, and what makes of a
        result the caller's kind of arrays (None: torch's).

    Raises BadInput or Unsupported.
    """
    options, key = request.options, _key(rounds, request, x, bias, experts)
    w13: Any
    w2: Any
    (x, back), w13, w2 = as_tensor("x", x), as_weights("w13", experts[0]), as_weights("w2", experts[1])
    activation = check_activation(options.activation, options.activation_limit, options.activation_alpha)
    interleaved = options.interleaved
    check_flags(interleaved=interleaved, check_weights=options.check_weights)
    asked = fused_or_not(options.fused)
    check_tensor("x", x, device=rounds.device, dtypes=(rounds.dtype,), shape=(None, rounds.hidden))
    if bias is not None and (given := as_tensor("bias", bias)[0]).dtype is not rounds.dtype:
        raise BadInput("bias", str(given.dtype), str(rounds.dtype))
    check_max_rows(options.max_rows)
    check_overflow(options.overflow, options.max_rows)
    weights = format_of_both(w13, w2)
    w13, w2 = weights.check(rounds, w13, w2, interleaved)
    values, intermediate = parts(w2)[0], parts(w13)[0].shape[1] // 2
    biases = check_biases(rounds, experts[2], experts[3], intermediate)
    if lacks := weights.lacks_kernel(x, w2):
        say_once(weights.slow, lacks)
    why_not = partial(_why_unfused, rounds, x, weights, intermediate, back, options)
    kind = (
        None if asked is not None or why_not() else forms.kind_of(rounds, weights, values.dtype, intermediate, len(x))
    )
    known = asked if kind is None else rounds.layer_forms.get(kind)
    runs_fused = guess = _runs_fused(rounds, weights.tuned_as or values.dtype, known, why_not)
    is_guess = kind is not None and known is None
    measured = kind if is_guess and measures and forms.can_measure(rounds) else None
    if measured is not None:
        runs_fused = False
    asks, call = dispatch.Options(num_sms=options.num_sms), "moe"  # ranks compare the names: they must cast rows alike
    if not runs_fused:
        asks = asks._replace(quantize=weights.quantize, check_weights=options.check_weights)
        call = call if measured is None else "moe that measures"
        call = f"{call} in INT8" if values.dtype is torch.int8 else call
    elif travels := weights.travels.get(values.dtype):
        call = f"moe in {travels}"
    wire = "exact" if options.wire is None else options.wire  # the bits of a fused layer
    combining = combine.Options(wire=wire, num_sms=options.num_sms)
    check_options(combining, rounds.dtype)
    form = _Form(
        weights,
        values.dtype,
        lacks,
        activation,
        interleaved,
        options.max_rows,
        rounds.settings.expected_rows(x.shape[0]),
        runs_fused,
        math.inf if lacks else in_window.least_bytes(rounds, "expert", combining),
        dispatch.Request(asks, call, request.layer, request.gradients, row_descriptors=runs_fused),
        combine.Request(combining, "moe", request.layer),
        measured,
        guess,
    )
    if (
        key is not None
        and not is_guess
        and all(map(operator.is_, _parts(experts[0]) + _parts(experts[1]), _parts(w13) + _parts(w2)))
    ):
        _forms.setdefault(rounds, Known()).add(key, form)
    return form, x, (w13, w2, *biases), back


def _measure(rounds: Rounds, request: Request, kind: Kind, guess: bool, experts: _Experts) -> None:
    """Measure both forms of a layer with these experts, for later calls.  Collective.  Raises as forms.measure()."""
    options = request.options._replace(max_rows=None, overflow=None, balance=None)
    requests = {fused: Request(options._replace(fused=fused), layer=request.layer) for fused in (False, True)}
    batch: list[torch.Tensor] = []

    def prepared(fused: bool) -> Pipeline:
        x, ids, weights = batch
        return prepare(rounds, requests[fused], x, ids, weights, *experts)[0]

    def reserve(even: bool) -> None:
        batch[:] = forms.full_batch(rounds, kind, even)
        for fused in requests:
            prepared(fused).reserve()

    def call(fused: bool) -> None:
        layer = prepared(fused)
        pipeline.finish(rounds, layer, pipeline.start(rounds, layer))

    with torch.no_grad():
        forms.measure(rounds, kind, guess, {fused: partial(call, fused) for fused in requests}, reserve)


def fused_or_not(fused: Any) -> bool | None:
    """Return the argument `fused`.  Raises BadInput."""
    if fused is None or isinstance(fused, bool):
        return fused
    raise BadInput("fused", repr(fused), "None, True or False")


def _runs_fused(rounds: Rounds, weights: torch.dtype, asked: bool | None, why_unfused: Callable[[], str]) -> bool:
    """Return whether the layer runs fused.  Depends on the Buffer, not on a rank's tokens, so all ranks agree.

    `weights`: their dtype in the tuning table, which has FP8 for all weights of a byte.
    """
    if not (rounds.origin.fused_weights.get(weights, False) if asked is None else asked):
        return False
    why_not = why_unfused()
    if asked is not None and why_not:
        say_once("fused=True is not possible here, so the layer runs unfused: %s", why_not)
    return not why_not


def _why_unfused(
    rounds: Rounds, x: torch.Tensor, weights: WeightFormat, intermediate: int, back: Any, options: Options
) -> str:
    """Return why the layer cannot run fused; empty if it can.  The same on all ranks."""
    if not x.is_cuda:
        return f"{rounds.device} is no GPU"
    if weights.unfused:
        return weights.unfused
    if rounds.domain_ranks != rounds.num_ranks:
        return "the ranks are in several domains"
    if not (options.wire is None or is_unsummed(options.wire)) or options.check_weights or back is not None:
        return "wire, check_weights, or arrays that are not torch's"
    sizes = (rounds.settings.local_experts(), rounds.hidden, intermediate)
    return weight_format.ours_lacks(x.device.index, x.dtype, *sizes)


def _check_overflow(rounds: Rounds, options: Options, dropped: Any) -> torch.Tensor | None:
    """Check `overflow` and `dropped`, and return the latter as a tensor.  Raises BadInput."""
    check_overflow(options.overflow, options.max_rows)
    if options.overflow == "chunks" and rounds.session.capturing():
        raise BadInput("overflow", "'chunks' in the capture of a graph", "'drop' or 'error': a graph does not wait")
    return check_dropped(options.overflow, dropped, rounds.device)


def check_dropped(overflow: Overflow | None, dropped: Any, device: torch.device) -> torch.Tensor | None:
    """Return the tensor that receives the number of dropped entries; None without overflow="drop".

    Raises BadInput: there is one only where entries are dropped, and none is dropped without a count.
    """
    if overflow != "drop":
        if dropped is not None:
            raise BadInput("dropped", type(dropped).__name__, "None, or overflow='drop' beside it")
        return None
    if dropped is None:
        raise BadInput("dropped", "None", "an int32 tensor [1] beside overflow='drop', for the number of entries")
    if getattr(getattr(dropped, "flags", None), "writeable", True) is False:
        raise BadInput("dropped", "a read-only array", "one that can be written")
    count = as_tensor("dropped", dropped)[0]
    if torch.compiler.is_compiling():  # a graph that is traced knows no addresses, which check_tensor looks at
        return count
    check_tensor("dropped", count, device=device, dtypes=(torch.int32,), shape=(1,))
    return count
