"""Products of the fused operators on GPUs: what they refuse, their schedules and their GemmArgs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from moecomm.errors import Unsupported
from moecomm.fused import schedules, tensor_maps
from moecomm.fused.fp8 import Fp8
from moecomm.fused.kernels import SLOT_ROW_BYTES
from moecomm.fused.schedules import BAND, BLOCK_COLUMNS, FP8_BAND, FP8_SCHEDULES, SCHEDULES, Schedule, block_columns
from moecomm.fused.structs import GemmArgs, Grouping
from moecomm.overlap.sizes import FP8, OF_FP8, Matrix


def values_of(matrix: Matrix) -> torch.Tensor:
    """Return a matrix without its scales."""
    return matrix.data if isinstance(matrix, Fp8) else matrix


def new_product(x: Matrix, *shape: int) -> torch.Tensor:
    """Return memory for products with x."""
    return values_of(x).new_empty(shape, dtype=OF_FP8 if isinstance(x, Fp8) else None)


def choose(
    dtype: torch.dtype, name: str | None, rows: int, blocks: int, columns: int, depth: int, units: int
) -> Schedule:
    """Return the schedule of this name, or for `blocks` blocks of `rows` rows."""
    if dtype == FP8:
        return FP8_SCHEDULES[name or schedules.choose_fp8(rows, blocks, columns, units)]
    return SCHEDULES[name or schedules.choose(rows, blocks, columns, depth, units)]


# For products whose depth is split, by tile height: shared memory holds the sums of a block, too.
SPLIT_SCHEDULES = {
    64: Schedule(row_unit=16, most_rows=64, stages=6, cluster=1),
    128: Schedule(row_unit=16, most_rows=128, stages=4, cluster=1),
}
_SPLITS = (4, 2)  # blocks of a cluster
# Multiprocessors of a GPC come in pairs, so clusters of 4 leave two of each of at most 8 GPCs unused.
_UNUSED = {2: 0, 4: 16}


def choose_split(rows: int, columns: int, units: int) -> tuple[int, Schedule]:
    """Return how many blocks split the depth of a product, and the schedule for it; 1: it is not split.

    A block loads all of w that its tile needs, so tiles are as high as there are rows.  If they are few, several blocks
    share the depth of each: as many as can run at once, because tiles of all ranks wait for each other.
    """
    schedule = SPLIT_SCHEDULES[64 if rows <= 64 else 128]
    tiles = -(-rows // schedule.most_rows) * -(-columns // BLOCK_COLUMNS)
    return next((split for split in _SPLITS if split * tiles <= units - _UNUSED[split]), 1), schedule


def band_of(dtype: torch.dtype) -> int:
    """Return the row tiles of a band."""
    return FP8_BAND if dtype == FP8 else BAND


def grouping(dtype: torch.dtype, schedule: Schedule, blocks: int, rows: int, columns: int, band: int) -> Grouping:
    """Return the tiles of a product of `blocks` blocks of `rows` rows."""
    return Grouping(
        groups=blocks,
        alignment=1,
        group_rows=rows,
        rows=blocks * rows,
        column_tiles=-(-columns // (block_columns(dtype) * schedule.cluster)),
        band=band,
        unit=schedule.row_unit,
        most_rows=schedule.most_rows,
    )


def check_matrices(x: Matrix, w: Matrix) -> None:
    """Raise Unsupported for matrices that the kernels do not take."""
    x, w = values_of(x), values_of(w)
    depth, columns = x.shape[-1], w.shape[-2]
    if depth % 8 or columns % 8 or depth == 0:
        raise Unsupported(f"fused products of depth {depth} and {columns} columns: both must be multiples of 8")
    if x.data_ptr() % 16 or w.data_ptr() % 16:
        raise Unsupported("fused products of tensors that are not aligned to 16 bytes")


def gemm_args(x: Matrix, w: Matrix, out: torch.Tensor, tiles: Grouping, schedule: Schedule) -> GemmArgs:
    """Return the arguments of a product; x: `[rows, K]`."""
    data, weights = values_of(x), values_of(w)
    columns, depth = weights.shape[-2:]
    shape = (weights.numel() // (columns * depth), columns, depth)
    box = (1, block_columns(weights.dtype), SLOT_ROW_BYTES // weights.itemsize)
    args = GemmArgs(
        w=tensor_maps.encode(weights.data_ptr(), shape, weights.dtype, box),
        out=out.data_ptr(),
        columns=columns,
        depth=depth,
        grouping=tiles,
    )
    maps = row_maps(data.data_ptr(), tuple(data.shape), data.dtype, schedule)
    args.x[: len(maps)] = maps
    if isinstance(x, Fp8) and isinstance(w, Fp8):
        args.x_scales, args.w_scales = x.scales.data_ptr(), w.scales.data_ptr()
        args.x_scale_row, args.x_scale_column = x.scales.shape[-1], 1
    return args


@lru_cache(maxsize=4096)
def row_maps(address: int, shape: tuple[int, ...], dtype: torch.dtype, schedule: Schedule) -> tuple[Any, ...]:
    """Return tensor maps of a matrix with boxes of all heights, as GemmArgs::x has them."""
    found, box = [], schedule.row_unit // schedule.cluster
    while box * schedule.cluster <= schedule.most_rows:
        found.append(tensor_maps.encode(address, shape, dtype, (box, SLOT_ROW_BYTES // dtype.itemsize)))
        box *= 2
    return tuple(found)
