"""An expert layer in two launches: rows are fetched under the first GEMM, and go home under the second.

csrc/README.md, "In two launches", says how.  Before, a dispatch of 16 bytes a row: who gets what, and where it lies.
With weights in FP8 rows are cast where they are offered, and travel so.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from moecomm import _native
from moecomm.backends import cuda_driver
from moecomm.core.arrays import as_output_tensor, as_tensor, check_no_overlap, check_rows, check_tensor
from moecomm.dispatch.arguments import check_routing
from moecomm.dispatch.plan import PublishedRows
from moecomm.dispatch.reference import GROUP
from moecomm.fused import gemm, kernels, schedules
from moecomm.fused.fp8 import Fp8
from moecomm.fused.kernels import FP8
from moecomm.fused.operands import Operands
from moecomm.fused.schedules import Schedule
from moecomm.jit.plain_kernel import PlainKernel, launch, load

if TYPE_CHECKING:
    from moecomm.buffer import Buffer
    from moecomm.routed import Routed

LEAST_COUNTED = 32  # kLeastCounted: rows of a counter
_MORE_COUNTED, _FEW_ROWS = 128, 4096  # where there are more rows than the second
FETCHERS = 16  # blocks that fetch: with fewer, short rows do not come in time (measured on 4 H200s)
_PUBLISH_THREADS = 512
FETCH_BYTES = 448 + 64  # at least FetchShared of csrc/fused/fetch.cuh, and what aligns it
# At home: bytes of a block's shared memory, slots of a warp, and, of a slot, bytes of all rows together.
_REDUCE_BYTES, _REDUCE_SLOTS, _REDUCE_SLOT, _REDUCE_WARPS = 220 * 1024, 3, 9216, 8
_STEP_BYTES = 512  # of a row: 16 a lane
# What the split of the first GEMM's tiles assumes: bytes a second over the links, and of weights from memory, and, by
# bytes of a column, products a second: 0.93 (bf16) and 0.90 (FP8) of what 8192 tokens of DeepSeek-V3 on 4 ranks reach,
# gate and up apart (bench/results/gemm-fp8-h200.json).  Blocks that fetch are counted out a little longer than that.
_LINK, _MEMORY, _LONGER = 300e9, 4e12, 1.15
_PRODUCTS = {2: 620e12, 1: 770e12}


class LayerArgs(ctypes.Structure):
    """LayerArgs of csrc/fused/layer.cuh."""

    _fields_ = (
        ("ctx", ctypes.c_uint64 * (_native.Context().nbytes // 8)),
        *((name, ctypes.c_uint64) for name in ("x", "published", "receive_buffer", "owners", "weights")),
        *((name, ctypes.c_uint64) for name in ("bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "bias_stride", "out_stride")),
        *((name, ctypes.c_uint64) for name in ("descriptors", "num_rows")),
        *((name, ctypes.c_uint64) for name in ("rows", "homes", "fetched", "made", "taken", "fetching", "late")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "max_rows", "row_tiles")),
    )


class LayerGemmArgs(ctypes.Structure):
    """LayerGemmArgs of csrc/fused/two_launches.cuh."""

    _fields_ = (
        ("gemm", kernels.GemmArgs),
        ("layer", LayerArgs),
        ("padding", ctypes.c_uint8 * (-ctypes.sizeof(LayerArgs) % 64)),
    )


def row_pitch(dtype: torch.dtype, hidden: int) -> int:
    """RowConfig::pitch: bytes from row to row, of what travels for a row of x: of FP8 the scales, too."""
    if dtype != FP8:
        return dtype.itemsize * hidden
    return -(-(hidden + 4 * -(-hidden // GROUP)) // 128) * 128


def row_config(dtype: torch.dtype, hidden: int, counted: int = LEAST_COUNTED) -> str:
    """RowConfig of csrc/fused/layer.cuh."""
    return f"RowConfig{{.type = Type::{kernels.NAMES[dtype]}, .hidden = {hidden}, .counted = {counted}}}"


def rows_per_counter(rows: int) -> int:
    """Rows of a counter, of so many in all: few, since tiles wait for whole counters, unless there are many counters,
    which are looked at one after the other.
    """
    return LEAST_COUNTED if rows <= _FEW_ROWS else _MORE_COUNTED


def publish_kernel(given: torch.dtype, dtype: torch.dtype, hidden: int) -> PlainKernel:
    """Our rows of dtype `given` to where peers read them, as `dtype`."""
    entry = f"publish_rows<{row_config(dtype, hidden)}, Type::{kernels.NAMES[given]}>"
    return PlainKernel("fused/offer", entry, "LayerArgs", _PUBLISH_THREADS)


def fetch_kernel(
    dtype: torch.dtype, apart: bool, schedule: Schedule, hidden: int, counted: int = LEAST_COUNTED
) -> kernels.SharedKernel:
    """The first launch; `dtype`: of rows as they travel, and of what it makes of them."""
    two = ("fused/two_launches", "fetch_and_multiply", "LayerGemmArgs")
    more = f", {row_config(dtype, hidden, counted)}"
    return kernels.gemm_kernel(dtype, True, apart, schedule, *two, more, helped=True, beside=FETCH_BYTES)


def send_kernel(dtype: torch.dtype, schedule: Schedule, out: torch.dtype | None = None) -> kernels.SharedKernel:
    """The second launch; `out`: of what it sends, if not `dtype`."""
    two = ("fused/two_launches", "multiply_and_send", "LayerGemmArgs")
    return kernels.gemm_kernel(dtype, False, False, schedule, *two, out=out)


def reduce_kernel(dtype: torch.dtype, hidden: int, topk: int) -> kernels.SharedKernel:
    """What has come home, added up."""
    whole = -(-2 * hidden // _STEP_BYTES) * _STEP_BYTES
    piece = min(whole, 4 * _STEP_BYTES, max(1, _REDUCE_SLOT // (topk + 1) // _STEP_BYTES) * _STEP_BYTES)
    slot = (topk + 1) * piece + 16 * topk + 128
    warps = min(_REDUCE_WARPS, _REDUCE_BYTES // (_REDUCE_SLOTS * slot))
    shared = warps * _REDUCE_SLOTS * slot
    config = f".type = Type::{kernels.TYPES[dtype]}, .hidden = {hidden}, .topk = {topk}"
    config += f", .warps = {warps}, .slots = {_REDUCE_SLOTS}, .piece_bytes = {piece}, .shared_bytes = {shared}"
    entry = f"reduce_rows<ReduceConfig{{{config}}}>"
    return kernels.SharedKernel("fused/home", entry, "LayerArgs", 32 * warps, shared=shared)


@lru_cache(maxsize=256)
def early_tiles(
    rows: int, hidden: int, intermediate: int, ranks: int, blocks: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Of the tiles of the first GEMM, in 1024ths, those that are made while some blocks fetch.

    Args:
        rows: of an expert.
        blocks: of the launch.
        dtype: of rows as they travel, and of weights.
    """
    # Seconds a row; what is near comes several times as fast.
    fetching = row_pitch(dtype, hidden) * max((ranks - 1) / ranks, 1 / 4) / _LINK
    products = 4 * hidden * intermediate * blocks / (blocks - FETCHERS) / _PRODUCTS[dtype.itemsize]
    weights = 2 * dtype.itemsize * hidden * intermediate / _MEMORY / max(1, rows)
    return min(1024, int(1024 * _LONGER * fetching / max(products, weights)))


class Layer:
    """See moecomm.fused.layer.Prepared.  The end alone waits for other ranks; its dispatch comes after this."""

    def __init__(
        self,
        buffer: Buffer,
        x: torch.Tensor,
        topk_idx: Any,
        topk_weights: Any,
        w13: torch.Tensor | Fp8,
        w2: torch.Tensor | Fp8,
        *,
        interleaved: bool,
        out: Any,
        bias: Any,
        max_rows: int | None,
        num_sms: int | None,
        expected_rows: int,
    ) -> None:
        self._rows = expected_rows  # of an expert
        self._buffer, self._interleaved = buffer, interleaved
        self._sms = kernels.multiprocessors(buffer.device.index)
        self._w13, self._w2 = ((w, None) if isinstance(w, torch.Tensor) else w for w in (w13, w2))
        self._dtype = self._w2[0].dtype  # of rows as they travel, and of what the first GEMM makes of them
        self._counted = rows_per_counter(expected_rows * len(self._w2[0]))
        tokens, hidden, topk = len(x), buffer.hidden, buffer.topk
        check_rows("x", x)
        about: dict[str, Any] = {"device": buffer.device, "dtypes": (buffer.dtype,)}
        topk_idx, topk_weights = check_routing(buffer, tokens, topk_idx, topk_weights)
        shape = (tokens, hidden)
        self.out = x.new_empty(shape) if out is None else as_output_tensor("out", out, **about, shape=shape)
        args = self._args = LayerArgs(x=x.data_ptr(), x_stride=2 * x.stride(0), num_tokens=tokens)
        args.out, args.out_stride = self.out.data_ptr(), check_rows("out", self.out)
        if bias is not None:
            bias = as_tensor("bias", bias)[0]
            one_row = bias.ndim == 1
            check_tensor("bias", bias, **about, shape=(hidden,) if one_row else (tokens, hidden))
            stride = check_rows("bias", bias.unsqueeze(0) if one_row else bias)
            args.bias, args.bias_stride = bias.data_ptr(), 0 if one_row else stride
        if out is not None:
            check_no_overlap("out", self.out, bias=bias, topk_weights=topk_weights)
        worst = buffer.settings.worst_rows("expert")
        args.max_rows = self._max_rows = max(1, worst if max_rows is None else min(max_rows, worst))
        context = buffer.session.context
        ctypes.memmove(args.ctx, context.address, context.nbytes)
        published, receive_buffer = row_pitch(self._dtype, hidden), topk * 2 * hidden  # a token
        self._blocks = buffer.memory.allocate(max(1, tokens) * published, max(1, tokens) * receive_buffer)
        args.published, args.receive_buffer = (block.offset for block in self._blocks)
        fetched, args.row_tiles = -(-self._max_rows // LEAST_COUNTED), self._row_tiles()
        counters = torch.empty(3 + fetched + args.row_tiles, dtype=torch.int32, device=buffer.device)
        args.late = counters.data_ptr()
        args.taken, args.fetching, args.fetched = (args.late + 4 * place for place in (1, 2, 3))
        args.made = args.fetched + 4 * fetched
        if topk_weights is not None:
            args.weights = topk_weights.data_ptr()
        self._kept: list[Any] = [x, topk_idx, topk_weights, bias, counters]
        self._home = reduce_kernel(buffer.dtype, hidden, topk)
        buffer.session.order()  # a round on another stream may still use what the memory of the window was before
        self._launch(publish_kernel(buffer.dtype, self._dtype, hidden), self._sms, args)
        self.dispatch = {
            "x": x,
            "topk_idx": topk_idx,
            "layout": "expert",
            "max_rows": max_rows,
            "sync": False,
            "num_sms": num_sms,
            "descriptors": PublishedRows(args.published, published, args.receive_buffer),
        }

    def compute(self, routed: Routed) -> None:
        """The two GEMMs, when the dispatch has been enqueued."""
        given, then = self._operands(routed)
        local, hidden, inner = self._w2[0].shape
        first, second = (
            schedules.schedule_of(self._dtype, self._rows, local, *sizes, self._sms)
            for sizes in ((2 * inner, hidden), (hidden, inner))
        )
        apart = not self._interleaved
        blocks = self._sms // first.cluster * first.cluster
        both = _told(self._args, given, apart, then.x.data_ptr(), then.x_scales, first)
        both.gemm.helpers = FETCHERS
        ranks = self._buffer.num_ranks
        both.gemm.early = early_tiles(self._rows, hidden, inner, ranks, blocks, self._dtype)
        self._launch(fetch_kernel(self._dtype, apart, first, hidden, self._counted), blocks, both)
        both = _told(self._args, then, False, 0, None, second)
        blocks = self._sms // second.cluster * second.cluster
        self._launch(send_kernel(self._dtype, second, self._buffer.dtype), blocks, both)

    def _row_tiles(self) -> int:
        """Of the GEMMs, that are counted: LayerArgs::row_tiles."""
        return 0

    def _operands(self, routed: Routed, scales_together: int = 1) -> tuple[Operands, Operands]:
        """Of the two GEMMs: rows to be fetched, and memory for what the first makes, in FP8 with a multiple of
        `scales_together` scales from row to row.
        """
        args, given, buffer = self._args, routed.args, self._buffer
        base = buffer.session.context.peers[buffer.rank]
        args.owners, args.descriptors = given.route.token_owner, base + given.out_x
        args.num_rows = given.num_rows
        _, hidden, inner = self._w2[0].shape
        pool = torch.empty(self._max_rows, row_pitch(self._dtype, hidden), dtype=torch.uint8, device=buffer.device)
        x, x_scales = pool[:, : self._dtype.itemsize * hidden].view(self._dtype), None
        h, h_scales = torch.empty(self._max_rows, inner, dtype=self._dtype, device=buffer.device), None
        if self._dtype == FP8:
            x_scales = pool[:, hidden : hidden + 4 * -(-hidden // GROUP)].view(torch.float32)
            of_row = -(-inner // GROUP)
            pitch = -(-of_row // scales_together) * scales_together
            h_scales = torch.empty(self._max_rows, pitch, dtype=torch.float32, device=buffer.device)[:, :of_row]
        homes = torch.empty(self._max_rows, dtype=torch.int64, device=buffer.device)
        args.rows, args.homes = pool.data_ptr(), homes.data_ptr()
        self._kept += [routed, pool, h, h_scales, homes]
        counts = routed.tokens_per_expert
        return (
            Operands(x, self._w13[0], counts, x_scales, self._w13[1]),
            Operands(h, self._w2[0], counts, h_scales, self._w2[1]),
        )

    def prepare_end(self, buffer: Buffer) -> Layer:
        """Nothing is left to prepare, but for the kernel."""
        load(self._home, buffer.device.index)
        return self

    def run_end(self) -> None:
        """Once all ranks have sent what their experts have made of our tokens, adds it up."""
        sharing = max(1, self._sms // self._buffer.session.most_blocks)
        # Blocks wait: where ranks share a GPU, some multiprocessors are left to the others' experts.
        blocks = self._sms if sharing == 1 else max(1, self._sms // (2 * sharing))
        self._launch(self._home, blocks, self._args)

    def finish_end(self, buffer: Buffer) -> torch.Tensor:
        """[T, H]."""
        self._kept, self._blocks = [], []
        return self.out

    def _launch(self, kernel: PlainKernel, blocks: int, args: ctypes.Structure) -> None:
        index, overlap = self._buffer.device.index, self._buffer.session.alone
        if torch.cuda.current_device() == index and _native.cuda_context() != 0:
            launch(kernel, blocks, args, overlap)
            return
        with torch.cuda.device(index):
            cuda_driver.bind_thread(index)
            launch(kernel, blocks, args, overlap)


def _told(
    layer: LayerArgs, given: Operands, apart: bool, out: int, out_scales: torch.Tensor | None, schedule: Schedule
) -> LayerGemmArgs:
    """What a launch is told."""
    return LayerGemmArgs(gemm=gemm.arguments(given, apart, out, out_scales, schedule), layer=layer)
