"""The grouped GEMM: rows of each expert times the expert's matrix."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, overload

import torch

from moecomm import _native
from moecomm.backends import cuda_driver
from moecomm.core.arrays import note_written
from moecomm.core.choices import Activation, Quantize
from moecomm.core.integers import check_integer
from moecomm.errors import Unsupported
from moecomm.fused import kernels, reference, schedules, tensor_maps
from moecomm.fused.fp8 import Fp8, Operand
from moecomm.fused.operands import Operands, check_counts, check_operands, result
from moecomm.fused.schedules import BAND, FP8_BAND, Schedule, block_columns
from moecomm.fused.structs import GemmArgs, Grouping
from moecomm.fused.weights import GRANULARITY
from moecomm.jit.plain_kernel import launch


@overload
def grouped_gemm(
    x: Operand,
    w: Operand,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int = 1,
    activation: Activation | None = None,
    interleaved: bool = True,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: None = None,
    expected_rows: int | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor: ...
@overload
def grouped_gemm(
    x: Operand,
    w: Operand,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int = 1,
    activation: Activation | None = None,
    interleaved: bool = True,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: Literal["fp8"],
    expected_rows: int | None = None,
    schedule: Schedule | None = None,
) -> Fp8: ...
def grouped_gemm(
    x: Operand,
    w: Operand,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int = 1,
    activation: Activation | None = None,
    interleaved: bool = True,
    out: Operand | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: Quantize | None = None,
    expected_rows: int | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor | Fp8:
    """`out[r] = x[r] @ w[e].T` for the rows r of each expert e, as dispatch hands them out.

    Sums are float32, in an order that depends on nothing but K; a row has the same bits wherever it lies.  Nothing
    waits for the host, and a captured graph replays with whatever counts it then finds; the first call of a kind, which
    compiles and loads its kernel, is not for a capture.  No gradients.  On CPUs torch multiplies expert by expert.

    FP8: x and w are pairs of float8_e4m3fn and float32 scales.  Products of 128 columns are summed by the tensor cores,
    which keep 14 bits or so of a sum: off by at most 2^-5 of the sum of these products' absolute values.  Each such sum
    is multiplied with its scales and added in float32.  On CPUs x and w are widened to float32, exactly but for the
    rounding of data * scale, and all is added in float32: off by at most 2 (K + 2) units of 2^-23 of the sum of all
    absolute values.

    Args:
        x: `[rows, K]` (layout "expert") or `[E, rows of an expert, K]` (layout "batched"), bfloat16 or float16; or
            `moecomm.fused.Fp8` (any pair): such rows in float8_e4m3fn, and scales `[..., ceil(K / 128)]`, one for 128
            columns, contiguous, of layout "expert" also by column: `Routed.x` and `Routed.scales` of a dispatch with
            `quantize="fp8"`.
        w: `[E, N, K]` of the same dtype.  With "swiglu" N = 2 I: gate and up rows.  Of FP8, an `Fp8` as well:
            scales `[E, ceil(N / 128), ceil(K / 128)]`, one for 128 rows, as they lie here, and 128 columns;
            `moecomm.fused.quantize_weights` makes one.
        tokens_per_expert: int32 `[E]`, on the device of x, read there: rows of each expert, valid ones first.  Counts
            that are negative or do not fit are bad input on CPUs; on GPUs, where nothing waits for them, such groups
            are cut to the rows there are.
        alignment: layout "expert": each expert's rows begin at a multiple of it, `expert_alignment` of the dispatch.
        activation: None, or "swiglu": out = silu(gate) * up, computed in float32 and rounded once.
        interleaved: with "swiglu": w is `moecomm.fused.interleave(w13)`; False: w13 itself, all gate rows and then all
            up rows.  The bits are the same, in FP8 where the scales are: there they are of w as it lies.
        out: `[rows, N]`, with "swiglu" `[rows, N / 2]` (batched: a dimension more), of out_dtype; made if None.
            Rows that belong to no expert are left as they are.  With `quantize` a pair, as it is returned.
        out_dtype: default: the dtype of x or, of FP8, of `out`, else bfloat16; FP8: bfloat16 or float16.
        quantize: "fp8", with FP8 and "swiglu": the result is cast to float8_e4m3fn, one scale for 128 columns of a row,
            and returned as Fp8, what a second GEMM takes: data `[rows, I]`, scales `[rows, ceil(I / 128)]`.  The bits
            are those that the cast of a dispatch makes of the result in bfloat16.
        expected_rows: rows of an expert to be fast for; default: rows of x over E.  No result depends on it.
        schedule: how the work is cut (moecomm.fused.SCHEDULES, of FP8 FP8_SCHEDULES); default: by the shape.

    Raises:
        BadInput: shapes, dtypes or devices that do not go together; a schedule that there is not for them.
        Unsupported: a dtype besides bfloat16, float16 and FP8; K or N that is no multiple of 8 ("swiglu": N of 16);
            FP8: K that is no multiple of 16, or, not interleaved, I of 32; more than 512 experts; `quantize` without
            FP8 or "swiglu"; a GPU that is no Hopper (compute capability 9.0).
    """
    given = check_operands(x, w, tokens_per_expert, alignment, activation, interleaved)
    if expected_rows is not None:
        check_integer("expected_rows", expected_rows, 0)
    if schedule is not None:
        schedules.check_schedule(given.x.dtype, schedule)
    product, scales = result(given, activation, out, out_dtype, quantize)
    returned = product if scales is None else Fp8(product, scales)
    if out is not None:
        note_written("out", product, scales)
    if not product.is_cuda:
        check_counts(tokens_per_expert, given.x.shape[:-1], alignment)
        how: dict[str, Any] = {"alignment": alignment, "activation": activation, "interleaved": interleaved}
        reference.grouped_gemm(x, w, tokens_per_expert, **how, out=returned)
        return returned
    _want_hopper(product.device.index)
    rows = given.x.shape[:-1].numel() // len(given.w) if expected_rows is None else expected_rows
    multiply(given, activation is not None, interleaved, product, scales, rows, alignment, schedule)
    return returned


def multiply(
    given: Operands,
    swiglu: bool,
    interleaved: bool,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    expected_rows: int,
    alignment: int = 1,
    schedule: Schedule | None = None,
) -> None:
    """What grouped_gemm launches, of arguments that have been checked."""
    if out.numel() == 0:
        return
    device, dtype, apart = out.device.index, given.x.dtype, swiglu and not interleaved
    units = kernels.multiprocessors(device)
    if schedule is None:
        groups, columns, depth = given.w.shape
        schedule = schedules.schedule_of(dtype, expected_rows, groups, columns, depth, units)
    args = arguments(given, apart, out.data_ptr(), out_scales, schedule, alignment)
    blocks = units // schedule.cluster * schedule.cluster
    call = (kernels.gemm_kernel(dtype, swiglu, apart, schedule, out=out.dtype), blocks, args)
    if torch.cuda.current_device() == device and _native.cuda_context() != 0:
        launch(*call)
    else:  # another GPU is current, or none is yet in this thread
        with torch.cuda.device(device):
            cuda_driver.bind_thread(device)
            launch(*call)


def arguments(
    given: Operands, apart: bool, out: int, out_scales: torch.Tensor | None, schedule: Schedule, alignment: int = 1
) -> GemmArgs:
    """What a launch is told; `out`: an address.  Rows of x may lie apart.  Shared by launches with the same addresses:
    not to be written to.
    """
    x, w, x_scales, w_scales = given.x, given.w, given.x_scales, given.w_scales
    scales = None
    if x_scales is not None and w_scales is not None:
        made = 0 if out_scales is None else out_scales.data_ptr()
        scales = (x_scales.data_ptr(), w_scales.data_ptr(), made, *x_scales.stride()[-2:])
    at = (x.data_ptr(), w.data_ptr(), given.counts.data_ptr(), out)
    strides = None if x.is_contiguous() else x.stride()
    return _told(at, x.shape, strides, x.dtype, w.shape, scales, alignment, apart, schedule)


@lru_cache(maxsize=1024)
def _told(
    at: tuple[int, int, int, int],
    x_shape: tuple[int, ...],
    x_strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    w_shape: tuple[int, ...],
    scales: tuple[int, int, int, int, int] | None,
    alignment: int,
    apart: bool,
    schedule: Schedule,
) -> GemmArgs:
    """Worked out once: ten maps or so take longer to look up than all else of a call."""
    x, w, counts, out = at
    (groups, columns, depth), rows = w_shape, math.prod(x_shape[:-1])
    args = GemmArgs(
        w=_weight_map(w, w_shape, dtype, apart),
        out=out,
        counts=counts,
        columns=columns,
        depth=depth,
        grouping=Grouping(
            groups=groups,
            alignment=alignment,
            group_rows=x_shape[1] if len(x_shape) == 3 else 0,
            rows=rows,
            column_tiles=-(-columns // (block_columns(dtype) * schedule.cluster)),
            band=FP8_BAND if dtype == kernels.FP8 else BAND,
            unit=schedule.row_unit,
            most_rows=schedule.most_rows,
        ),
    )
    step = kernels.SLOT_ROW_BYTES // dtype.itemsize
    box, index = schedule.row_unit // schedule.cluster, 0
    while box * schedule.cluster <= schedule.most_rows:
        args.x[index] = tensor_maps.encode(x, (rows, depth), dtype, (box, step), x_strides)
        box, index = 2 * box, index + 1
    if scales is not None:
        args.x_scales, args.w_scales, args.out_scales, args.x_scale_row, args.x_scale_column = scales
    return args


def _weight_map(w: int, shape: tuple[int, ...], dtype: torch.dtype, apart: bool) -> Any:
    if apart:
        matrix, strides, boxes = split_map(shape, dtype)
        return tensor_maps.encode(w, matrix, dtype, boxes, strides)
    box = (1, block_columns(dtype), kernels.SLOT_ROW_BYTES // dtype.itemsize)
    return tensor_maps.encode(w, tuple(shape), dtype, box)


def split_map(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape, strides and box of w13 `[E, 2 I, H]` as a matrix of pairs: 8 gate rows, their 8 up rows, and so on.

    Boxes are then in the ring what those of the interleaved matrix are.
    """
    groups, columns, depth = shape
    half, pair = columns // 2 * depth, 2 * GRANULARITY
    box = (1, block_columns(dtype) // pair, 2, GRANULARITY, kernels.SLOT_ROW_BYTES // dtype.itemsize)
    return (groups, columns // pair, 2, GRANULARITY, depth), (2 * half, GRANULARITY * depth, half, depth, 1), box


@lru_cache
def _want_hopper(device: int) -> None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        name = torch.cuda.get_device_name(device)
        raise Unsupported(f"the grouped GEMM is for GPUs of compute capability 9.0 (Hopper); GPU {device} is {name}")
