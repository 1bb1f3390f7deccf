"""The grouped GEMM: rows of each expert times the expert's matrix."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, overload

import torch

from moecomm import _native
from moecomm.backends import cuda_driver
from moecomm.errors import Unsupported
from moecomm.fused import kernels, reference, schedules, tensor_maps
from moecomm.fused.fp8 import Fp8, Operand
from moecomm.fused.operands import Operands, check_operands, result
from moecomm.fused.schedules import BAND, FP8_BAND, Schedule, block_columns
from moecomm.fused.weights import GRANULARITY
from moecomm.plain_kernel import launch


@overload
def grouped_gemm(
    x: Operand,
    w: Operand,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int = 1,
    activation: str | None = None,
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
    activation: str | None = None,
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
    activation: str | None = None,
    interleaved: bool = True,
    out: Operand | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: str | None = None,
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
        tokens_per_expert: int32 `[E]`, on the device of x, read there: rows of each expert, valid ones first.
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
        BadInput: shapes, dtypes or devices that do not go together.
        Unsupported: a dtype besides bfloat16, float16 and FP8; K or N that is no multiple of 8 ("swiglu": N of 16);
            FP8: K that is no multiple of 16, or, not interleaved, I of 32; more than 512 experts; `quantize` without
            FP8 or "swiglu"; a GPU that is no Hopper (compute capability 9.0).
    """
    given = check_operands(x, w, tokens_per_expert, alignment, activation, interleaved)
    product, scales = result(given, activation, out, out_dtype, quantize)
    returned = product if scales is None else Fp8(product, scales)
    if not product.is_cuda:
        how: dict[str, Any] = {"alignment": alignment, "activation": activation, "interleaved": interleaved}
        reference.grouped_gemm(x, w, tokens_per_expert, **how, out=returned)
        return returned
    device = product.device.index
    _want_hopper(device)
    if product.numel() == 0:
        return returned
    if schedule is None:
        groups, columns, depth = given.w.shape
        rows = given.x.shape[:-1].numel() // groups if expected_rows is None else expected_rows
        units = kernels.multiprocessors(device)
        schedule = schedules.schedule_of(given.x.dtype, rows, groups, columns, depth, units)
    else:
        schedules.check_schedule(given.x.dtype, schedule)
    call = (given, alignment, activation is not None, interleaved, product, scales, schedule)
    if torch.cuda.current_device() == device and _native.cuda_context() != 0:
        _launch(*call)
    else:  # another GPU is current, or none is yet in this thread
        with torch.cuda.device(device):
            cuda_driver.bind_thread(device)
            _launch(*call)
    return returned


def _launch(
    given: Operands,
    alignment: int,
    swiglu: bool,
    interleaved: bool,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    schedule: Schedule,
) -> None:
    apart = swiglu and not interleaved
    args = arguments(given.x, given.w, given.counts, alignment, apart, out.data_ptr(), schedule)
    tell_scales(args, given, out_scales)
    blocks = kernels.multiprocessors(out.device.index) // schedule.cluster * schedule.cluster
    launch(kernels.gemm_kernel(given.x.dtype, swiglu, apart, schedule, out=out.dtype), blocks, args)


def arguments(
    x: torch.Tensor,
    w: torch.Tensor,
    counts: torch.Tensor,
    alignment: int,
    apart: bool,
    out: int,
    schedule: Schedule,
) -> kernels.GemmArgs:
    """What a launch is told, but for scales: see tell_scales; `out`: an address.  Rows of x may lie apart."""
    groups, columns, depth = w.shape
    rows, step = x.shape[:-1].numel(), kernels.SLOT_ROW_BYTES // x.element_size()
    strides = None if x.is_contiguous() else x.stride()
    args = kernels.GemmArgs(
        w=_weight_map(w, apart),
        out=out,
        counts=counts.data_ptr(),
        columns=columns,
        depth=depth,
        groups=groups,
        alignment=alignment,
        group_rows=x.shape[1] if x.dim() == 3 else 0,
        rows=rows,
        column_tiles=-(-columns // (block_columns(x.dtype) * schedule.cluster)),
        band=FP8_BAND if x.dtype == kernels.FP8 else BAND,
        unit=schedule.row_unit,
        most_rows=schedule.most_rows,
    )
    box, index = schedule.row_unit // schedule.cluster, 0
    while box * schedule.cluster <= schedule.most_rows:
        args.x[index] = tensor_maps.encode(x.data_ptr(), (rows, depth), x.dtype, (box, step), strides)
        box, index = 2 * box, index + 1
    return args


def tell_scales(args: kernels.GemmArgs, given: Operands, out_scales: torch.Tensor | None) -> None:
    """FP8: where those of x and w lie, and where those of a product that is cast go."""
    if given.x_scales is None or given.w_scales is None:
        return
    args.x_scales, args.w_scales = given.x_scales.data_ptr(), given.w_scales.data_ptr()
    args.x_scale_row, args.x_scale_column = given.x_scales.stride()[-2:]
    args.out_scales = 0 if out_scales is None else out_scales.data_ptr()


def _weight_map(w: torch.Tensor, apart: bool) -> Any:
    if apart:
        shape, strides, box = apart_map(tuple(w.shape), w.dtype)
        return tensor_maps.encode(w.data_ptr(), shape, w.dtype, box, strides)
    box = (1, block_columns(w.dtype), kernels.SLOT_ROW_BYTES // w.element_size())
    return tensor_maps.encode(w.data_ptr(), tuple(w.shape), w.dtype, box)


def apart_map(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
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
