"""Kernels of csrc/gemm and csrc/fused, and the configurations that they are compiled for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from moecomm import _native
from moecomm.base.protocol import QUANT_GROUP
from moecomm.fused.schedules import Schedule
from moecomm.gpu.plain_kernel import PlainKernel

_CONSTANTS = _native.fused_constants()
THREADS, MOST_GROUPS = _CONSTANTS["gemm_threads"], _CONSTANTS["most_groups"]
SLOT_ROW_BYTES, PACKED_ROW_BYTES = _CONSTANTS["slot_row_bytes"], _CONSTANTS["packed_row_bytes"]
LEAST_COUNTED, PUBLISH_THREADS = _CONSTANTS["least_counted"], _CONSTANTS["publish_threads"]
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # dtypes of unquantized products
FP8 = torch.float8_e4m3fn
NAMES = {**TYPES, FP8: "e4m3", torch.int8: "e4m3"}  # enumerators of Type in C++; see GemmConfig::integers

# Of the reduce step: shared memory of a block, slots of a warp, bytes of all rows in a slot, most warps of a block.
_REDUCE_BYTES, _SLOTS, _SLOT, _WARPS = 220 * 1024, 3, 9216, 8
_STEP_BYTES = 512  # bytes of a row that a warp reads at once: 16 a lane


@dataclass(frozen=True)
class SharedKernel(PlainKernel):
    """A kernel with `shared` bytes of dynamic shared memory, for example GemmShared of csrc/gemm/gemm.cuh.

    `resident`: blocks of a multiprocessor.
    """

    shared: int = 0
    resident: int = 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.shared

    @property
    def blocks_per_sm(self) -> int:
        return self.resident


class Epilogue(NamedTuple):
    """Steps behind the products of a gated GEMM, apart from rounding: fields of GemmConfig.

    Attributes:
        activation: of gated products: GatedActivation.kernel.
        bias: the product may have a bias.
        channel_scales: sums are multiplied by a scale of their row and one of their channel.
    """

    activation: str = "swiglu"
    bias: bool = False
    channel_scales: bool = False


PLAIN = Epilogue()


def gemm_config(
    dtype: torch.dtype,
    gated: bool,
    apart: bool,
    schedule: Schedule,
    out: torch.dtype | None = None,
    epilogue: Epilogue = PLAIN,
    mxfp4: bool = False,
) -> str:
    """Return a GemmConfig (csrc/gemm/config.cuh) as C++ source.

    Args:
        dtype: of x and w; beside MXFP4 weights that of x.
        gated, apart, schedule, epilogue: see the fields of GemmConfig.
        out: dtype of the product, default `dtype`.
        mxfp4: the weights are MXFP4, beside bfloat16.
    """
    fields: dict[str, str | bool | int] = {"type": f"Type::{NAMES[dtype]}", "out": f"Type::{NAMES[out or dtype]}"}
    fields |= {"gated": gated, "apart": apart, **dataclasses.asdict(schedule)}
    del fields["dynamic"], fields["packed_stages"]  # the last fields of GemmConfig
    if schedule.blocks_per_sm == 1:
        del fields["blocks_per_sm"]
    fields |= {**epilogue._asdict(), "activation": f"Activation::{epilogue.activation}"}
    fields |= {"mxfp4": True} if mxfp4 else {}
    if dtype is torch.int8:
        fields["integers"] = True
    fields |= {"dynamic": True} if schedule.dynamic else {}
    fields |= {"packed_stages": schedule.packed_stages} if schedule.packed_stages else {}
    written = (f".{name} = {str(v).lower() if isinstance(v, bool) else v}" for name, v in fields.items())
    return f"GemmConfig{{{', '.join(written)}}}"


@lru_cache(maxsize=64)
def gemm_kernel(
    dtype: torch.dtype,
    gated: bool,
    apart: bool,
    schedule: Schedule,
    out: torch.dtype | None = None,
    epilogue: Epilogue = PLAIN,
    mxfp4: bool = False,
) -> SharedKernel:
    """Return the grouped GEMM kernel; arguments as in gemm_config()."""
    entry = f"grouped_gemm<{gemm_config(dtype, gated, apart, schedule, out, epilogue, mxfp4)}>"
    scaled = dtype == FP8 and not epilogue.channel_scales
    sizes = (schedule.most_rows, schedule.stages, mxfp4, schedule.dynamic, schedule.packed_stages)
    shared = _native.gemm_shared_bytes(scaled, *sizes)
    about = ("gemm/gemm", entry, "GemmArgs", threads(schedule))
    return SharedKernel(*about, cluster=schedule.cluster, shared=shared, resident=schedule.blocks_per_sm)


def threads(schedule: Schedule) -> int:
    """Return the threads of a block; some more widen packed weights."""
    return _native.gemm_threads(schedule.most_rows, schedule.packed_stages)


def unfit(columns: int, depth: int, fp8: bool, gated: bool, interleaved: bool) -> str:
    """Return why matrices `[columns, depth]` cannot be multiplied; empty if they can.

    TMA needs rows of a multiple of 16 bytes.  Interleaved groups are 8 gate and 8 up rows.  With FP8 and gate and up
    rows stored separately, 32 gate rows and their 32 up rows share a pair of scales.
    """
    unit = 64 if fp8 and gated and not interleaved else 16 if gated else 8
    step = 16 if fp8 else 8
    return f"want N a multiple of {unit} and K a multiple of {step}" if columns % unit or depth % step else ""


@lru_cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def gpu_name(device: int | None) -> str:
    """Return the name of a CUDA device, by which its tuning table is found; "cpu" for None."""
    return "cpu" if device is None else torch.cuda.get_device_name(device)


def row_pitch(dtype: torch.dtype, hidden: int, whole: bool = False) -> int:
    """Return RowConfig::pitch: the stride in bytes of published rows; with FP8 and INT8 a row includes its scales."""
    if dtype in TYPES:
        return dtype.itemsize * hidden
    return -(-(hidden + 4 * (1 if whole else -(-hidden // QUANT_GROUP))) // 128) * 128


def row_config(dtype: torch.dtype, hidden: int, counted: int = LEAST_COUNTED, whole: bool = False) -> str:
    """Return a RowConfig (csrc/fused/layer.cuh) as C++ source; `whole`: rows have one scale each."""
    more = f", .whole = true, .integers = {str(dtype is torch.int8).lower()}" if whole else ""
    return f"RowConfig{{.type = Type::{NAMES[dtype]}, .hidden = {hidden}, .counted = {counted}{more}}}"


@lru_cache(maxsize=64)
def publish_kernel(given: torch.dtype, dtype: torch.dtype, hidden: int, whole: bool = False) -> PlainKernel:
    """Return the kernel of the publish step: it copies rows of dtype `given` to where peers read them, as `dtype`."""
    entry = f"publish_rows<{row_config(dtype, hidden, whole=whole)}, Type::{NAMES[given]}>"
    return PlainKernel("fused/publish", entry, "LayerArgs", PUBLISH_THREADS)


@lru_cache(maxsize=64)
def reduce_kernel(dtype: torch.dtype, hidden: int, topk: int, by_k: bool = False) -> SharedKernel:
    """Return the kernel of the reduce step, which adds up the `topk` rows that return to each token, of `dtype`.

    `by_k`: in the order of k, whichever ranks they are from.
    """
    whole = -(-2 * hidden // _STEP_BYTES) * _STEP_BYTES
    piece = min(whole, 4 * _STEP_BYTES, max(1, _SLOT // (topk + 1) // _STEP_BYTES) * _STEP_BYTES)
    slot = _native.reduce_slot_bytes(topk, piece)
    warps = min(_WARPS, _REDUCE_BYTES // (_SLOTS * slot))
    config = f".type = Type::{TYPES[dtype]}, .hidden = {hidden}, .topk = {topk}"
    config += f", .warps = {warps}, .slots = {_SLOTS}, .piece_bytes = {piece}" + ", .by_k = true" * by_k
    entry = f"reduce_layer<ReduceConfig{{{config}}}>"
    return SharedKernel("fused/reduce", entry, "LayerArgs", 32 * warps, shared=warps * _SLOTS * slot)
