"""The grouped GEMM: rows of each expert times the expert's matrix."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from moecomm import _native
from moecomm.backends import cuda_driver
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import kernels, reference, schedules, tensor_maps
from moecomm.fused.schedules import BAND, Schedule, block_columns
from moecomm.fused.weights import GRANULARITY
from moecomm.plain_kernel import launch

_MOST_ROWS = 1 << 30
ACTIVATIONS = (None, "swiglu")


def grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    *,
    alignment: int = 1,
    activation: str | None = None,
    interleaved: bool = True,
    out: torch.Tensor | None = None,
    expected_rows: int | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """`out[r] = x[r] @ w[e].T` for the rows r of each expert e, as dispatch hands them out.

    Sums are float32, in an order that depends on nothing but K; a row has the same bits wherever it lies.  Nothing
    waits for the host, and a captured graph replays with whatever counts it then finds; the first call of a kind, which
    compiles and loads its kernel, is not for a capture.  No gradients.  On CPUs torch multiplies expert by expert.

    Args:
        x: `[rows, K]` (layout "expert") or `[E, rows of an expert, K]` (layout "batched"), bfloat16 or float16.
        w: `[E, N, K]` of the same dtype.  With "swiglu" N = 2 I: gate and up rows.
        tokens_per_expert: int32 `[E]`, on the device of x, read there: rows of each expert, valid ones first.
        alignment: layout "expert": each expert's rows begin at a multiple of it, `expert_alignment` of the dispatch.
        activation: None, or "swiglu": out = silu(gate) * up, computed in float32 and rounded once.
        interleaved: with "swiglu": w is `moecomm.fused.interleave(w13)`; False: w13 itself, all gate rows and then all
            up rows.  The bits are the same.
        out: `[rows, N]`, with "swiglu" `[rows, N / 2]` (batched: a dimension more), of the dtype of x; made if None.
            Rows that belong to no expert are left as they are.
        expected_rows: rows of an expert to be fast for; default: rows of x over E.  No result depends on it.
        schedule: how the work is cut (moecomm.fused.SCHEDULES); default: by the shape.

    Raises:
        BadInput: shapes, dtypes or devices that do not go together.
        Unsupported: a dtype besides bfloat16 and float16; K or N that is no multiple of 8 ("swiglu": N of 16); more
            than 512 experts; a GPU that is no Hopper (compute capability 9.0).
    """
    _check(x, w, tokens_per_expert, alignment, activation)
    columns = w.shape[1] // (1 if activation is None else 2)
    shape = (*x.shape[:-1], columns)
    if out is None:
        out = x.new_empty(shape)
    elif out.shape != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise BadInput("out", _what(out), f"contiguous {shape} of {x.dtype} on {x.device}")
    if not x.is_cuda:
        how: dict[str, Any] = {"alignment": alignment, "activation": activation, "interleaved": interleaved}
        return reference.grouped_gemm(x, w, tokens_per_expert, **how, out=out)
    _want_hopper(x.device.index)
    if out.numel() == 0:
        return out
    if schedule is None:
        rows = x.shape[:-1].numel() // w.shape[0] if expected_rows is None else expected_rows
        groups, columns, depth = w.shape
        units = kernels.multiprocessors(x.device.index)
        schedule = schedules.SCHEDULES[schedules.choose(rows, groups, columns, depth, units)]
    apart = activation is not None and not interleaved
    call = (x, w, tokens_per_expert, alignment, activation, apart, out, schedule)
    if torch.cuda.current_device() == x.device.index and _native.cuda_context() != 0:
        _launch(*call)
    else:  # another GPU is current, or none is yet in this thread
        with torch.cuda.device(x.device):
            cuda_driver.bind_thread(x.device.index)
            _launch(*call)
    return out


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    counts: torch.Tensor,
    alignment: int,
    activation: str | None,
    apart: bool,
    out: torch.Tensor,
    schedule: Schedule,
) -> None:
    args = arguments(x, w, counts, alignment, apart, out.data_ptr(), schedule)
    blocks = kernels.multiprocessors(x.device.index) // schedule.cluster * schedule.cluster
    launch(kernels.gemm_kernel(x.dtype, activation == "swiglu", apart, schedule), blocks, args)


def arguments(
    x: torch.Tensor,
    w: torch.Tensor,
    counts: torch.Tensor,
    alignment: int,
    apart: bool,
    out: int,
    schedule: Schedule,
) -> kernels.GemmArgs:
    """What a launch is told; `out`: an address."""
    groups, columns, depth = w.shape
    rows = x.shape[:-1].numel()
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
        column_tiles=-(-columns // (BLOCK_COLUMNS * schedule.cluster)),
        band=BAND,
        unit=schedule.row_unit,
        most_rows=schedule.most_rows,
    )
    box, index = schedule.row_unit // schedule.cluster, 0
    while box * schedule.cluster <= schedule.most_rows:
        args.x[index] = tensor_maps.encode(x.data_ptr(), (rows, depth), x.dtype, (box, kernels.DEPTH))
        box, index = 2 * box, index + 1
    return args


def _weight_map(w: torch.Tensor, apart: bool) -> Any:
    if apart:
        shape, strides, box = apart_map(tuple(w.shape))
        return tensor_maps.encode(w.data_ptr(), shape, w.dtype, box, strides)
    return tensor_maps.encode(w.data_ptr(), tuple(w.shape), w.dtype, (1, BLOCK_COLUMNS, kernels.DEPTH))


def apart_map(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape, strides and box of w13 `[E, 2 I, H]` as a matrix of pairs: 8 gate rows, their 8 up rows, and so on.

    Boxes are then in the ring what those of the interleaved matrix are.
    """
    groups, columns, depth = shape
    half, pair = columns // 2 * depth, 2 * GRANULARITY
    box = (1, BLOCK_COLUMNS // pair, 2, GRANULARITY, kernels.DEPTH)
    return (groups, columns // pair, 2, GRANULARITY, depth), (2 * half, GRANULARITY * depth, half, depth, 1), box


@lru_cache
def _want_hopper(device: int) -> None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        name = torch.cuda.get_device_name(device)
        raise Unsupported(f"the grouped GEMM is for GPUs of compute capability 9.0 (Hopper); GPU {device} is {name}")


def _check(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor, alignment: int, activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        raise BadInput("activation", repr(activation), "None or 'swiglu'")
    if x.dim() not in (2, 3) or not x.is_contiguous() or x.shape[:-1].numel() > _MOST_ROWS:
        raise BadInput("x", _what(x), "contiguous [rows, K] or [experts, rows, K], at most 2^30 rows")
    if w.dim() != 3 or not w.is_contiguous() or w.dtype != x.dtype or w.device != x.device or 0 in w.shape:
        raise BadInput("w", _what(w), f"contiguous [experts, N, K] of {x.dtype} on {x.device}")
    if w.shape[2] != x.shape[-1] or (x.dim() == 3 and x.shape[0] != w.shape[0]):
        raise BadInput("w", _what(w), f"the K and, batched, the experts of x, {tuple(x.shape)}")
    if counts.shape != w.shape[:1] or counts.dtype != torch.int32 or counts.device != x.device:
        raise BadInput("tokens_per_expert", _what(counts), f"int32 [{w.shape[0]}] on {x.device}")
    if not counts.is_contiguous():
        raise BadInput("tokens_per_expert", "a tensor with gaps", "a contiguous one")
    if not 1 <= alignment < 1 << 20:
        raise BadInput("alignment", alignment, "1 to 2^20 - 1")
    if x.dtype not in kernels.TYPES:
        raise Unsupported(f"a grouped GEMM of {x.dtype}: want torch.bfloat16 or torch.float16")
    unit = 8 if activation is None else 16
    if w.shape[1] % unit or w.shape[2] % 8:
        raise Unsupported(f"w {tuple(w.shape)}: want N a multiple of {unit} and K a multiple of 8")
    if w.shape[0] > kernels.MOST_GROUPS:
        raise Unsupported(f"{w.shape[0]} experts on one rank: want at most {kernels.MOST_GROUPS}")
    if x.is_cuda and (x.data_ptr() % 16 or w.data_ptr() % 16):
        raise BadInput("x, w", "an address that is no multiple of 16", "tensors that begin at one")


def _what(tensor: torch.Tensor) -> str:
    gaps = "" if tensor.is_contiguous() else " with gaps"
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}{gaps}"
