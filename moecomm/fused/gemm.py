"""The grouped GEMM: multiplies the rows of each expert by the expert's matrix."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple, overload

import torch

from moecomm import _native
from moecomm.base.arrays import note_written
from moecomm.base.choices import Activation, Quantize
from moecomm.base.known import Known
from moecomm.base.validation import check_integer
from moecomm.errors import Unsupported
from moecomm.fused import kernels, reference, schedules, tensor_maps
from moecomm.fused.activations import SWIGLU, GatedActivation, check_activation
from moecomm.fused.formats import as_packed, format_of
from moecomm.fused.fp4 import NVFP4, Fp4
from moecomm.fused.fp8 import Fp8, Operand
from moecomm.fused.operands import Operands, check_counts, check_operands, result
from moecomm.fused.schedules import BAND, FP8_BAND, Schedule, block_columns
from moecomm.fused.weight_format import PLAIN, parts
from moecomm.fused.weights import GRANULARITY
from moecomm.gpu import cuda_driver, tuning
from moecomm.gpu.plain_kernel import enqueue
from moecomm.gpu.structs import struct


@overload
def grouped_gemm(
    x: Operand,
    w: Operand | Fp4,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int = 1,
    activation: Activation | None = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
    bias: torch.Tensor | None = None,
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
    w: Operand | Fp4,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int = 1,
    activation: Activation | None = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
    bias: torch.Tensor | None = None,
    interleaved: bool = True,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: Literal["fp8"],
    expected_rows: int | None = None,
    schedule: Schedule | None = None,
) -> Fp8: ...
def grouped_gemm(
    x: Operand,
    w: Operand | Fp4,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int = 1,
    activation: Activation | None = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
    bias: torch.Tensor | None = None,
    interleaved: bool = True,
    out: Operand | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: Quantize | None = None,
    expected_rows: int | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor | Fp8:
    """Compute `out[r] = x[r] @ w[e].T + bias[e]` for the rows r of each expert e, in the layouts of dispatch.

    Accumulation is in float32, in an order that depends on K alone: a row has the same bits at any position.  Nothing
    waits for the host, and a captured graph replays with the counts that it finds then; make the first call of a kind
    outside of a capture, because it compiles and loads the kernel.  No gradients.  On CPUs torch multiplies expert by
    expert.

    FP8: x and w are pairs of float8_e4m3fn data and float32 scales.  Tensor cores add up the products of 128 columns
    and keep about 14 bits of such a sum: the error is at most 2^-5 of the sum of these products' absolute values.  Each
    sum is multiplied by its scales and added in float32.  On CPUs x and w are widened to float32, exact except for the
    rounding of data * scale, and added in float32: the error is at most 2 (K + 2) * 2^-23 of the sum of all products'
    absolute values.

    Scales of rows and channels (fp8-dynamic checkpoints, INT8): the sum over all K is multiplied once by the float32
    product of the row's and the channel's scale.  On GPUs, tensor cores add all K columns of FP8 themselves: each of
    their K / 32 additions drops what is below 2^-13 of its largest term, as in the "fast accumulation" of other
    libraries.  INT8 is added exactly, and the sum is rounded to float32.

    Args:
        x: `[rows, K]` (layout "expert") or `[E, rows of an expert, K]` (layout "batched"), bfloat16 or float16; or
            `moecomm.fused.Fp8` (or any pair): such rows in float8_e4m3fn and scales `[..., ceil(K / 128)]`, one for 128
            columns, contiguous, in layout "expert" also column-major: `Routed.x` and `Routed.scales` of a dispatch with
            `quantize="fp8"`.  Beside weights with scales of channels, scales are `[..., 1]`, one for a row, or `[1]`.
        w: `[E, N, K]` of the same dtype.  With an activation N = 2 I: gate and up rows.  In FP8, an `Fp8` with scales
            `[E, ceil(N / 128), ceil(K / 128)]`, one for 128 rows (in the row order of w) and 128 columns; see
            `moecomm.fused.quantize_weights`; with an activation, see `Fp8` for those of gate and up.  Or with scales of
            channels, `[E, N]` (in the row order of w), or of matrices, `[E]`; these also of int8 values.  See
            `moecomm.fused.quantize_channels`.  Or an `Mxfp4` or `Nvfp4` (or any tuple alike), beside bfloat16 rows: the
            bits of the bfloat16 weights that it stands for.  `Nvfp4` is widened to these weights in every call.  Or a
            `PackedMxfp4` beside FP8 rows: the bits of the FP8 weights that it stands for.
        tokens_per_expert: int32 `[E]`, on the device of x and read there: rows of each expert, valid ones first.  On
            CPUs, counts that are negative or exceed the rows are bad input; on GPUs such groups are cut.
        alignment: layout "expert": each expert's rows begin at a multiple of it, `expert_alignment` of the dispatch.
        activation: None, or one of Buffer.moe, for example "swiglu": out = silu(gate) * up.  Computed in float32 and
            rounded once.
        activation_limit, activation_alpha: see Buffer.moe.
        bias: `[E, N]`, float32, bfloat16 or float16, added in float32 before the activation.  With an activation, the I
            gate columns come before the I up columns, whatever `interleaved` is.  None: no bias.  On GPUs, float32 is
            read as it is, and other dtypes are widened in every call.
        interleaved: with an activation: w is `moecomm.fused.interleave(w13)`; False: w13 itself, all gate rows, then
            all up rows.  The bits are the same (in FP8, for the same scales: scales follow the row order of w).
        out: `[rows, N]`, with an activation `[rows, N / 2]` (batched: one more dimension), of out_dtype; None:
            allocated.  Rows that belong to no expert are left unchanged.  With `quantize`, a pair, as it is returned.
        out_dtype: default: the dtype of x; for FP8, that of `out`, else bfloat16.  FP8: bfloat16 or float16.
        quantize: "fp8", for FP8 with an activation: cast the result to float8_e4m3fn, with one scale for 128 columns of
            a row, and return an Fp8 for a second GEMM: data `[rows, I]`, scales `[rows, ceil(I / 128)]`.  The bits are
            those of the dispatch's cast of the bfloat16 result.
        expected_rows: rows of an expert to optimize for; default: rows of x over E.  No result depends on it.
        schedule: tile sizes and pipeline depth, from moecomm.fused.SCHEDULES (FP8: FP8_SCHEDULES; MXFP4 weights:
            MXFP4_SCHEDULES, packed for FP8 rows: PACKED_SCHEDULES); default: by shape.

    Returns:
        `out`, or a new tensor; with `quantize`, an Fp8.

    Raises:
        BadInput: shapes, dtypes or devices that do not fit together; a schedule for other dtypes.
        Unsupported: a dtype other than bfloat16, float16, FP8 and INT8; K or N not a multiple of 8 (with an activation,
            N of 16); FP8 and INT8 with K not a multiple of 16; FP8 with scales of blocks, not interleaved, with I not a
            multiple of 32; more than 512 experts; `quantize` without FP8 or an activation; a GPU that is not Hopper
            (compute capability 9.0).
    """
    options = (alignment, activation, activation_limit, activation_alpha, interleaved, out_dtype, quantize)
    key = _key_of(x, w, tokens_per_expert, bias, out, (*options, expected_rows, schedule))
    if key is not None and (known := _known.get(key)) is not None:
        return known.run(x, w, tokens_per_expert, bias, out)
    w = as_packed("w", w)
    if (of := format_of(w)) is NVFP4:  # no kernel reads it
        of.check_parts("w", w)
        of, w = PLAIN, of.widen(w, of.packed * w[0].shape[2])
    given = check_operands(x, w, of, tokens_per_expert, alignment, activation, interleaved, bias)
    gated = None if activation is None else check_activation(activation, activation_limit, activation_alpha)
    if expected_rows is not None:
        check_integer("expected_rows", expected_rows, 0)
    if schedule is not None:
        tiled = tiled_as(given.x.dtype, given.by_channel)
        schedules.check_schedule(tiled, schedule, given.mxfp4 or given.packed)
    product, scales = result(given, activation, out, out_dtype, quantize)
    returned = product if scales is None else Fp8(product, scales)
    if out is not None:
        note_written("out", product, scales)
    if not product.is_cuda:
        check_counts(tokens_per_expert, given.x.shape[:-1], alignment)
        how: dict[str, Any] = {"alignment": alignment, "activation": gated, "interleaved": interleaved, "bias": bias}
        if of.packed > 1:
            w = of.widen(w, given.x.shape[-1])
        elif given.x_scales is not None and given.w_scales is not None:  # of the usual shapes
            x, w = (given.x, given.x_scales), (given.w, given.w_scales)
        reference.grouped_gemm(x, w, tokens_per_expert, **how, out=returned)
        return returned
    _want_hopper(product.device.index)
    rows = given.x.shape[:-1].numel() // len(given.w) if expected_rows is None else expected_rows
    multiply(given, gated, interleaved, product, scales, rows, alignment, schedule)
    if key is not None and given.w_scales is parts(w)[1] and given.x_scales is parts(x)[1]:
        made = None if scales is None else (scales.shape, scales.dtype)
        _known.add(key, _Checked(gated, interleaved, rows, alignment, schedule, (product.shape, product.dtype), made))
    return returned


class _Checked(NamedTuple):
    """Arguments of multiply() for a call of grouped_gemm whose tensors and words have passed all checks."""

    activation: GatedActivation | None
    interleaved: bool
    rows: int  # of an expert, expected
    alignment: int
    schedule: Schedule | None
    product: tuple[tuple[int, ...], torch.dtype]
    scales: tuple[tuple[int, ...], torch.dtype] | None  # of the product

    def run(
        self, x: Operand, w: Operand | Fp4, counts: torch.Tensor, bias: torch.Tensor | None, out: Operand | None
    ) -> torch.Tensor | Fp8:
        """Multiply tensors with the same types and shapes as the checked ones."""
        (rows, x_scales), (matrices, w_scales) = parts(x), parts(w)
        if out is None:
            product = torch.empty(self.product[0], dtype=self.product[1], device=rows.device)
            made = self.scales
            scales = None if made is None else torch.empty(made[0], dtype=made[1], device=rows.device)
        else:
            product, scales = parts(out)
            note_written("out", product, scales)
        given = Operands(rows, matrices, counts, x_scales, w_scales, bias)
        how = (self.rows, self.alignment, self.schedule)
        multiply(given, self.activation, self.interleaved, product, scales, *how)
        return product if scales is None else Fp8(product, scales)


_known: Known[_Checked] = Known()


def _key_of(x: Any, w: Any, counts: Any, bias: Any, out: Any, words: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return by what a call of grouped_gemm is known; None for arguments that have to be looked at one by one."""
    parts = [part for operand in (x, w, out) for part in (operand if isinstance(operand, tuple) else (operand, None))]
    if len(parts) != 6:
        return None
    tensors = _native.tensor_words((*parts, counts, bias))
    return None if tensors is None else (tensors, type(w), *words)


def multiply(
    given: Operands,
    activation: GatedActivation | None,
    interleaved: bool,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    expected_rows: int,
    alignment: int = 1,
    schedule: Schedule | None = None,
) -> None:
    """Launch the kernel of grouped_gemm, with checked arguments, on the current stream."""
    if out.numel() == 0:
        return
    if given.bias is not None and given.bias.dtype is not torch.float32:
        given = given._replace(bias=given.bias.float())
    x, w, counts, x_scales, w_scales, bias = given
    words = _native.tensor_words((x, w, counts, x_scales, w_scales, bias, out, out_scales))
    key = (words, activation, interleaved, expected_rows, alignment, schedule)
    launch = None if words is None else _launches().get(key)
    if launch is None:
        launch = _launch_of(given, activation, interleaved, out, out_scales, expected_rows, alignment, schedule)
        if words is not None:
            _launches().add(key, launch)
    device, kernel, blocks, args, dynamic = launch
    if dynamic:  # the counter is memory of this call: calls on other streams, and in graphs, have their own
        next_tile = torch.zeros(1, dtype=torch.int32, device=x.device)
        args = type(args).from_buffer_copy(args)
        args.next_tile = next_tile.data_ptr()
    if torch.cuda.current_device() == device and _native.cuda_context() != 0:
        enqueue(device, kernel, blocks, args)
    else:  # another GPU is current, or this thread has no CUDA context yet
        with torch.cuda.device(device):
            cuda_driver.bind_thread(device)
            enqueue(device, kernel, blocks, args)


class _Launch(NamedTuple):
    """Arguments of enqueue(), and whether the kernel takes its tiles from a counter, which is not among `args` yet."""

    device: int
    kernel: kernels.SharedKernel
    blocks: int
    args: ctypes.Structure
    dynamic: bool


@tuning.until_forgotten
def _launches() -> Known[_Launch]:
    """Launches of multiply() by its arguments."""
    return Known()


def _launch_of(
    given: Operands,
    activation: GatedActivation | None,
    interleaved: bool,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    expected_rows: int,
    alignment: int,
    schedule: Schedule | None,
) -> _Launch:
    device, dtype, apart = out.device.index, given.x.dtype, activation is not None and not interleaved
    used = activation or SWIGLU
    units = kernels.multiprocessors(device)
    if schedule is None:
        groups, columns, _ = given.w.shape
        if given.mxfp4:
            schedule = schedules.mxfp4_schedule(expected_rows, groups, columns, units)
        else:
            tiled = tiled_as(dtype, given.by_channel)
            depth = given.x.shape[-1] * dtype.itemsize // tiled.itemsize  # as many bytes
            name = kernels.gpu_name(device)
            schedule = schedules.schedule_of(tiled, expected_rows, groups, columns, depth, units, name)
            schedule = schedules.packed_as(schedule) if given.packed else schedule
    args = arguments(given, apart, out.data_ptr(), out_scales, schedule, alignment, used)
    blocks = units // schedule.cluster * schedule.cluster * schedule.blocks_per_sm
    epilogue = kernels.Epilogue(used.kernel, given.bias is not None, given.by_channel)
    about = (schedule, out.dtype, epilogue, given.mxfp4)
    kernel = kernels.gemm_kernel(dtype, activation is not None, apart, *about)
    return _Launch(device, kernel, blocks, args, schedule.dynamic)


def arguments(
    given: Operands,
    apart: bool,
    out: int,
    out_scales: torch.Tensor | None,
    schedule: Schedule,
    alignment: int = 1,
    activation: GatedActivation = SWIGLU,
) -> ctypes.Structure:
    """Return the arguments of a launch; `out`: an address.  Rows of x may have any stride; a bias is float32.

    The struct is cached and shared by launches with the same addresses: do not write to it.
    """
    x, w, x_scales, w_scales = given.x, given.w, given.x_scales, given.w_scales
    scales = None
    if x_scales is not None and w_scales is not None:
        made = 0 if out_scales is None else out_scales.data_ptr()
        scales = (x_scales.data_ptr(), w_scales.data_ptr(), made, *x_scales.stride()[-2:])
    elif w_scales is not None:  # of MXFP4
        scales = (0, w_scales.data_ptr(), 0, 0, 0)
    at = (x.data_ptr(), w.data_ptr(), given.counts.data_ptr(), out)
    strides = None if x.is_contiguous() else x.stride()
    bias = 0 if given.bias is None else given.bias.data_ptr()
    about = (bias, activation, given.by_channel, given.mxfp4)
    return arguments_at(at, x.shape, strides, x.dtype, w.shape, scales, apart, schedule, alignment, *about)


@lru_cache(maxsize=1024)
def arguments_at(
    at: tuple[int, int, int, int],
    x_shape: tuple[int, ...],
    x_strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    w_shape: tuple[int, ...],
    scales: tuple[int, int, int, int, int] | None,
    apart: bool,
    schedule: Schedule,
    alignment: int = 1,
    bias: int = 0,
    activation: GatedActivation = SWIGLU,
    by_channel: bool = False,
    mxfp4: bool = False,
) -> ctypes.Structure:
    """Return the arguments of a launch by addresses; see arguments().

    Cached, because looking up some ten tensor maps takes longer than the rest of a call.

    Args:
        at: addresses of x, w, the counts and the product.
        x_shape: sizes of x, `[rows, K]` or `[groups, rows of a group, K]`.
        x_strides: of x, in elements; None: contiguous.
        dtype: of x and w; beside MXFP4 weights that of x.
        w_shape: sizes of w, as it is packed.
        scales: in FP8 and MXFP4 the addresses of those of x, w and the product (0: none), and strides of those of x.
        apart, schedule, alignment, activation: see arguments().
        bias: address of the bias; 0: none.
        by_channel, mxfp4: see Operands.
    """
    x, w, counts, out = at
    (groups, columns, _), depth, rows = w_shape, x_shape[-1], math.prod(x_shape[:-1])
    tiled = tiled_as(dtype, by_channel)
    w_dtype, w_bytes = (torch.uint8, kernels.PACKED_ROW_BYTES) if mxfp4 else (dtype, kernels.SLOT_ROW_BYTES)
    of_w: Any
    if schedule.packed_stages > 0:
        of_w = _packed_map(w, w_shape, apart, block_columns(tiled))
    else:
        of_w = _weight_map(w, w_shape, w_dtype, apart, block_columns(tiled), w_bytes)
    args = struct("GemmArgs")(
        w=of_w,
        out=out,
        counts=counts,
        columns=columns,
        depth=depth,
        bias=bias,
        limit=activation.limit,
        alpha=activation.alpha,
        grouping=grouping(tiled, schedule, groups, columns, rows, alignment, x_shape[1] if len(x_shape) == 3 else 0),
    )
    step = kernels.SLOT_ROW_BYTES // dtype.itemsize
    box, index = schedule.row_unit // schedule.cluster, 0
    while box * schedule.cluster <= schedule.most_rows:
        args.x[index] = tensor_maps.encode(x, (rows, depth), dtype, (box, step), x_strides)
        box, index = 2 * box, index + 1
    if scales is not None:
        args.x_scales, args.w_scales, args.out_scales, args.x_scale_row, args.x_scale_column = scales
    return args


def grouping(
    dtype: torch.dtype,
    schedule: Schedule,
    groups: int,
    columns: int,
    rows: int,
    alignment: int = 1,
    group_rows: int = 0,
) -> ctypes.Structure:
    """Return the tiles of a product `[rows, columns]`; `group_rows`: rows of a group in layout "batched"."""
    return struct("Grouping")(
        groups=groups,
        alignment=alignment,
        group_rows=group_rows,
        rows=rows,
        column_tiles=-(-columns // (block_columns(dtype) * schedule.cluster)),
        band=FP8_BAND if dtype == kernels.FP8 else BAND,
        unit=schedule.row_unit,
        most_rows=schedule.most_rows,
    )


def tiled_as(dtype: torch.dtype, by_channel: bool) -> torch.dtype:
    """Return the dtype whose tiles and schedules a product has: without scales of blocks, FP8 has one accumulator."""
    return torch.bfloat16 if by_channel else dtype


def _weight_map(w: int, shape: tuple[int, ...], dtype: torch.dtype, apart: bool, columns: int, row_bytes: int) -> Any:
    if apart:
        matrix, strides, boxes = split_map(shape, dtype, columns, row_bytes)
        return tensor_maps.encode(w, matrix, dtype, boxes, strides)
    box = (1, columns, row_bytes // dtype.itemsize)
    return tensor_maps.encode(w, tuple(shape), dtype, box)


def _packed_map(w: int, shape: tuple[int, ...], apart: bool, columns: int) -> Any:
    """Return the map of a PackedMxfp4, of which 128 columns of eight rows lie together.  `columns`: see split_map."""
    groups, rows, words = shape
    eights, line, box = rows // GRANULARITY, GRANULARITY * words, GRANULARITY * kernels.PACKED_ROW_BYTES // 4
    if apart:
        pairs = eights // 2
        matrix, strides = (groups, pairs, 2, 1, line), (eights * line, line, pairs * line, line, 1)
        return tensor_maps.encode(w, matrix, torch.int32, (1, columns // (2 * GRANULARITY), 2, 1, box), strides, False)
    return tensor_maps.encode(w, (groups, eights, line), torch.int32, (1, columns // GRANULARITY, box), None, False)


def split_map(
    shape: tuple[int, ...], dtype: torch.dtype, rows: int | None = None, row_bytes: int = kernels.SLOT_ROW_BYTES
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return shape, strides and box of w13 `[E, 2 I, H]` as groups of 8 gate rows and their 8 up rows.

    A box then has the same layout in the ring as a box of the interleaved matrix.  `rows`: of a box; default: those of
    a block for `dtype`.  `row_bytes`: of a row of a box.
    """
    groups, columns, depth = shape
    rows = block_columns(dtype) if rows is None else rows
    half, pair = columns // 2 * depth, 2 * GRANULARITY
    box = (1, rows // pair, 2, GRANULARITY, row_bytes // dtype.itemsize)
    return (groups, columns // pair, 2, GRANULARITY, depth), (2 * half, GRANULARITY * depth, half, depth, 1), box


@lru_cache
def _want_hopper(device: int) -> None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        name = torch.cuda.get_device_name(device)
        raise Unsupported(f"the grouped GEMM is for GPUs of compute capability 9.0 (Hopper); GPU {device} is {name}")
