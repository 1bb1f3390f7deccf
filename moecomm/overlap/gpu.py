"""GpuExecutor: the fused operators on GPUs of one NVLink domain, each one launch of a kernel of csrc/overlap.

Device memory of a workspace, at the same offsets on all ranks (csrc/overlap/args.h):

    state, flags                   CONTROL_BYTES
    packets                        two halves, a sixteenth of the rest and at most 8 MiB each
    staging                        two halves of all that is left
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from moecomm import _native
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import schedules, tensor_maps
from moecomm.fused.fp8 import Fp8
from moecomm.fused.kernels import SLOT_ROW_BYTES, multiprocessors
from moecomm.fused.schedules import BAND, BLOCK_COLUMNS, FP8_BAND, FP8_SCHEDULES, SCHEDULES, Schedule, block_columns
from moecomm.gpu import cuda_driver, plain_kernel
from moecomm.gpu.structs import struct
from moecomm.overlap import kernels
from moecomm.overlap.plans import Operators
from moecomm.overlap.sizes import FP8, GROUP, OF_FP8, Matrix, Sizes
from moecomm.window import Window

CONTROL_BYTES = 2 * kernels.STATE_BYTES + 2 * 8 * kernels.FLAGS
_MOST_PACKET_BYTES = 8 << 20
_LINE = 128
# Bytes that a warp pushes at a time: few enough that all warps have some, many enough that a flag costs little.
_LEAST_PIECE, _MOST_PIECE = 4096, 131072
_PUSH_WARPS = 3  # of a block
# Ranks choose the schedule of a product that they send alike, and each has its own depth: see SendTiles.
_NOMINAL_DEPTH = 4096
SUMMED = (torch.bfloat16, torch.float16)  # dtypes of all_reduce()


class GpuExecutor(Operators):
    """The fused operators of one rank.

    Every call is a launch on the current stream, and may be captured in a graph after the first call of its shape,
    which compiles and loads the kernel.  A wait that fails is raised by a later call of the Window, or its check().

    Attributes:
        staging: bytes of the Window that hold nothing between calls of all ranks.
        schedule: name of the schedule of all products, the same on all ranks: of moecomm.fused.SCHEDULES or
            FP8_SCHEDULES; None: by shape.

    Args:
        window: whose ranks all reach each other's memory; nothing else uses these bytes of it.
        offset: where the workspace begins in the memory of every rank, in bytes; a multiple of 256.
        nbytes: of the workspace, on each rank.

    Raises:
        BadInput: a workspace that is too small, or not in the Window.
        Unsupported: more than 8 ranks, or a GPU that is not Hopper.
    """

    def __init__(self, window: Window, offset: int = 0, nbytes: int | None = None) -> None:
        nbytes = window.nbytes - offset if nbytes is None else nbytes
        if offset % 256 or offset < 0 or offset + nbytes > window.nbytes:
            raise BadInput(
                "offset, nbytes", (offset, nbytes), f"bytes of the Window's {window.nbytes}, from 256 * n on"
            )
        if nbytes < CONTROL_BYTES + 64 * _LINE:
            raise BadInput("nbytes", nbytes, f"at least {CONTROL_BYTES + 64 * _LINE}")
        if window.num_ranks > kernels.MOST_RANKS:
            raise Unsupported(
                f"fused operators are for at most {kernels.MOST_RANKS} ranks; there are {window.num_ranks}"
            )
        self.schedule: str | None = None
        self._window, self._rank, self.num_ranks = window, window.rank, window.num_ranks
        self._device = window.device
        self._units = _multiprocessors(window.device)
        self._addresses = window.pointers.tolist()
        rest = nbytes - CONTROL_BYTES
        self.packet_bytes = min(rest // 16, _MOST_PACKET_BYTES) // _LINE * _LINE
        self.staging_bytes = (rest - 2 * self.packet_bytes) // 2 // 1024 * 1024
        packets = offset + CONTROL_BYTES
        staging = packets + 2 * self.packet_bytes
        self._overlap = struct("Overlap")(
            window=struct("Window").from_buffer_copy(window.handle),
            state=offset,
            flags=offset + 2 * kernels.STATE_BYTES,
        )
        self._overlap.peers[: self.num_ranks] = self._addresses
        self._overlap.control = window._opened.peers.addresses[self._rank]
        self._overlap.packets[:] = [packets, packets + self.packet_bytes]
        self._overlap.staging[:] = [staging, staging + self.staging_bytes]
        self.staging = range(staging, staging + 2 * self.staging_bytes)

    def plan(self, call: Sizes, gather: bool = False) -> Callable[..., Any]:
        """Return the function that makes a call of these sizes.

        Raises:
            BadInput: no room in the workspace.
            Unsupported: K or N not a multiple of 8; rows of tables of D columns that are not a multiple of 16 bytes.
        """
        if call.operator == "all_gather_matmul":
            return self._all_gather_matmul(call, gather)
        if call.operator == "embedding_all_to_all":
            return self._embedding_all_to_all(call)
        if call.operator == "matmul_all_reduce" and not call.fp8 and (gemv := self._gemv(call)) is not None:
            return gemv
        return self._send(call)

    def _all_gather_matmul(self, call: Sizes, gather: bool) -> Callable[..., Any]:
        rows, columns, depth = (call.dims[name] for name in ("M", "N", "K"))
        ranks, dtype = self.num_ranks, call.given
        whole: list[tuple[tuple[int, int], torch.dtype]] = [((ranks * rows, depth), dtype)]
        if call.fp8:
            whole.append(((ranks * rows, depth // GROUP), torch.float32))

        def gathered_of(data: torch.Tensor) -> tuple[Matrix | None, tuple[int, int]]:
            """Return memory for the rows of all ranks, if they are wanted, and its addresses."""
            if not gather:
                return None, (0, 0)
            values = data.new_empty(whole[0][0])
            if not call.fp8:
                return values, (values.data_ptr(), values.data_ptr())
            scales = data.new_empty(whole[1][0], dtype=torch.float32)
            return Fp8(values, scales), (values.data_ptr(), scales.data_ptr())

        if depth == 0 or rows == 0:  # nothing to multiply, and nothing to gather

            def nothing(x: Matrix, w: Matrix) -> tuple[torch.Tensor, Matrix | None]:
                return values_of(x).new_zeros(call.result, dtype=call.dtype), gathered_of(values_of(x))[0]

            return nothing
        if columns == 0:
            raise Unsupported("all_gather_matmul without columns")
        check_product(call)
        nbytes = [math.prod(shape) * of.itemsize for shape, of in whole]
        self._check_room("staging", sum(nbytes), self.staging_bytes)
        schedule = choose(dtype, self.schedule, rows, ranks, columns, depth, self._units)
        piece_rows = self._piece_rows(rows, depth * dtype.itemsize)
        args = struct("GatherMatmulArgs")(
            gemm=gemm_args(call, grouping(dtype, schedule, ranks, rows, columns, band_of(dtype))),
            overlap=self._overlap,
            scales=nbytes[0],
            piece_rows=piece_rows,
            pieces=-(-rows // piece_rows),
        )
        maps = [row_maps(at, (ranks * rows, depth), dtype, schedule) for at in self._staging()]
        half = len(args.gathered) // 2
        for first, of_half in zip((0, half), maps, strict=True):
            args.gathered[first : first + len(of_half)] = of_half
        kernel, blocks = kernels.gather_kernel(dtype, schedule), self._units // schedule.cluster * schedule.cluster

        def run(x: Matrix, w: Matrix) -> tuple[torch.Tensor, Matrix | None]:
            data = values_of(x)
            out = data.new_empty(call.result, dtype=call.dtype)
            gathered, (args.gathered_out, args.gathered_scales_out) = gathered_of(data)
            args.x = data.data_ptr()
            place(args.gemm, x, w, out, schedule)
            self._launch(kernel, blocks, args)
            return out, gathered

        return run

    def _gemv(self, call: Sizes) -> Callable[..., Any] | None:
        """Plan a launch of gemv_all_reduce; None if it can't multiply so many rows and columns."""
        rows, columns, depth = (call.dims[name] for name in ("M", "N", "K"))
        lines = -(-columns // kernels.GEMV_COLUMNS) * self.num_ranks * _native.gemv_lines(kernels.gemv_most(rows))
        if rows * columns == 0 or rows > kernels.GEMV_ROWS or lines * _LINE > self.packet_bytes:
            return None
        check_product(call)
        args = struct("GemvArgs")(overlap=self._overlap, rows=rows, columns=columns, depth=depth)
        kernel = kernels.gemv_kernel(call.dtype, rows, self.num_ranks)

        def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            out = x.new_empty(call.result)
            args.x, args.w, args.out = x.data_ptr(), w.data_ptr(), out.data_ptr()
            if args.x % 16 or args.w % 16:
                raise Unsupported(UNALIGNED)
            self._launch(kernel, self._units, args)
            return out

        return run

    def can_sum(self, nbytes: int) -> bool:
        """Return whether all_reduce() takes a tensor of so many bytes: a multiple of 8, for which packets have room."""
        parts, owned = self._parts(nbytes)
        return nbytes % 8 == 0 and (owned * self.num_ranks + parts) * kernels.PART_BYTES <= self.packet_bytes

    def _parts(self, nbytes: int) -> tuple[int, int]:
        """Return the parts that all_reduce() cuts a tensor into, and the most that a rank owns."""
        parts = -(-nbytes // (8 * kernels.PART_WORDS))
        return parts, -(-parts // self.num_ranks)

    def all_reduce(self, y: torch.Tensor) -> torch.Tensor | None:
        """Add up a tensor of all ranks, in float32 and in rank order, and round the sum once.

        Args:
            y: bfloat16 or float16, contiguous; the same shape and dtype on all ranks.

        Returns:
            A new tensor, the same bits on all ranks; None: another dtype, or can_sum() is False.
        """
        if y.dtype not in SUMMED or not self.can_sum(y.nbytes):
            return None
        words, ranks = y.nbytes // 8, self.num_ranks
        _, owned = self._parts(y.nbytes)
        out = torch.empty_like(y)
        if words:
            args = struct("AllReduceArgs")(overlap=self._overlap, x=y.data_ptr(), out=out.data_ptr(), words=words)
            warps = kernels.ALL_REDUCE_THREADS // 32
            blocks = min(self._units, -(-owned * max(ranks - 1, 1) // warps))
            self._launch(kernels.all_reduce_kernel(y.dtype, ranks), blocks, args)
        return out

    def _embedding_all_to_all(self, call: Sizes) -> Callable[..., Any]:
        ranks, count, batch, columns = call.result
        bags = count * batch  # of a rank

        if math.prod(call.result) == 0:
            return lambda tables, indices, offsets=None: tables.new_empty(call.result)
        row_bytes = columns * call.dtype.itemsize
        unfit = f"embedding_all_to_all of rows of {row_bytes} bytes: want a multiple of 16, aligned so"
        if row_bytes % 16:
            raise Unsupported(unfit)
        warps = kernels.EMBEDDING_THREADS // 32 * self._units
        piece_bags = min(max(bags * ranks // (2 * warps), 1, -(-bags * ranks // (kernels.FLAGS - ranks))), bags)
        self._check_room("staging", bags * ranks * row_bytes, self.staging_bytes)
        args = struct("EmbeddingArgs")(
            overlap=self._overlap,
            num_rows=call.dims["V"],
            num_tables=count,
            batch=batch,
            columns=columns,
            piece_bags=piece_bags,
            pieces=-(-bags // piece_bags),
        )
        kernel = kernels.embedding_kernel(call.dtype)

        def run(tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
            out = tables.new_empty(call.result)
            args.tables, args.indices, args.out = tables.data_ptr(), indices.data_ptr(), out.data_ptr()
            if args.tables % 16:
                raise Unsupported(unfit)
            args.offsets = 0 if offsets is None else offsets.data_ptr()
            args.num_indices, args.pooling = indices.numel(), indices.shape[2] if offsets is None else 0
            self._launch(kernel, self._units, args)
            return out

        return run

    def _send(self, call: Sizes) -> Callable[..., Any]:
        """Plan a launch of matmul_send, of blocks of rows each of which goes to a rank, or of one to all."""
        if math.prod(call.result) == 0:
            return lambda x, w: values_of(x).new_empty(call.result, dtype=call.dtype)
        check_product(call)
        send, ranks, columns, dtype = call.operator.removeprefix("matmul_"), self.num_ranks, call.dims["N"], call.given
        rows = call.result[-2]
        blocks = {"reduce_scatter": ranks, "all_reduce": 1, "all_to_all": ranks * call.dims.get("E", 1)}[send]
        split = 1
        if send == "all_reduce" and dtype != FP8 and self.schedule is None:
            split, schedule = choose_split(rows, columns, self._units)
        if split == 1:
            schedule = choose(dtype, self.schedule, rows, blocks, columns, _NOMINAL_DEPTH, self._units)
        order = grouping(dtype, schedule, blocks, rows, columns, -(-band_of(dtype) // ranks) * ranks)
        row_tiles = -(-rows // schedule.most_rows)
        tiles = row_tiles * blocks * order.column_tiles
        units = -(-rows // schedule.row_unit)  # of rows of a block
        pitch_rows = -(-units // row_tiles) * schedule.row_unit
        slices = -(-pitch_rows // kernels.SLICE_ROWS)
        parts = -(-tiles // ranks) * schedule.cluster * ranks
        results = parts * pitch_rows * block_columns(dtype) * call.dtype.itemsize
        flags, needed = parts * split, results
        if send == "all_reduce":
            flags, needed = flags + tiles * schedule.cluster * slices, 2 * results
        self._check_room("flags", flags, kernels.FLAGS)
        self._check_room("staging", needed, self.staging_bytes)
        args = struct("SendMatmulArgs")(
            gemm=gemm_args(call, order), overlap=self._overlap, results=results, pitch_rows=pitch_rows, slices=slices
        )
        kernel = kernels.send_kernel(dtype, schedule, send, ranks, split)
        units = tiles * split if split > 1 else self._units // schedule.cluster * schedule.cluster

        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            out = values_of(x).new_empty(call.result, dtype=call.dtype)
            place(args.gemm, x, w, out, schedule)
            self._launch(kernel, units, args)
            return out

        return run

    def _staging(self) -> list[int]:
        """Addresses of both halves of this rank's staging."""
        return [self._addresses[self._rank] + at for at in self._overlap.staging]

    def _piece_rows(self, rows: int, row_bytes: int) -> int:
        """Rows that a warp pushes at a time: two pieces or more for each warp, where pieces are not too small."""
        items = 2 * _PUSH_WARPS * self._units
        wanted = max(1, self.num_ranks - 1) * rows * row_bytes // items
        piece = min(max(wanted, _LEAST_PIECE), _MOST_PIECE)
        least = -(-rows * self.num_ranks // (kernels.FLAGS - self.num_ranks))  # a flag each
        return min(rows, max(1, piece // row_bytes, least))

    def _check_room(self, what: str, needed: int, there: int) -> None:
        if needed <= there:
            return
        if what == "flags":
            raise Unsupported(f"a product of so many tiles: {needed} flags are needed, and there are {there}")
        want = f"at least {CONTROL_BYTES + 2 * needed * 16 // 14 + (1 << 12)} for this call"
        raise BadInput("nbytes of the workspace", there * 2 + CONTROL_BYTES, want)

    def _launch(self, kernel: plain_kernel.PlainKernel, blocks: int, args: ctypes.Structure) -> None:
        """Enqueue on the current stream.  Raises Closed, or the error of an earlier wait that has failed."""
        device, window = self._device.index, self._window
        with window._call():
            if _native.cuda_context() == 0:  # autograd's threads may have none yet
                cuda_driver.bind_thread(device)
            if torch.cuda.current_device() == device:
                plain_kernel.enqueue(device, kernel, blocks, args, overlap=True)
                return
            with torch.cuda.device(device):
                plain_kernel.enqueue(device, kernel, blocks, args, overlap=True)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # the kernels run in the emulator
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise Unsupported(f"fused operators are for Hopper GPUs; {device} is {torch.cuda.get_device_name(device)}")
    return multiprocessors(device.index)


def values_of(matrix: Matrix) -> torch.Tensor:
    """Return a matrix without its scales."""
    return matrix.data if isinstance(matrix, Fp8) else matrix


def new_product(x: Matrix, *shape: int) -> torch.Tensor:
    """Return memory for products with x."""
    return values_of(x).new_empty(shape, dtype=OF_FP8 if isinstance(x, Fp8) else None)


def choose(
    dtype: torch.dtype, name: str | None, rows: int, blocks: int, columns: int, depth: int, units: int
) -> Schedule:
    """Return the schedule of this name, or for `blocks` blocks of `rows` rows.  The operator orders its tiles."""
    shape = rows, blocks, columns, depth, units
    fp8 = dtype == FP8
    chosen = name or (schedules.choose_fp8(*shape) if fp8 else schedules.choose(*shape))
    return replace((FP8_SCHEDULES if fp8 else SCHEDULES)[chosen], dynamic=False)


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


def grouping(
    dtype: torch.dtype, schedule: Schedule, blocks: int, rows: int, columns: int, band: int
) -> ctypes.Structure:
    """Return the tiles of a product of `blocks` blocks of `rows` rows."""
    return struct("Grouping")(
        groups=blocks,
        alignment=1,
        group_rows=rows,
        rows=blocks * rows,
        column_tiles=-(-columns // (block_columns(dtype) * schedule.cluster)),
        band=band,
        unit=schedule.row_unit,
        most_rows=schedule.most_rows,
    )


UNALIGNED = "fused products of tensors that are not aligned to 16 bytes"


def check_product(call: Sizes) -> None:
    """Raise Unsupported for matrices that the kernels do not take."""
    depth, columns = call.dims["K"], call.dims["N"]
    if depth % 8 or columns % 8 or depth == 0:
        raise Unsupported(f"fused products of depth {depth} and {columns} columns: both must be multiples of 8")


def gemm_args(call: Sizes, tiles: ctypes.Structure) -> ctypes.Structure:
    """Return the arguments of a product, but for the matrices: see place()."""
    depth = call.dims["K"]
    args = struct("GemmArgs")(columns=call.dims["N"], depth=depth, grouping=tiles)
    if call.fp8:
        args.x_scale_row, args.x_scale_column = depth // GROUP, 1
    return args


def place(args: ctypes.Structure, x: Matrix, w: Matrix, out: torch.Tensor, schedule: Schedule) -> None:
    """Set the addresses of a product.  Raises Unsupported for matrices that are not aligned."""
    data, weights = values_of(x), values_of(w)
    columns, depth = weights.shape[-2:]
    if data.data_ptr() % 16 or weights.data_ptr() % 16:
        raise Unsupported(UNALIGNED)
    shape = (weights.numel() // (columns * depth), columns, depth)
    box = (1, block_columns(weights.dtype), SLOT_ROW_BYTES // weights.itemsize)
    maps = row_maps(data.data_ptr(), (data.numel() // depth, depth), data.dtype, schedule)
    args.w, args.out = tensor_maps.encode(weights.data_ptr(), shape, weights.dtype, box), out.data_ptr()
    args.x[: len(maps)] = maps
    if isinstance(x, Fp8) and isinstance(w, Fp8):
        args.x_scales, args.w_scales = x.scales.data_ptr(), w.scales.data_ptr()


@lru_cache(maxsize=4096)
def row_maps(address: int, shape: tuple[int, ...], dtype: torch.dtype, schedule: Schedule) -> tuple[Any, ...]:
    """Return tensor maps of a matrix with boxes of all heights, as GemmArgs::x has them."""
    found, box = [], schedule.row_unit // schedule.cluster
    while box * schedule.cluster <= schedule.most_rows:
        found.append(tensor_maps.encode(address, shape, dtype, (box, SLOT_ROW_BYTES // dtype.itemsize)))
        box *= 2
    return tuple(found)
