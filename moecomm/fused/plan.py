"""Plans of fused layers: kernels, schedule and layout of memory, worked out once for layers of the same sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moecomm.dispatch.reference import GROUP
from moecomm.fused import compute, gemm, kernels, schedules
from moecomm.fused.kernels import PLAIN, Epilogue, publish_kernel, reduce_kernel, row_pitch
from moecomm.fused.schedules import Schedule
from moecomm.gpu import tuning
from moecomm.gpu.plain_kernel import PlainKernel
from moecomm.ranks.settings import Settings

_LINE = 128  # bytes of a cache line
# Parts of the scratch memory begin at multiples of it, as tensors of torch do on GPUs.  No cache line is of two parts:
# it would be read before all of it is complete.
_PART = 512


class Scratch(NamedTuple):
    """Layout of a layer's memory outside of the window: where the fields of LayerArgs point, in bytes.

    The first product is the second GEMM's x.  In FP8, each row's scales of it begin at a cache line.  With scales of
    channels, that x is cast from it, with a scale for each row.
    """

    next_tile: int
    next_row: int
    fetched: int
    tile_done: int
    destinations: int
    rows: int
    product: int
    product_scales: int
    scales_pitch: int
    next_cast: int
    cast_done: int
    cast: int
    nbytes: int


class LayerPlan(NamedTuple):
    """Kernels, their sizes and the memory of a layer.

    Attributes:
        dtype: of published rows and of the first product.
        hidden, inner: columns of a row, and of the first product.
        max_rows: rows that the layer makes room for.
        row_tiles: words of LayerArgs::tile_done, with those that follow it.
        pitch: bytes from one published or fetched row to the next.
        apart: gate and up rows of w13 are not interleaved in memory.
        schedule: of both GEMMs.
        sms: multiprocessors of the GPU.
        clusters: of the launch that computes.
        together: ExpertLayerArgs::together.
        cast_rows: ExpertLayerArgs::cast_rows.
        by_channel: rows have one scale each, and weights one for a channel.
        publish, experts, reduce: kernels.
        scratch: layout of memory.
    """

    dtype: torch.dtype
    hidden: int
    inner: int
    max_rows: int
    row_tiles: int
    pitch: int
    apart: bool
    schedule: Schedule
    sms: int
    clusters: int
    together: int
    cast_rows: int
    by_channel: bool
    publish: PlainKernel
    experts: PlainKernel
    reduce: PlainKernel
    scratch: Scratch


@tuning.until_forgotten
def layer_plan(
    settings: Settings,
    rank: int,
    device: int | None,
    dtype: torch.dtype,
    inner: int,
    apart: bool,
    expected_rows: int,
    max_rows: int | None,
    epilogue: Epilogue = PLAIN,
    packed: bool = False,
) -> LayerPlan:
    """Return the plan of a layer of this rank.

    Args:
        settings: of the Buffer.
        rank: in the Buffer.
        device: number of the GPU.
        dtype: of rows as they travel, which is that of the weights, if these are not packed.
        inner: columns of w2.
        apart: gate and up rows of w13 are not interleaved in memory.
        expected_rows: rows of an expert to optimize for.
        max_rows: see Buffer.moe.
        epilogue: of both GEMMs.
        packed: weights are a PackedMxfp4.
    """
    hidden, local = settings.hidden, settings.local_experts(rank)
    by_channel = epilogue.channel_scales
    tiled = gemm.tiled_as(dtype, by_channel)
    schedule = schedules.schedule_of_both(tiled, expected_rows, inner, kernels.gpu_name(device))
    schedule = schedules.packed_as(schedule) if packed else schedule
    if max_rows is None:
        rows = settings.capacity_rows("expert", rank=rank)
    else:
        rows = min(max_rows, settings.worst_rows("expert", rank=rank))
    rows = max(1, rows)
    row_tiles = local + rows // schedule.most_rows
    sms = kernels.multiprocessors(device)
    clusters, counted = sms // schedule.cluster, compute.rows_per_counter(expected_rows * local)
    tiles = gemm.grouping(tiled, schedule, local, 2 * inner, rows)
    scratch = _scratch(dtype, hidden, inner, rows, row_tiles, settings.dtype if by_channel else None)
    return LayerPlan(
        dtype,
        hidden,
        inner,
        rows,
        2 * row_tiles + 1 if by_channel else row_tiles,
        row_pitch(dtype, hidden, by_channel),
        apart,
        schedule,
        sms,
        clusters,
        compute.rows_at_once(expected_rows, counted, tiles, schedule, clusters),
        compute.cast_rows_at_once(expected_rows * local),
        by_channel,
        publish_kernel(settings.dtype, dtype, hidden, by_channel),
        compute.layer_kernel(dtype, apart, schedule, hidden, settings.dtype, counted, epilogue),
        reduce_kernel(settings.dtype, hidden, settings.topk),
        scratch,
    )


def _scratch(
    dtype: torch.dtype, hidden: int, inner: int, rows: int, row_tiles: int, cast_from: torch.dtype | None
) -> Scratch:
    """Return the layout; `cast_from`: dtype of a first product that is cast in whole rows."""
    fetched, whole = -(-rows // kernels.LEAST_COUNTED), cast_from is not None
    scales_pitch = -(-4 * -(-inner // GROUP) // _LINE) * _LINE if dtype == kernels.FP8 else 0
    sizes = (  # counters, and what follows them
        4 * (3 + fetched + (2 * row_tiles + 1 if whole else row_tiles)),
        8 * rows,
        rows * row_pitch(dtype, hidden, whole),
        rows * inner * (cast_from or dtype).itemsize,
        rows * (4 if whole else scales_pitch),
        rows * inner if whole else 0,
    )
    ends = [0]
    for size in sizes:
        ends.append(-(-(ends[-1] + size) // _PART) * _PART)
    _, destinations, fetched_rows, product, product_scales, cast, nbytes = ends
    return Scratch(
        next_tile=4,
        next_row=8,
        fetched=12,
        tile_done=4 * (3 + fetched),
        destinations=destinations,
        rows=fetched_rows,
        product=product,
        product_scales=product_scales,
        scales_pitch=4 if whole else scales_pitch,
        next_cast=4 * (3 + fetched + row_tiles),
        cast_done=4 * (4 + fetched + row_tiles),
        cast=cast,
        nbytes=nbytes,
    )
