"""An expert layer in one call: dispatch, this rank's experts, combine.  `Buffer.moe` is `moe` of this module."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import grouped_mm, pad, silu

from moecomm.core.arrays import as_tensor, check_tensor, note_written, warn_of_gradients
from moecomm.core.choices import Activation
from moecomm.core.state import collective
from moecomm.core.validation import check_flags, check_name
from moecomm.dispatch.arguments import check_max_rows
from moecomm.errors import BadInput
from moecomm.fused import kernels, pipeline, reference
from moecomm.fused.fp8 import Fp8
from moecomm.fused.fp8_experts import apply_fp8_experts, as_weights, check_fp8
from moecomm.fused.gemm import multiply
from moecomm.fused.operands import Operands
from moecomm.fused.pipeline import Fused, Pipeline, Unfused
from moecomm.fused.weights import deinterleave

if TYPE_CHECKING:
    from moecomm.buffer import Buffer
    from moecomm.routed import Routed

log = logging.getLogger("moecomm")

_MOST_DIMENSION = 1 << 31
# Rows in a full Buffer for which fused=None means True, by dtype of weights and number of ranks: (least rows of an
# expert, least rows of a rank, most rows of an expert).
# Measured: fused layers are 1.02 to 1.70 times as fast as unfused ones inside these bounds and 0.88 to 1.01 outside
# (bench/results/moe-*-h200-[24].json); later code, 1.02 to 1.55 inside and 0.93 to 1.06 outside, few tokens in FP8
# (layers-h200-2.json).  Not measured: 8 ranks.  Their bounds are four times those of 4 ranks, where 4 ranks gain 1.03
# to 1.70; dispatch and combine, which a fused layer hides, take 1.7 times as long with 8 ranks (ht-h200-[48].json).
# Other numbers of ranks are not measured, and unfused.
FUSED_FROM = {
    (torch.bfloat16, 2): (32, 1024, 1024),
    (torch.float16, 2): (32, 1024, 1024),
    (kernels.FP8, 2): (32, 1024, math.inf),
    (torch.bfloat16, 4): (16, 256, math.inf),
    (torch.float16, 4): (16, 256, math.inf),
    (kernels.FP8, 4): (16, 512, math.inf),
    (torch.bfloat16, 8): (64, 1024, math.inf),
    (torch.float16, 8): (64, 1024, math.inf),
    (kernels.FP8, 8): (64, 2048, math.inf),
}
_ALIASES = {"one launch": True, "one after the other": False}


@collective(rounds=2)
def moe(
    buffer: Buffer,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    w13: Any,
    w2: Any,
    *,
    activation: Activation = "swiglu",
    interleaved: bool = False,
    out: Any = None,
    bias: Any = None,
    max_rows: int | None = None,
    wire: torch.dtype | None = None,
    num_sms: int | None = None,
    check_weights: bool = False,
    fused: bool | None = None,
) -> Any:
    """Send every token through its experts: dispatch, two GEMMs, combine.  Collective; runs on the current stream.

    On GPUs nothing waits for the host.  Counts stay on the device, so a captured graph replays with the routing that it
    finds then; make the first call of a kind outside of a capture, because it compiles kernels.

    GEMMs accumulate in float32, in an order that depends on their sizes alone.  SwiGLU is computed on the accumulators;
    its result and each expert's row are rounded once to the Buffer's dtype.  Combine multiplies these rows by their
    routing weights while it adds them up in float32.  The same inputs give the same bits.  No gradients: use
    moecomm.ops.moe for them.

    On a Hopper GPU the GEMMs are moecomm.fused.grouped_gemm.  Layers that it does not support (another GPU, float32, I
    not a multiple of 8, more than 512 experts on a rank) use torch's grouped GEMM, with one warning.

    With FP8 weights the layer computes in FP8: tokens are cast to e4m3 before they are sent (Buffer.dispatch,
    quantize="fp8"), both GEMMs multiply e4m3, SwiGLU's result is cast between them, and experts' rows return in the
    Buffer's dtype.

    Args:
        buffer: the Buffer, opened with the weights' number of experts and columns.
        x: `[T, H]`, T <= max_tokens, of the Buffer's dtype.
        topk_idx: int64 or int32 `[T, K]`: expert ids; -1 picks none.
        topk_weights: float32 `[T, K]`; None: every weight is 1.
        w13: `[E/R, 2 I, H]` of the Buffer's dtype: I gate rows, then I up rows, of each expert of this rank.
        w2: `[E/R, H, I]`: down projections.  In FP8, w13 and w2 are pairs of float8_e4m3fn data and float32 scales,
            one scale for 128 rows (in the row order of the data) and 128 columns; see moecomm.fused.quantize_weights.
        activation: "swiglu": silu(gate) * up.
        interleaved: w13 is `moecomm.fused.interleave(w13)`; in FP8, cast after interleaving.
        out: `[T, H]` of the Buffer's dtype, written in place; default: a new tensor.
        bias: `[T, H]` or `[H]` of the Buffer's dtype, added before the rounding, for example a shared expert's output.
        max_rows: received rows to make room for; default: the worst case.  More rows are bad input on every rank.
        wire: see Buffer.combine.
        num_sms: multiprocessors of dispatch and combine; see Buffer.combine.
        check_weights: see Buffer.dispatch.
        fused: same value on all ranks; the bits are the same either way.
            True: rows travel while the experts compute.  Needs moecomm's GEMMs, one domain, and neither `wire` nor
            `check_weights`; otherwise the layer runs unfused, with one warning.
            False: dispatch, GEMMs and combine run in sequence.
            None: the faster of the two (expected, for 8 ranks) for the weights' dtype, the number of ranks and the rows
            of a full Buffer (FUSED_FROM), if the layer can be fused.  Few tokens in a large Buffer were no slower
            fused.
            "one launch" and "one after the other" are deprecated names of True and False.

    Returns:
        `[T, H]`: sum over k of w_k * w2 (silu(w1 x) * w3 x), plus bias; zeros (plus bias) for a token without experts.

    Raises:
        BadInput: at once for arguments that do not fit; for faults that only the device sees, as Buffer.dispatch.
        Unsupported: FP8 on a GPU that is not Hopper, with H not a multiple of 16 or I not a multiple of 32
            (interleaved: 16), with more than 512 experts on a rank, or in a Buffer of float32.
        Closed, Timeout, PeerLost, Aborted, Mismatch: as Buffer.dispatch.
    """
    given = prepare(
        buffer,
        x,
        topk_idx,
        topk_weights,
        w13,
        w2,
        activation=activation,
        interleaved=interleaved,
        out=out,
        bias=bias,
        max_rows=max_rows,
        wire=wire,
        num_sms=num_sms,
        check_weights=check_weights,
        fused=fused,
    )
    out = pipeline.run(buffer, given)
    buffer.made += 2  # rounds: a dispatch and a combine, or their fused forms
    return out


def prepare(
    buffer: Buffer,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    w13: Any,
    w2: Any,
    *,
    activation: Activation = "swiglu",
    interleaved: bool = False,
    out: Any = None,
    bias: Any = None,
    max_rows: int | None = None,
    wire: torch.dtype | None = None,
    num_sms: int | None = None,
    check_weights: bool = False,
    fused: bool | None = None,
) -> Pipeline:
    """Check the arguments of moe() and return the pipeline to run.  Weights are checked before any rank sends a row."""
    buffer.require_usable()
    (x, back), w13, w2 = as_tensor("x", x), as_weights("w13", w13), as_weights("w2", w2)
    warn_of_gradients(x, topk_weights, bias, *(t for w in (w13, w2) for t in (w if isinstance(w, Fp8) else (w,))))
    check_name("activation", activation, ("swiglu",))
    check_flags(interleaved=interleaved, check_weights=check_weights)
    asked = fused_or_not(fused)
    check_tensor("x", x, device=buffer.device, dtypes=(buffer.dtype,), shape=(None, buffer.hidden))
    if bias is not None and (given := as_tensor("bias", bias)[0]).dtype is not buffer.dtype:
        raise BadInput("bias", str(given.dtype), str(buffer.dtype))
    rows = max(1, len(x) * buffer.topk * buffer.num_ranks // buffer.num_experts)  # of an expert, if ranks are alike
    routing = {"topk_idx": topk_idx, "topk_weights": topk_weights, "check_weights": check_weights}
    check_max_rows(max_rows)
    dispatching = {"x": x, **routing, "layout": "expert", "max_rows": max_rows, "num_sms": num_sms}
    combining = {"out": out, "bias": bias, "wire": wire, "num_sms": num_sms}
    if isinstance(w13, Fp8) or isinstance(w2, Fp8):
        w13, w2 = check_fp8(buffer, w13, w2, interleaved)
        values, dispatching["quantize"] = w2.data, "fp8"
    else:
        _check_experts(buffer, w13, w2, interleaved)
        values = w2
    why_not = partial(_why_unfused, buffer, x, values, back, wire, check_weights)
    if _runs_fused(buffer, values, asked, why_not):
        note_written("out", out)
        return Fused(
            buffer,
            x,
            topk_idx,
            topk_weights,
            w13,
            w2,
            interleaved=interleaved,
            out=out,
            bias=bias,
            max_rows=max_rows,
            num_sms=num_sms,
            expected_rows=rows,
        )

    def experts(routed: Routed) -> torch.Tensor:
        counts = routed.tokens_per_expert
        how: dict[str, Any] = {"interleaved": interleaved, "expected_rows": rows}
        if routed.scales is None:
            return apply_experts(routed.x, w13, w2, counts, **how)
        return apply_fp8_experts(Fp8(routed.x, routed.scales), w13, w2, counts, buffer.dtype, **how)

    return Unfused(buffer, dispatching, combining, experts, back)


def fused_or_not(fused: bool | str | None) -> bool | None:
    """Return the argument `fused` without deprecated names.  Raises BadInput."""
    if fused is None or isinstance(fused, bool):
        return fused
    name = fused if isinstance(fused, str) else ""
    if name in _ALIASES:
        warnings.warn(f"fused={name!r} is deprecated: use {_ALIASES[name]}", DeprecationWarning, stacklevel=2)
        return _ALIASES[name]
    raise BadInput(
        "fused", repr(fused), "True: it went in favor of that" if name == "two launches" else "None, True or False"
    )


def _runs_fused(buffer: Buffer, w2: torch.Tensor, asked: bool | None, why_unfused: Callable[[], str]) -> bool:
    """Return whether the layer runs fused.  Depends on the Buffer, not on a rank's tokens, so all ranks agree."""
    fused = asked
    if fused is None:
        least, of_rank, most = FUSED_FROM.get((w2.dtype, buffer.num_ranks), (math.inf, math.inf, 0))
        rows = buffer.max_tokens * buffer.topk
        of_expert = rows * buffer.num_ranks / buffer.num_experts
        fused = rows >= of_rank and least <= of_expert <= most
    if not fused:
        return False
    why_not = why_unfused()
    if asked is not None and why_not:
        _say_once("rows travel before and after the experts, not under them: %s", why_not)
    return not why_not


def _why_unfused(
    buffer: Buffer, x: torch.Tensor, w2: torch.Tensor, back: Any, wire: torch.dtype | None, check_weights: bool
) -> str:
    """Return why the layer cannot run fused; empty if it can.  The same on all ranks."""
    if not x.is_cuda:
        return f"{buffer.device} is no GPU"
    if buffer.domain_ranks != buffer.num_ranks:
        return "the ranks are in several domains"
    if wire is not None or check_weights or back is not None:
        return "wire, check_weights, or arrays that are not torch's"
    return ours_lacks(x.device.index, x.dtype, *w2.shape)


def apply_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    *,
    interleaved: bool = False,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """Apply SwiGLU experts to rows `[rows, H]`, grouped by expert; return `[rows, H]`.

    Rows after the last group are undefined.

    Args:
        x: `[rows, H]`, rows of expert 0 first, then of expert 1, and so on.
        w13, w2, interleaved: as in moe().
        tokens_per_expert: int32 `[E/R]`, rows of each expert.
        expected_rows: see grouped_gemm.
    """
    if not x.is_cuda:
        how: dict[str, Any] = {"alignment": 1, "interleaved": interleaved}
        inner = x.new_empty(len(x), w2.shape[2])
        reference.grouped_gemm(x, w13, tokens_per_expert, **how, activation="swiglu", out=inner)
        reference.grouped_gemm(inner, w2, tokens_per_expert, **how, activation=None, out=(y := torch.empty_like(x)))
        return y
    if why := ours_lacks(x.device.index, x.dtype, *w2.shape):
        _say_once("experts run in torch's grouped GEMM, not in moecomm's: %s", why)
        return _by_torch(x, deinterleave(w13) if interleaved else w13, w2, tokens_per_expert)
    rows = len(x) // len(w2) if expected_rows is None else expected_rows
    inner, y = x.new_empty(len(x), w2.shape[2]), torch.empty_like(x)
    multiply(Operands(x, w13, tokens_per_expert), True, interleaved, inner, None, rows)
    multiply(Operands(inner, w2, tokens_per_expert), False, False, y, None, rows)
    return y


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


def _by_torch(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if short := -w2.shape[2] % 8:  # torch needs rows of a multiple of 16 bytes; pad with zeros
        w13 = torch.cat([pad(half, (0, 0, 0, short)) for half in w13.chunk(2, dim=1)], dim=1)
        w2 = pad(w2, (0, short))
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = grouped_mm(x, w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return grouped_mm(silu(gate) * up, w2.transpose(1, 2), offs=ends)


def _check_experts(buffer: Buffer, w13: torch.Tensor, w2: torch.Tensor, interleaved: bool) -> None:
    local, hidden = buffer.num_experts // buffer.num_ranks, buffer.hidden
    about: dict[str, Any] = {"device": buffer.device, "dtypes": (buffer.dtype,)}
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
