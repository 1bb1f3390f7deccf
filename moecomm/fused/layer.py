"""An expert layer in one call: dispatch, the experts of this rank, combine.  See Buffer.moe."""

from __future__ import annotations

import logging
import operator
import warnings
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import grouped_mm, pad

from moecomm import _native, combine, dispatch
from moecomm.base.arrays import as_tensor, check_tensor, note_written, refuse_gradients
from moecomm.base.choices import Overflow, is_unsummed
from moecomm.base.known import Known
from moecomm.base.validation import check_flags
from moecomm.dispatch import observers
from moecomm.dispatch.arguments import check_max_rows
from moecomm.dispatch.chunks import in_parts
from moecomm.dispatch.drop import drop_checked
from moecomm.dispatch.options import check_overflow
from moecomm.errors import BadInput, TooManyRows
from moecomm.fused import kernels, pipeline, reference
from moecomm.fused.activations import SWIGLU, GatedActivation, check_activation
from moecomm.fused.biases import Biases, add_bias, check_biases
from moecomm.fused.channel_experts import apply_channel_experts, check_channels, lacks_kernel
from moecomm.fused.copies import copies_of
from moecomm.fused.fp8 import Fp8
from moecomm.fused.fp8_experts import apply_fp8_experts, check_fp8
from moecomm.fused.gemm import multiply
from moecomm.fused.operands import Operands
from moecomm.fused.options import Options, Request
from moecomm.fused.pipeline import DispatchCall, Fused, Pipeline, Unfused
from moecomm.fused.quantized import (
    ROW_FORMATS,
    Fp4,
    Nvfp4,
    as_weights,
    check_fp4,
    dequantize,
    is_by_channel,
    name_of,
    quantize_rows,
)
from moecomm.fused.weights import deinterleave
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import SeveralRounds, collective
from moecomm.routed import Routed

log = logging.getLogger("moecomm")

_MOST_DIMENSION = 1 << 31
_ALIASES = {"one launch": True, "one after the other": False}


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
    plain = form if form is not None and dropped is None and _is_plain(rounds, options, form, experts) else None
    given: Pipeline | None = None
    routed: Routed | None = None
    try:
        if plain is not None and (started := _started(rounds, plain, x, topk_idx, topk_weights)) is not None:
            routed, is_over = started
            if not is_over:
                dispatch.finish(rounds, routed)
            rounds.unfinished.clear()
            return _ended(rounds, plain, routed, experts, out, bias)
        more: dict[str, Any] = {"out": out, "bias": bias, "dropped": dropped, "form": form}
        given = prepare(rounds, request, x, topk_idx, topk_weights, *experts, **more)
        observers.show(rounds, topk_idx, topk_weights)
        routed = pipeline.start(rounds, given)
        return _finish(rounds, given, routed, waits)
    except TooManyRows as error:
        if routed is None or not (waits and dispatch.is_of(routed, error)):
            raise
    del given, routed  # frees their memory in the window
    (x, back), ids = as_tensor("x", x), as_tensor("topk_idx", topk_idx)[0]
    weights = None if topk_weights is None else as_tensor("topk_weights", topk_weights)[0]
    found = torch.empty_like(x) if out is None else as_tensor("out", out)[0]

    def of(tokens: slice) -> Any:
        some = None if weights is None else weights[tokens]
        more = bias if bias is None or bias.ndim == 1 else bias[tokens]
        part = prepare(rounds, request, x[tokens], ids[tokens], some, *experts, bias=more, first_token=tokens.start)
        return _finish(rounds, part, pipeline.start(rounds, part), waits)

    with SeveralRounds(rounds):
        for tokens, part in in_parts(len(x), rounds.max_tokens, of):
            found[tokens] = part
    return out if out is not None else found if back is None else back(found)


def _started(
    rounds: Rounds, form: _Form, x: torch.Tensor, topk_idx: Any, topk_weights: Any
) -> tuple[Routed, bool] | None:
    """Run the dispatch of an unfused layer by a plan that is there; None, and nothing has been done, if none is."""
    scales = None
    if form.by_channel is not None:
        x, scales = _cast(x, form.by_channel)
    given = (x, topk_idx, topk_weights, scales, form.max_rows)
    routed, is_over = rounds.known_calls.dispatch(rounds, form.dispatching, *given, None, None)
    return None if routed is None else (routed, is_over)


def _ended(rounds: Rounds, form: _Form, routed: Routed, experts: _Experts, out: Any, bias: Any) -> Any:
    """Compute and combine behind _started()."""
    y = _computed(rounds, form, experts, *routed.plan.layer_tensors(routed))
    found, is_over = rounds.known_calls.combine(rounds, form.combining, y, routed.handle, out, bias, None, None)
    if found is None:
        combining = combine.prepare(rounds, form.combining, y, routed.handle, out, bias, same_call=True)
        combine.run(combining)
        rounds.turn.made += 1
        return combine.finish(rounds, combining)
    if not is_over:
        rounds.raise_failure()
    rounds.unfinished.clear()
    return found


def goes_in_parts(rounds: Rounds, overflow: Overflow | None, max_rows: int | None) -> bool:
    """Return whether tokens go in parts when their rows have no room.  The host then waits for every dispatch."""
    return overflow == "chunks" or (overflow is None and max_rows is None and rounds.on_cpu)


def _finish(rounds: Rounds, layer: Pipeline, routed: Routed, waits: bool) -> Any:
    out = pipeline.finish(rounds, layer, routed, wait=waits)
    rounds.turn.made += 2  # a dispatch and a combine, or what stands for them
    return out


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
) -> Pipeline:
    """Check the arguments of moe() and return the pipeline to run.  Weights are checked before any rank sends a row.

    `first_token`: see moecomm.dispatch.prepare.  `form`: of the layer, if it is known.
    """
    rounds.require_usable()
    refuse_gradients(x=x, topk_weights=topk_weights, w13=w13, w2=w2, bias=bias, w13_bias=w13_bias, w2_bias=w2_bias)
    options, back = request.options, None
    experts: _Experts = (w13, w2, w13_bias, w2_bias)
    if form is None and (form := _known(rounds, request, x, bias, experts)) is None:
        form, x, experts, back = _checked(rounds, request, x, bias, experts)
    elif form.kind is not None:
        experts = (form.kind(*w13), form.kind(*w2), w13_bias, w2_bias)
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
    of: dict[str, Any] = {"first_token": first_token, "copies": None if copies is None else copies.run}
    if form.runs_fused:
        note_written("out", out)
        return Fused(
            rounds,
            x,
            topk_idx,
            topk_weights,
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
            of=of,
        )

    def computed(routed: Routed) -> torch.Tensor:
        return _computed(rounds, form, experts, *routed.plan.layer_tensors(routed))

    if form.by_channel is not None:
        x, of["scales"] = _cast(x, form.by_channel)
    call = DispatchCall(dispatching, (x, topk_idx, topk_weights), {"max_rows": options.max_rows, **of})
    return Unfused(rounds, call, form.combining, {"out": out, "bias": bias}, computed, back)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows with a scale each, as bytes that travel as rows of FP8 do, and the scales."""
    data, scales = quantize_rows(x, dtype)
    return data.view(kernels.FP8), scales


def _computed(
    rounds: Rounds, form: _Form, experts: _Experts, rows: Any, scales: Any, counts: torch.Tensor
) -> torch.Tensor:
    """Return what the experts of this rank make of rows that have arrived."""
    how: dict[str, Any] = {"interleaved": form.interleaved, "expected_rows": form.expected_rows}
    how |= {"activation": form.activation, "biases": experts[2:]}
    w13, w2 = experts[:2]
    if form.kind is None:
        return apply_experts(rows, w13, w2, counts, **how)
    w13, w2 = form.kind(*w13), form.kind(*w2)
    if form.by_channel is not None:
        return apply_channel_experts(
            form.kind(rows.view(form.by_channel), scales), w13, w2, counts, rounds.dtype, **how
        )
    if form.kind is Fp8:
        return apply_fp8_experts(Fp8(rows, scales), w13, w2, counts, rounds.dtype, **how)
    return apply_fp4_experts(rows, w13, w2, counts, **how)


_Experts = tuple[Any, Any, Any, Any]  # w13, w2, w13_bias, w2_bias


class _Form(NamedTuple):
    """What calls have in common that differ in the values of their tensors alone."""

    kind: type[Any] | None  # of weights that have scales; None: they are tensors
    by_channel: torch.dtype | None  # of values with scales of channels
    activation: GatedActivation
    interleaved: bool
    max_rows: int | None
    expected_rows: int
    runs_fused: bool
    dispatching: dispatch.Request
    combining: combine.Request


_forms: weakref.WeakKeyDictionary[Rounds, Known[_Form]] = weakref.WeakKeyDictionary()


def _known(rounds: Rounds, request: Request, x: Any, bias: Any, experts: _Experts) -> _Form | None:
    """Return the form of a layer that only its values tell from an earlier one; None: look at all of it."""
    forms = _forms.get(rounds)
    if forms is None or (key := _key(rounds, request, x, bias, experts)) is None:
        return None
    return forms.get(key)


def _is_plain(rounds: Rounds, options: Options, form: _Form, experts: _Experts) -> bool:
    """Return whether KnownCalls may run the rounds of a layer of this form."""
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
        for part in (*_parts(experts[0]), *_parts(experts[1]), *experts[2:]):
            if part is not None and part.requires_grad:
                return False
    return True


def _key(rounds: Rounds, request: Request, x: Any, bias: Any, experts: _Experts) -> tuple[Any, ...] | None:
    """Return all that _checked() looks at; None: it has to."""
    here = _native.tensor_words((*_parts(experts[0]), *_parts(experts[1]), *experts[2:]))
    anywhere = _native.tensor_words((x, bias), False)
    return None if here is None or anywhere is None else (here, anywhere, *request.options, *request[1:])


def _parts(weights: Any) -> tuple[Any, ...]:
    """Return values, scales (None: there are none), and of NVFP4 factors."""
    return weights if isinstance(weights, tuple) and len(weights) in (2, 3) else (weights, None)


def _checked(
    rounds: Rounds, request: Request, x: Any, bias: Any, experts: _Experts
) -> tuple[_Form, torch.Tensor, _Experts, Callable[[torch.Tensor], Any] | None]:
    """Check arguments of Buffer.moe that are neither routing nor outputs.

    Returns:
        The form of the layer, which is kept for later calls, its tensors, and what makes of a result the caller's kind
        of arrays (None: torch's).

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
    by_channel = is_by_channel(w13) or is_by_channel(w2)
    if by_channel:
        w13, w2 = check_channels(rounds, w13, w2, interleaved)
        if why := lacks_kernel(rounds.device):
            _say_once("torch computes experts with scales of channels: %s", why)
    elif isinstance(w13, Fp4) or isinstance(w2, Fp4):
        w13, w2 = check_fp4(rounds, w13, w2)
        if x.is_cuda and (why := _widened_because(x, w2)):
            _say_once(f"torch widens {name_of(w2)} weights in every call: %s", why)
    elif isinstance(w13, Fp8) or isinstance(w2, Fp8):
        w13, w2 = check_fp8(rounds, w13, w2, interleaved)
    else:
        _check_experts(rounds, w13, w2, interleaved)
    values: torch.Tensor = w2 if isinstance(w2, torch.Tensor) else w2.data
    intermediate = values.shape[2] * (2 if isinstance(w2, Fp4) else 1)
    biases = check_biases(rounds, experts[2], experts[3], intermediate)
    why_not = partial(_why_unfused, rounds, x, values, back, options)
    runs_fused = _runs_fused(rounds, kernels.FP8 if by_channel else values.dtype, asked, why_not)
    fp8 = isinstance(w2, Fp8) and not by_channel
    if runs_fused:
        travels = ROW_FORMATS[values.dtype] if by_channel else "fp8" if fp8 else None
        call, asks = "moe" if travels is None else f"moe in {travels}", dispatch.Options(num_sms=options.num_sms)
    else:
        call = "moe in INT8" if by_channel and values.dtype is torch.int8 else "moe"
        how: dict[str, Any] = {"num_sms": options.num_sms, "check_weights": options.check_weights}
        asks = dispatch.Options(quantize="fp8" if fp8 else None, **how)
    wire = "exact" if options.wire is None else options.wire  # the bits of a fused layer
    form = _Form(
        None if isinstance(w2, torch.Tensor) else type(w2),
        values.dtype if by_channel else None,
        activation,
        interleaved,
        options.max_rows,
        rounds.settings.expected_rows(x.shape[0]),
        runs_fused,
        dispatch.Request(asks, call, request.number, request.gradients, descriptors=runs_fused),
        combine.Request(combine.Options(wire=wire, num_sms=options.num_sms), "moe", request.number),
    )
    if key is not None and all(map(operator.is_, _parts(experts[0]) + _parts(experts[1]), _parts(w13) + _parts(w2))):
        _forms.setdefault(rounds, Known()).add(key, form)
    return form, x, (w13, w2, *biases), back


def fused_or_not(fused: bool | str | None) -> bool | None:
    """Return the argument `fused` without deprecated names.  Raises BadInput."""
    if fused is None or isinstance(fused, bool):
        return fused
    name = fused if isinstance(fused, str) else ""
    if name in _ALIASES:
        warnings.warn(f"fused={name!r} is deprecated: use {_ALIASES[name]}", DeprecationWarning, stacklevel=2)
        return _ALIASES[name]
    raise BadInput(
        "fused", repr(fused), "True ('two launches' was removed)" if name == "two launches" else "None, True or False"
    )


def _runs_fused(rounds: Rounds, weights: torch.dtype, asked: bool | None, why_unfused: Callable[[], str]) -> bool:
    """Return whether the layer runs fused.  Depends on the Buffer, not on a rank's tokens, so all ranks agree.

    `weights`: their dtype in the tuning table, which has FP8 for all weights of a byte.
    """
    if not (rounds.fused_weights.get(weights, False) if asked is None else asked):
        return False
    why_not = why_unfused()
    if asked is not None and why_not:
        _say_once("fused=True is not possible here, so the layer runs unfused: %s", why_not)
    return not why_not


def _why_unfused(rounds: Rounds, x: torch.Tensor, w2: torch.Tensor, back: Any, options: Options) -> str:
    """Return why the layer cannot run fused; empty if it can.  The same on all ranks."""
    if not x.is_cuda:
        return f"{rounds.device} is no GPU"
    if w2.dtype is torch.uint8:
        return "weights have four bits"
    if rounds.domain_ranks != rounds.num_ranks:
        return "the ranks are in several domains"
    if not (options.wire is None or is_unsummed(options.wire)) or options.check_weights or back is not None:
        return "wire, check_weights, or arrays that are not torch's"
    return ours_lacks(x.device.index, x.dtype, rounds.settings.local_experts(), *w2.shape[1:])


def apply_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    *,
    interleaved: bool = False,
    expected_rows: int | None = None,
    activation: GatedActivation = SWIGLU,
    biases: Biases = (None, None),
) -> torch.Tensor:
    """Apply gated experts to rows `[rows, H]`, grouped by expert; return `[rows, H]`.

    Rows after the last group are undefined.

    Args:
        x: `[rows, H]`, rows of expert 0 first, then of expert 1, and so on.
        w13, w2, interleaved: as in moe().
        tokens_per_expert: int32 `[E/R]`, rows of each expert.
        expected_rows: see grouped_gemm.
        activation: between the GEMMs.
        biases: of the first GEMM, added before the activation, and of the second; None: none.
    """
    if not x.is_cuda:
        how: dict[str, Any] = {"alignment": 1, "interleaved": interleaved}
        inner, y = x.new_empty(len(x), w2.shape[2]), torch.empty_like(x)
        reference.grouped_gemm(x, w13, tokens_per_expert, **how, activation=activation, out=inner, bias=biases[0])
        reference.grouped_gemm(inner, w2, tokens_per_expert, **how, activation=None, out=y, bias=biases[1])
        return y
    if why := ours_lacks(x.device.index, x.dtype, *w2.shape):
        _say_once("experts run in torch's grouped GEMM, not in moecomm's: %s", why)
        return _by_torch(x, deinterleave(w13) if interleaved else w13, w2, tokens_per_expert, activation, biases)
    rows = len(x) // len(w2) if expected_rows is None else expected_rows
    inner, y = x.new_empty(len(x), w2.shape[2]), torch.empty_like(x)
    multiply(Operands(x, w13, tokens_per_expert, bias=biases[0]), activation, interleaved, inner, None, rows)
    multiply(Operands(inner, w2, tokens_per_expert, bias=biases[1]), None, False, y, None, rows)
    return y


def apply_fp4_experts(
    x: torch.Tensor,
    w13: Fp4,
    w2: Fp4,
    tokens_per_expert: torch.Tensor,
    *,
    interleaved: bool = False,
    expected_rows: int | None = None,
    activation: GatedActivation = SWIGLU,
    biases: Biases = (None, None),
) -> torch.Tensor:
    """Apply experts of four bits to bfloat16 rows; arguments and bits as of apply_experts with the widened weights."""
    if not x.is_cuda or _widened_because(x, w2):
        how: dict[str, Any] = {"interleaved": interleaved, "expected_rows": expected_rows}
        how |= {"activation": activation, "biases": biases}
        return apply_experts(x, dequantize(w13), dequantize(w2), tokens_per_expert, **how)
    rows = len(x) // len(w2.data) if expected_rows is None else expected_rows
    inner, y = x.new_empty(len(x), 2 * w2.data.shape[2]), torch.empty_like(x)
    first = Operands(x, w13.data, tokens_per_expert, None, w13.scales, biases[0])
    multiply(first, activation, interleaved, inner, None, rows)
    multiply(Operands(inner, w2.data, tokens_per_expert, None, w2.scales, biases[1]), None, False, y, None, rows)
    return y


def _widened_because(x: torch.Tensor, w2: Fp4) -> str:
    """Return why torch widens such weights on this GPU; empty if a kernel reads them packed."""
    if isinstance(w2, Nvfp4):
        return "no kernel reads them"
    return ours_lacks(x.device.index, x.dtype, *w2.data.shape)


@lru_cache(maxsize=256)
def ours_lacks(device: int, dtype: torch.dtype, groups: int, hidden: int, intermediate: int) -> str:
    """Return why grouped_gemm cannot compute such experts on this GPU; empty if it can."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is no GPU of compute capability 9.0 (Hopper)"
    if dtype not in kernels.TYPES:
        return f"experts compute in {dtype}, not in bfloat16 or float16"
    if hidden % 8 or intermediate % 8:
        return f"H = {hidden} or I = {intermediate} is no multiple of 8"
    if groups > kernels.MOST_GROUPS:
        return f"a rank has {groups} experts, more than {kernels.MOST_GROUPS}"
    return ""


@lru_cache(maxsize=256)
def _say_once(what: str, why: str) -> None:
    log.warning(what, why)


def _by_torch(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    counts: torch.Tensor,
    activation: GatedActivation = SWIGLU,
    biases: Biases = (None, None),
) -> torch.Tensor:
    if short := -w2.shape[2] % 8:  # torch needs rows of a multiple of 16 bytes; pad with zeros
        w13 = torch.cat([pad(half, (0, 0, 0, short)) for half in w13.chunk(2, dim=1)], dim=1)
        w2 = pad(w2, (0, short))
        if biases[0] is not None:
            biases = torch.cat([pad(half, (0, short)) for half in biases[0].chunk(2, dim=1)], dim=1), biases[1]
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = add_bias(grouped_mm(x, w13.transpose(1, 2), offs=ends), biases[0], ends).chunk(2, dim=-1)
    return add_bias(grouped_mm(activation.apply(gate, up), w2.transpose(1, 2), offs=ends), biases[1], ends)


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


def _check_experts(rounds: Rounds, w13: torch.Tensor, w2: torch.Tensor, interleaved: bool) -> None:
    local, hidden = len(rounds.local_experts), rounds.hidden
    about: dict[str, Any] = {"device": rounds.device, "dtypes": (rounds.dtype,)}
    check_tensor("w2", w2, **about, shape=(local, hidden, None))
    intermediate = w2.shape[2]
    if not 1 <= intermediate < _MOST_DIMENSION:
        raise BadInput("w2", tuple(w2.shape), "[E/R, H, I] with I at least 1")
    check_tensor("w13", w13, **about, shape=(local, 2 * intermediate, hidden))
    if interleaved and intermediate % 8:
        raise BadInput("w13", tuple(w13.shape), "I a multiple of 8, to be interleaved")
    for name, weights in (("w13", w13), ("w2", w2)):
        if not weights.is_contiguous() or weights.data_ptr() % 16:
            raise BadInput(name, f"strides {weights.stride()}", "contiguous weights that begin at multiples of 16")
