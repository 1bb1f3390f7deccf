"""GpuExecutor: the fused operators on GPUs of one NVLink domain, each one launch of a kernel of csrc/overlap.

Device memory of a workspace, at the same offsets on all ranks (csrc/overlap/args.h):

    state, flags                   CONTROL_BYTES
    packets                        two halves, a sixteenth of the rest and at most 8 MiB each
    staging                        two halves of all that is left
"""

from __future__ import annotations

import ctypes

import torch

from moecomm import _native
from moecomm.errors import BadInput, Unsupported
from moecomm.fused.fp8 import Fp8
from moecomm.fused.kernels import multiprocessors
from moecomm.fused.schedules import block_columns
from moecomm.gpu import cuda_driver, plain_kernel
from moecomm.overlap import kernels
from moecomm.overlap.gpu_products import (
    band_of,
    check_matrices,
    choose,
    choose_split,
    gemm_args,
    grouping,
    new_product,
    row_maps,
    values_of,
)
from moecomm.overlap.kernels_structs import (
    AllReduceArgs,
    EmbeddingArgs,
    GatherMatmulArgs,
    GemvArgs,
    Overlap,
    SendMatmulArgs,
)
from moecomm.overlap.sizes import FP8, Matrix
from moecomm.window import Window
from moecomm.window.gpu_calls import Handle

CONTROL_BYTES = 2 * kernels.STATE_BYTES + 2 * 8 * kernels.FLAGS
_MOST_PACKET_BYTES = 8 << 20
_LINE = 128
# Bytes that a warp pushes at a time: few enough that all warps have some, many enough that a flag costs little.
_LEAST_PIECE, _MOST_PIECE = 4096, 131072
_PUSH_WARPS = 3  # of a block
# Ranks choose the schedule of a product that they send alike, and each has its own depth: see SendTiles.
_NOMINAL_DEPTH = 4096
SUMMED = (torch.bfloat16, torch.float16)  # dtypes of all_reduce()


class GpuExecutor:
    """The operators of one rank.  Arguments are checked, contiguous, and on the device of the Window.

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
        self._window, self._rank, self._ranks = window, window.rank, window.num_ranks
        self._device = window.device
        self._units = _multiprocessors(window.device)
        self._addresses = window.pointers.tolist()
        rest = nbytes - CONTROL_BYTES
        self.packet_bytes = min(rest // 16, _MOST_PACKET_BYTES) // _LINE * _LINE
        self.staging_bytes = (rest - 2 * self.packet_bytes) // 2 // 1024 * 1024
        packets = offset + CONTROL_BYTES
        staging = packets + 2 * self.packet_bytes
        self._overlap = Overlap(
            window=Handle.from_buffer_copy(window.handle),
            state=offset,
            flags=offset + 2 * kernels.STATE_BYTES,
        )
        self._overlap.peers[: self._ranks] = self._addresses
        self._overlap.control = window._opened.peers.addresses[self._rank]
        self._overlap.packets[:] = [packets, packets + self.packet_bytes]
        self._overlap.staging[:] = [staging, staging + self.staging_bytes]
        self.staging = range(staging, staging + 2 * self.staging_bytes)

    def all_gather_matmul(self, x: Matrix, w: Matrix, gather: bool) -> tuple[torch.Tensor, Matrix | None]:
        """Multiply the rows of all ranks.

        Args:
            x: bfloat16 or float16 `[M, K]`, or FP8 with scales; M and K are the same on all ranks.
            w: `[N, K]`, of the same dtype.
            gather: return the rows of all ranks, too.

        Returns:
            `[R*M, N]`, and with `gather` `[R*M, K]`, else None.

        Raises:
            BadInput: no room in the workspace.
            Unsupported: K or N not a multiple of 8.
        """
        data, ranks = values_of(x), self._ranks
        (rows, depth), columns, dtype = data.shape, len(values_of(w)), data.dtype
        out = new_product(x, ranks * rows, columns)
        parts = x if isinstance(x, Fp8) else (x,)  # values, and scales if there are any
        whole = [of.new_empty(ranks * rows, of.shape[1]) for of in parts]
        gathered = None if not gather else Fp8(*whole) if isinstance(x, Fp8) else whole[0]
        if rows == 0 or columns == 0 or depth == 0:  # nothing to multiply; rows of no columns have nothing to gather
            if depth == 0 or rows == 0:
                return out.zero_(), gathered
            raise Unsupported("all_gather_matmul without columns")
        check_matrices(x, w)
        self._check_room("staging", sum(of.nbytes for of in whole), self.staging_bytes)
        schedule = choose(dtype, self.schedule, rows, ranks, columns, depth, self._units)
        piece_rows = self._piece_rows(rows, data[0].nbytes)
        args = GatherMatmulArgs(
            gemm=gemm_args(x, w, out, grouping(dtype, schedule, ranks, rows, columns, band_of(dtype)), schedule),
            overlap=self._overlap,
            x=data.data_ptr(),
            gathered_out=whole[0].data_ptr() if gather else 0,
            gathered_scales_out=whole[-1].data_ptr(),
            scales=whole[0].nbytes,
            piece_rows=piece_rows,
            pieces=-(-rows // piece_rows),
        )
        maps = [row_maps(at, (ranks * rows, depth), dtype, schedule) for at in self._staging()]
        half = len(args.gathered) // 2
        for first, of_half in zip((0, half), maps, strict=True):
            args.gathered[first : first + len(of_half)] = of_half
        self._launch(kernels.gather_kernel(dtype, schedule), self._units // schedule.cluster * schedule.cluster, args)
        return out, gathered

    def matmul_reduce_scatter(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """Add up the products of all ranks, and return this rank's rows.

        Args:
            x: bfloat16 or float16 `[M, K]`, or FP8 with scales, M a multiple of R; M and N are the same on all
                ranks.
            w: `[N, K]`, of the same dtype.

        Returns:
            `[M/R, N]`.

        Raises:
            As all_gather_matmul().
        """
        rows, columns = len(values_of(x)) // self._ranks, len(values_of(w))
        out = new_product(x, rows, columns)
        self._send("reduce_scatter", x, w, out, self._ranks, rows)
        return out

    def matmul_all_reduce(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """Add up the products of all ranks.

        Args:
            x: bfloat16 or float16 `[M, K]`, or FP8 with scales; M and N are the same on all ranks.
            w: `[N, K]`, of the same dtype.

        Returns:
            `[M, N]`, the same bits on all ranks.

        Raises:
            As all_gather_matmul().
        """
        rows, columns = len(values_of(x)), len(values_of(w))
        out = new_product(x, rows, columns)
        if isinstance(x, Fp8) or isinstance(w, Fp8) or not self._gemv(x, w, out):
            self._send("all_reduce", x, w, out, 1, rows)
        return out

    def _gemv(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> bool:
        """Launch gemv_all_reduce if it can multiply so many rows and columns; False if not."""
        (rows, depth), columns = x.shape, len(w)
        lines = -(-columns // kernels.GEMV_COLUMNS) * self._ranks * _native.gemv_lines(kernels.gemv_most(rows))
        if out.numel() == 0 or rows > kernels.GEMV_ROWS or lines * _LINE > self.packet_bytes:
            return False
        check_matrices(x, w)
        args = GemvArgs(
            overlap=self._overlap,
            x=x.data_ptr(),
            w=w.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            columns=columns,
            depth=depth,
        )
        self._launch(kernels.gemv_kernel(x.dtype, rows, self._ranks), self._units, args)
        return True

    def can_sum(self, nbytes: int) -> bool:
        """Return whether all_reduce() takes a tensor of so many bytes: a multiple of 8, for which packets have room."""
        parts, owned = self._parts(nbytes)
        return nbytes % 8 == 0 and (owned * self._ranks + parts) * kernels.PART_BYTES <= self.packet_bytes

    def _parts(self, nbytes: int) -> tuple[int, int]:
        """Return the parts that all_reduce() cuts a tensor into, and the most that a rank owns."""
        parts = -(-nbytes // (8 * kernels.PART_WORDS))
        return parts, -(-parts // self._ranks)

    def all_reduce(self, y: torch.Tensor) -> torch.Tensor | None:
        """Add up a tensor of all ranks, in float32 and in rank order, and round the sum once.

        Args:
            y: bfloat16 or float16, contiguous; the same shape and dtype on all ranks.

        Returns:
            A new tensor, the same bits on all ranks; None: another dtype, or can_sum() is False.
        """
        if y.dtype not in SUMMED or not self.can_sum(y.nbytes):
            return None
        words, ranks = y.nbytes // 8, self._ranks
        _, owned = self._parts(y.nbytes)
        out = torch.empty_like(y)
        if words:
            args = AllReduceArgs(overlap=self._overlap, x=y.data_ptr(), out=out.data_ptr(), words=words)
            warps = kernels.ALL_REDUCE_THREADS // 32
            blocks = min(self._units, -(-owned * max(ranks - 1, 1) // warps))
            self._launch(kernels.all_reduce_kernel(y.dtype, ranks), blocks, args)
        return out

    def matmul_all_to_all(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """Multiply by the weight of each local expert, and return what all ranks have computed for this one.

        Args:
            x: bfloat16 or float16 `[E, R, C, K]`, or FP8 with scales; E, C and N are the same on all ranks.
            w: `[E, N, K]`, of the same dtype.

        Returns:
            `[R, E, C, N]`.

        Raises:
            As all_gather_matmul().
        """
        experts, ranks, rows, _ = values_of(x).shape
        out = new_product(x, ranks, experts, rows, values_of(w).shape[1])
        flat = Fp8(*(of.flatten(0, 2) for of in x)) if isinstance(x, Fp8) else x.flatten(0, 2)
        self._send("all_to_all", flat, w, out, experts * ranks, rows)
        return out

    def embedding_all_to_all(
        self, tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        """Add up the bags of the whole batch, and return this rank's samples from the tables of all ranks.

        Args:
            tables: float32, bfloat16 or float16 `[T, V, D]`; T and D are the same on all ranks.
            indices: int64 `[T, R*B, L]`, or `[total]` with offsets.  An index that is no row counts as none.
            offsets: int64 `[T*R*B + 1]`, or None.

        Returns:
            `[R, T, B, D]`.

        Raises:
            BadInput: no room in the workspace.
            Unsupported: rows of D columns that are not a multiple of 16 bytes.
        """
        (count, rows, columns), ranks = tables.shape, self._ranks
        bags = (indices.shape[0] * indices.shape[1] if offsets is None else len(offsets) - 1) // ranks  # of a rank
        batch = bags // max(count, 1)
        out = tables.new_empty(ranks, count, batch, columns)
        if out.numel() == 0:
            return out
        row_bytes = columns * tables.dtype.itemsize
        if row_bytes % 16 or tables.data_ptr() % 16:
            raise Unsupported(f"embedding_all_to_all of rows of {row_bytes} bytes: want a multiple of 16, aligned so")
        warps = kernels.EMBEDDING_THREADS // 32 * self._units
        piece_bags = min(max(bags * ranks // (2 * warps), 1, -(-bags * ranks // (kernels.FLAGS - ranks))), bags)
        self._check_room("staging", bags * ranks * row_bytes, self.staging_bytes)
        args = EmbeddingArgs(
            overlap=self._overlap,
            tables=tables.data_ptr(),
            indices=indices.data_ptr(),
            offsets=0 if offsets is None else offsets.data_ptr(),
            out=out.data_ptr(),
            num_rows=rows,
            num_indices=indices.numel(),
            num_tables=count,
            batch=batch,
            pooling=indices.shape[2] if offsets is None else 0,
            columns=columns,
            piece_bags=piece_bags,
            pieces=-(-bags // piece_bags),
        )
        self._launch(kernels.embedding_kernel(tables.dtype), self._units, args)
        return out

    def _send(self, send: str, x: Matrix, w: Matrix, out: torch.Tensor, blocks: int, rows: int) -> None:
        """Launch matmul_send, for `blocks` blocks of `rows` rows."""
        if out.numel() == 0:
            return
        check_matrices(x, w)
        ranks, columns, dtype = self._ranks, values_of(w).shape[-2], values_of(x).dtype
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
        results = parts * pitch_rows * block_columns(dtype) * out.itemsize
        flags, needed = parts * split, results
        if send == "all_reduce":
            flags, needed = flags + tiles * schedule.cluster * slices, 2 * results
        self._check_room("flags", flags, kernels.FLAGS)
        self._check_room("staging", needed, self.staging_bytes)
        args = SendMatmulArgs(
            gemm=gemm_args(x, w, out, order, schedule),
            overlap=self._overlap,
            results=results,
            pitch_rows=pitch_rows,
            slices=slices,
        )
        kernel = kernels.send_kernel(dtype, schedule, send, ranks, split)
        units = tiles * split if split > 1 else self._units // schedule.cluster * schedule.cluster
        self._launch(kernel, units, args)

    def _staging(self) -> list[int]:
        """Addresses of both halves of this rank's staging."""
        return [self._addresses[self._rank] + at for at in self._overlap.staging]

    def _piece_rows(self, rows: int, row_bytes: int) -> int:
        """Rows that a warp pushes at a time: two pieces or more for each warp, where pieces are not too small."""
        items = 2 * _PUSH_WARPS * self._units
        wanted = max(1, self._ranks - 1) * rows * row_bytes // items
        piece = min(max(wanted, _LEAST_PIECE), _MOST_PIECE)
        least = -(-rows * self._ranks // (kernels.FLAGS - self._ranks))  # a flag each
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
        device = self._device.index
        with self._window._call():
            if _native.cuda_context() == 0:  # autograd's threads may have none yet
                cuda_driver.bind_thread(device)
            if torch.cuda.current_device() == device:
                plain_kernel.launch(kernel, blocks, args, overlap=True)
                return
            with torch.cuda.device(device):
                plain_kernel.launch(kernel, blocks, args, overlap=True)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # the kernels run in the emulator
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise Unsupported(f"fused operators are for Hopper GPUs; {device} is {torch.cuda.get_device_name(device)}")
    return multiprocessors(device.index)
