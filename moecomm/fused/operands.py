"""Checks of a grouped GEMM's operands.  Errors name the operand that does not fit."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch

from moecomm.base.arrays import check_memory, check_no_overlap, has_memory
from moecomm.base.choices import Activation
from moecomm.base.validation import check_alignment, check_dense, check_flag, check_name, check_same_device
from moecomm.dispatch.reference import GROUP
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import kernels
from moecomm.fused.fp4 import Fp4
from moecomm.fused.fp8 import BLOCKS, Operand, in_one_grid
from moecomm.fused.packed_mxfp4 import PACKED_MXFP4
from moecomm.fused.weight_format import WeightFormat, described

_MOST_ROWS = 1 << 30


class Operands(NamedTuple):
    """Tensors of a grouped GEMM; the bias is None if there is none.

    Scales are None, but those of FP8 operands and w_scales of MXFP4 weights.
    """

    x: torch.Tensor
    w: torch.Tensor
    counts: torch.Tensor
    x_scales: torch.Tensor | None = None
    w_scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def by_channel(self) -> bool:
        """Return whether the scales are of rows and channels: x_scales `[..., 1]`, w_scales `[E, N]`."""
        return self.w_scales is not None and self.w_scales.dim() == 2

    @property
    def mxfp4(self) -> bool:
        """Return whether w is MXFP4, beside bfloat16 rows."""
        return self.w.dtype is torch.uint8

    @property
    def packed(self) -> bool:
        """Return whether w is packed MXFP4, beside FP8 rows."""
        return self.w.dtype is torch.int32


def check_operands(
    x: Operand,
    w: Operand | Fp4,
    of: WeightFormat,
    counts: torch.Tensor,
    alignment: int,
    activation: str | None,
    interleaved: bool,
    bias: torch.Tensor | None = None,
) -> Operands:
    """Check the arguments of moecomm.fused.grouped_gemm, with weights of this format, and return the tensors.

    Raises BadInput or Unsupported.
    """
    if activation is not None:
        check_name("activation", activation, get_args(Activation))
    check_flag("interleaved", interleaved)
    if packed := of.packed > 1:
        of.check_parts("w", w)
    (x, x_scales), (w, w_scales) = _pair("x", x), _pair("w", w)
    check_dense("tokens_per_expert", counts)
    _check_memory(x, x=x, w=w, tokens_per_expert=counts)
    _check_memory(x, x=x_scales, w=w_scales)
    if x.dim() not in (2, 3) or not x.is_contiguous() or x.shape[:-1].numel() > _MOST_ROWS:
        raise BadInput("x", described(x), "contiguous [rows, K] or [experts, rows, K], at most 2^30 rows")
    if packed and of.quantize is None and x.dtype is not torch.bfloat16:
        raise BadInput("x", described(x), "rows of bfloat16 beside weights in MXFP4")
    fits = packed or w.dtype == x.dtype
    if w.dim() != 3 or not w.is_contiguous() or not fits or w.device != x.device or 0 in w.shape:
        raise BadInput("w", described(w), f"contiguous [experts, N, K] of {x.dtype} on {x.device}")
    columns, depth = w.shape[1], w.shape[2] * of.packed
    if of is PACKED_MXFP4 and depth == -(-x.shape[-1] // GROUP) * GROUP:
        depth = x.shape[-1]
    if depth != x.shape[-1] or (x.dim() == 3 and x.shape[0] != w.shape[0]):
        raise BadInput("w", described(w), f"the K and, batched, the experts of x, {tuple(x.shape)}")
    if counts.shape != w.shape[:1] or counts.dtype != torch.int32 or counts.device != x.device:
        raise BadInput("tokens_per_expert", described(counts), f"int32 [{w.shape[0]}] on {x.device}")
    if not counts.is_contiguous():
        raise BadInput("tokens_per_expert", "a tensor with gaps", "a contiguous one")
    check_alignment("alignment", alignment)
    by_channel = w_scales is not None and w_scales.dim() < 3
    if of is BLOCKS and w_scales is not None and activation is not None and not interleaved:
        w_scales = in_one_grid("w", w_scales, columns // 2)
    x_scales, w_scales = of.check_scales(x, x_scales, w, w_scales)
    if bias is not None:
        _check_bias(x, w, bias)
    read = {"x": (x, x_scales), "w": (w, w_scales), "tokens_per_expert": (counts,), "bias": (bias,)}
    for argument, tensors in read.items():
        for tensor in tensors:
            if tensor is not None:
                check_memory(argument, tensor)
    if x.dtype not in (*kernels.TYPES, kernels.FP8) and not (x.dtype is torch.int8 and by_channel):
        raise Unsupported(f"a grouped GEMM of {x.dtype}: want torch.bfloat16 or torch.float16, or Fp8")
    in_blocks = by_channel or (packed and of is not PACKED_MXFP4) or interleaved  # gate and up rows share no scale
    if why := kernels.unfit(columns, depth, x.dtype.itemsize == 1, activation is not None, in_blocks):
        raise Unsupported(f"w {tuple(w.shape)}: {why}")
    if w.shape[0] > kernels.MOST_GROUPS:
        raise Unsupported(f"{w.shape[0]} experts on one rank: want at most {kernels.MOST_GROUPS}")
    if x.is_cuda and (x.data_ptr() % 16 or w.data_ptr() % 16):
        raise BadInput("x, w", "an address that is no multiple of 16", "tensors that begin at one")
    return Operands(x, w, counts, x_scales, w_scales, bias)


def result(
    given: Operands, activation: str | None, out: Operand | None, out_dtype: torch.dtype | None, quantize: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tensors for the product and its scales (None without `quantize`), allocated unless `out` has them.

    Raises BadInput or Unsupported.
    """
    fp8 = given.x_scales is not None
    if quantize is not None:
        check_name("quantize", quantize, ("fp8",))
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise BadInput("out_dtype", repr(out_dtype), "a dtype, or None")
    if quantize is not None and (not fp8 or given.by_channel or activation is None or out_dtype is not None):
        raise Unsupported(
            "quantize='fp8' of a grouped GEMM: want x and w in FP8 with scales of blocks, an activation, no out_dtype"
        )
    shape = (*given.x.shape[:-1], given.w.shape[1] // (1 if activation is None else 2))
    data, scales = (None, None) if out is None else _pair("out", out)
    _check_memory(given.x, out=data)
    _check_memory(given.x, out=scales)
    if quantize is not None:
        data = _made("out", data, shape, kernels.FP8, given)
        return data, _made("out", scales, (*shape[:-1], -(-shape[-1] // GROUP)), torch.float32, given)
    if scales is not None:
        raise BadInput("out", "a pair", "a tensor; quantize='fp8' makes a pair")
    if out_dtype is None:
        out_dtype = given.x.dtype if not fp8 else torch.bfloat16 if data is None else data.dtype
    if out_dtype not in kernels.TYPES or (not fp8 and out_dtype != given.x.dtype):
        raise Unsupported(
            f"a product of {given.x.dtype} in {out_dtype}: want the dtype of x, of FP8 and INT8 bfloat16 or float16"
        )
    return _made("out", data, shape, out_dtype, given), None


def _pair(argument: str, given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(given, torch.Tensor):
        return given, None
    if not isinstance(given, tuple) or len(given) != 2 or not all(isinstance(t, torch.Tensor) for t in given):
        raise BadInput(argument, type(given).__name__, "a tensor, or a pair of values and scales")
    return given


def _check_memory(like: torch.Tensor, **given: torch.Tensor | None) -> None:
    """Raise BadInput unless all given tensors are dense, have memory and are on the device of `like`."""
    for argument, tensor in given.items():
        if tensor is not None:
            check_same_device(**{"x": like, argument: tensor})
            if not has_memory(tensor):
                raise BadInput(argument, "a tensor without memory", "one that has some")


def check_counts(counts: torch.Tensor, rows: torch.Size, alignment: int) -> None:
    """Raise BadInput for counts that are negative or exceed `rows`, `[rows]` or `[groups, rows of a group]`.

    For tensors on CPUs.
    """
    begin = 0
    for group, count in enumerate(counts.tolist()):
        if count < 0 or begin + count > rows[-1]:
            raise BadInput("tokens_per_expert", f"{count} rows in group {group}", f"0 to {max(0, rows[-1] - begin)}")
        if len(rows) == 1:
            begin = -(-(begin + count) // alignment) * alignment


def _check_bias(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> None:
    check_dense("bias", bias)
    _check_memory(x, bias=bias)
    dtypes = (torch.float32, *kernels.TYPES)
    if bias.shape != w.shape[:2] or bias.dtype not in dtypes or bias.device != x.device or not bias.is_contiguous():
        wanted = f"contiguous {tuple(w.shape[:2])} of {' or '.join(map(str, dtypes))} on {x.device}"
        raise BadInput("bias", described(bias), wanted)


def _made(
    argument: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, read: Operands
) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=read.x.device)
    if given.shape != shape or given.dtype != dtype or given.device != read.x.device or not given.is_contiguous():
        raise BadInput(argument, described(given), f"contiguous {shape} of {dtype} on {read.x.device}")
    check_memory(argument, given)
    check_no_overlap(argument, given, **read._asdict())
    return given
