"""deep_ep.ElasticBuffer, of deep_ep 2.0 and 2.1, and its rounds, which EPBuffer shares.

They are over moecomm's flat (do_expand=False) and expert layouts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from moecomm import combine as combining
from moecomm import dispatch
from moecomm.base.choices import ScaleLayout, Wire
from moecomm.base.validation import check_flag, check_flags, check_integer, check_real
from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.arguments import (
    check_dimensions,
    check_dispatch_sizes,
    check_hint,
    check_stats,
    limit_of,
    not_here,
    refuse,
)
from moecomm.compat.deep_ep.buffer import one_bias, unpack
from moecomm.compat.deep_ep.comm import BufferBase
from moecomm.compat.deep_ep.event import EventHandle, EventOverlap, finished, uses_cuda, wait_for
from moecomm.compat.deep_ep.handles import EPHandle, expanded_rows
from moecomm.compat.deep_ep.pool import Pool, counted_by_pool
from moecomm.dispatch.routed import Routed
from moecomm.dispatch.tables import kept
from moecomm.errors import BadInput, Unsupported
from moecomm.gpu import padding
from moecomm.ranks.rendezvous import rendezvous
from moecomm.ranks.settings import Settings

_TOPK_HINT = 32  # when a caller does not say it: the most there can be
_FEW_SMS, _MANY_SMS = 16, 64  # measured to be enough beside computations, and alone
__all__ = ["EPHandle", "ElasticBuffer", "ElasticRounds"]

_HANDLE = "the handle that dispatch returned"
_NAMES = {"y": "x", "weight_grads": "topk_weights", "window_bytes": "num_bytes"}  # see Calls
_FLAT, _REPEAT = dispatch.Options("flat"), dispatch.Options()
_Room = tuple[Buffer, int | None, dispatch.Options]  # for what rows to make room in each dispatch; None: those expected
_WEIGHTS_HIDDEN = 8  # columns of the rows that routing weights travel beside: 16 bytes, the least there is


class ElasticRounds(BufferBase):
    """Rounds of deep_ep 2.  See ElasticBuffer for the arguments."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        deterministic: bool,
        allow_hybrid_mode: bool,
        allow_multiple_reduction: bool,
        prefer_overlap_with_compute: bool,
        num_allocated_qps: int,
        num_gpu_timeout_secs: float,
        explicitly_destroy: bool,
    ) -> None:
        if group is None:
            raise BadInput("group", "None", "a process group")
        check_integer("num_bytes", 0 if num_bytes is None else num_bytes, 0)
        check_integer("num_allocated_qps", num_allocated_qps, 0)
        check_hint(num_max_tokens_per_rank, hidden, num_topk)
        check_flags(
            allow_multiple_reduction=allow_multiple_reduction, prefer_overlap_with_compute=prefer_overlap_with_compute
        )
        check_real("num_gpu_timeout_secs", num_gpu_timeout_secs, 1e-3, 1e5)
        timeout_s = float(num_gpu_timeout_secs)
        self._pool = Pool(group, num_bytes or 0, timeout_s, method=f"{type(self).__name__}.dispatch", names=_NAMES)
        self._rooms: dict[tuple[Any, ...], _Room] = {}  # by sizes of calls, so that one look-up finds them
        self.group = group
        self.rank_idx, self.num_ranks = self._pool.ranks.rank, self._pool.ranks.ranks
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(group, max(1, num_max_tokens_per_rank), hidden, num_topk)
        self.num_bytes = num_bytes
        self.deterministic = deterministic
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or 1
        self.explicitly_destroy = explicitly_destroy

    def destroy(self) -> None:
        """Give the memory back.  Idempotent, and allowed without `explicitly_destroy` too."""
        self._pool.close()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that a bfloat16 dispatch without do_expand receives at most, with what its handle keeps."""
        check_hint(num_max_tokens_per_rank, hidden, num_topk)
        ranks, topk = rendezvous(group).ranks, num_topk or _TOPK_HINT
        sizes = Settings(ranks, hidden, ranks, topk, num_max_tokens_per_rank, torch.bfloat16, "", None)
        return -(-sizes.round_bytes("flat") // (2 << 20)) * (2 << 20)

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the numbers of RDMA ranks (1) and of NVLink ranks (all)."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the numbers of scale-out ranks (1) and of scale-up ranks (all)."""
        return 1, self.num_ranks

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """1: there are none."""
        return 1

    def _theoretical_num_sms(self) -> int:
        return _FEW_SMS if self.prefer_overlap_with_compute else _MANY_SMS

    def _barrier(self) -> None:
        self._pool.require_open()
        if uses_cuda():
            torch.cuda.synchronize()
        self._pool.calls.agree(f"{type(self).__name__}.barrier", "")

    def _dispatch(
        self,
        x: Any,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        cumulative_local_expert_recv_stats: torch.Tensor | None,
        num_experts: int | None,
        num_max_tokens_per_rank: int | None,
        expert_alignment: int | None,
        num_sms: int,
        async_with_compute_stream: bool,
        handle: EPHandle | None,
        do_handle_copy: bool,
        do_cpu_sync: bool | None,
        do_expand: bool,
        do_zero_padding: bool,
        use_tma_aligned_col_major_sf: bool,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        flags = {type(do_expand), type(do_zero_padding), type(do_handle_copy), type(async_with_compute_stream)}
        if flags != {bool}:
            check_flags(
                do_expand=do_expand,
                do_zero_padding=do_zero_padding,
                do_handle_copy=do_handle_copy,
                async_with_compute_stream=async_with_compute_stream,
            )
        if use_tma_aligned_col_major_sf is not False:
            check_flag("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
        if do_cpu_sync is not None:
            check_flag("do_cpu_sync", do_cpu_sync)
        if do_zero_padding and not do_expand:
            raise BadInput("do_zero_padding", True, "do_expand beside it")
        rows, scales = unpack(x)
        as_given = rows.dtype
        if scales is not None and rows.dtype.itemsize == 1:
            rows = rows.view(torch.float8_e4m3fn)  # bytes are bytes
        limit = limit_of(rows, num_sms)
        recv_x = recv_sf = None
        scale_layout: ScaleLayout = "column" if use_tma_aligned_col_major_sf and scales is not None else "row"
        if handle is not None:
            repeated = (num_experts, num_max_tokens_per_rank, expert_alignment)
            if cumulative_local_expert_recv_stats is not None:
                raise BadInput("cumulative_local_expert_recv_stats", "a tensor", "None beside handle")
            self._check_repeat(handle, repeated, topk_idx, do_cpu_sync, do_expand)
            native = handle.native
            request = dispatch.Request(_overridden(_REPEAT, scale_layout, limit))
            self._pool.calls.begin(native.rounds)
            routed = dispatch.dispatch(native.rounds, request, rows, scales=scales, handle=native, sync=False)
            recv_topk_idx = None if do_expand else handle.recv_topk_idx
            recv_topk_weights = None if topk_weights is None else self._send_weights(handle, topk_weights)
        else:
            if topk_idx is None or num_experts is None:
                raise BadInput("topk_idx, num_experts", "None", "both, or handle= to repeat a dispatch")
            check_dimensions("topk_idx", topk_idx, "tokens", "topk")
            sync = do_cpu_sync is not False
            most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            align = 1 if expert_alignment is None else expert_alignment
            if {type(num_experts), type(most), type(align)} != {int}:
                check_dispatch_sizes(num_experts, most, align, self.num_ranks)
            sizes = (rows.shape[-1], rows.dtype, num_experts, topk_idx.shape[-1], most, align, do_expand, sync)
            buffer, room, options = self._rooms.get(sizes) or self._make_room(rows.device, sizes)
            if cumulative_local_expert_recv_stats is not None:
                check_stats(cumulative_local_expert_recv_stats, num_experts // self.num_ranks, rows.device)
            if rows.shape[0] > most:  # which len() takes longer for
                raise BadInput("x", f"{len(rows)} tokens", f"at most num_max_tokens_per_rank = {most}")
            request = dispatch.Request(_overridden(options, scale_layout, limit))
            self._pool.calls.begin(buffer.rounds)
            routed = dispatch.dispatch(
                buffer.rounds, request, rows, topk_idx, topk_weights, scales=scales, max_rows=room, sync=sync
            )
            ids = topk_idx.clone() if do_handle_copy else topk_idx
            handle = EPHandle(routed.handle, num_experts, align, most, num_sms, ids, sync)
            if scale_layout == "row" and do_expand:  # all in one step
                recv_topk_idx, (recv_x, recv_sf, recv_topk_weights) = None, routed.plan.expert_tensors(routed)
            elif scale_layout == "row":
                recv_x, recv_sf, recv_topk_idx, recv_topk_weights = routed.plan.flat_tensors(routed)
            else:
                recv_topk_idx = routed.topk_idx
                recv_topk_weights = routed.row_weights if do_expand else routed.topk_weights
            if topk_weights is None:
                recv_topk_weights = None
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(routed.tokens_per_expert)
        if recv_x is None:
            recv_x, recv_sf = routed.x, None if scales is None else routed.scales
        if do_zero_padding:
            _zero_padding(routed, recv_x, recv_sf)
        if recv_x.dtype is not as_given:
            recv_x = recv_x.view(as_given)
        packed = recv_x if scales is None else (recv_x, recv_sf)
        return packed, recv_topk_idx, recv_topk_weights, handle, finished(async_with_compute_stream)

    def _combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        bias: Any,
        num_sms: int,
        async_with_compute_stream: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        if async_with_compute_stream is not False:
            check_flag("async_with_compute_stream", async_with_compute_stream)
        check_dimensions("x", x, "rows", "hidden")
        check_integer("num_sms", num_sms, 0)
        native = self._pool.native_of(handle, EPHandle, _HANDLE)
        wire: Wire = x.dtype if handle.do_expand and self.allow_multiple_reduction else "exact"
        options = _combine_options(wire, limit_of(x, num_sms or handle.num_sms))
        total = one_bias(bias)
        self._pool.calls.begin(native.rounds, combines=True)
        request = combining.Request(options, bias_first=True)
        out = combining.combine(native.rounds, request, x, native, bias=total, weight_grads=topk_weights)
        combined, weights = out if isinstance(out, tuple) else (out, None)
        return combined, weights, finished(async_with_compute_stream)

    def _make_room(self, device: torch.device, sizes: tuple[Any, ...]) -> _Room:
        """Open the Buffer for dispatches of these sizes."""
        hidden, dtype, num_experts, topk, most, align, expand, waits = sizes
        self._pool.require_open()
        check_dispatch_sizes(num_experts, most, align, self.num_ranks)
        dtype = torch.bfloat16 if dtype is torch.float8_e4m3fn else dtype
        buffer = self._pool.elastic(device, hidden, num_experts, topk, most, dtype, expand, waits=waits)
        ranks, room = self.num_ranks, None
        if not waits:
            room = expanded_rows(ranks, most, topk, num_experts // ranks, align) if expand else ranks * most
        self._rooms[sizes] = buffer, room, dispatch.Options("expert", align) if expand else _FLAT
        return self._rooms[sizes]

    def _send_weights(self, handle: EPHandle, topk_weights: torch.Tensor) -> torch.Tensor:
        """New routing weights for an old dispatch, beside 16-byte rows; they land in the order of its rows."""
        native = handle.native
        rows = torch.empty((native.num_tokens, _WEIGHTS_HIDDEN), dtype=torch.bfloat16, device=native.plan.device)
        small: Buffer = self._pool.elastic(
            rows.device,
            _WEIGHTS_HIDDEN,
            handle.num_experts,
            native.rounds.topk,
            handle.num_max_tokens_per_rank,
            torch.bfloat16,
            handle.do_expand,
        )
        self._pool.calls.begin(small.rounds)
        routed = small.dispatch(
            rows,
            handle.topk_idx,
            topk_weights,
            layout=native.layout,
            expert_alignment=handle.expert_alignment if handle.do_expand else 1,
            max_rows=native.args.max_rows,
            sync=False,
        )
        weights: torch.Tensor | None = routed.row_weights if handle.do_expand else routed.topk_weights
        assert weights is not None
        return weights

    def _check_repeat(
        self,
        handle: EPHandle,
        sizes: tuple[int | None, ...],
        topk_idx: torch.Tensor | None,
        do_cpu_sync: bool | None,
        do_expand: bool,
    ) -> None:
        self._pool.native_of(handle, EPHandle, _HANDLE)
        if topk_idx is not None:
            raise BadInput("handle", "topk_idx beside it", "rows only: it repeats a routing")
        if do_cpu_sync:
            raise BadInput("do_cpu_sync", True, "None or False beside handle")
        for name, size in zip(("num_experts", "num_max_tokens_per_rank", "expert_alignment"), sizes, strict=True):
            if size is not None and size != getattr(handle, name):
                raise BadInput(name, size, f"{getattr(handle, name)}, which the handle has")
        if do_expand != handle.do_expand:
            raise Unsupported(f"do_expand={do_expand} with a handle of do_expand={handle.do_expand}")


class ElasticBuffer(ElasticRounds):
    """Dispatch and combine of deep_ep 2; see its documentation, and the package for differences.

    Memory is taken by the first call with new sizes, on all ranks alike.  `num_bytes`, if given, is the least that a
    window gets.  `num_gpu_timeout_secs` is how long any wait may take.  `allow_multiple_reduction` lets the sum of a
    rank's rows be rounded before it travels (do_expand).  Rows are always in the same order: `deterministic` changes
    nothing, nor do the settings for RDMA.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        refuse("deep_ep", num_cpu_bytes=num_cpu_bytes)
        super().__init__(
            group,
            num_bytes,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            deterministic,
            allow_hybrid_mode,
            allow_multiple_reduction,
            prefer_overlap_with_compute,
            num_allocated_qps,
            num_gpu_timeout_secs,
            explicitly_destroy,
        )

    @counted_by_pool
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Return when the work before it is done on every rank: the host waits, with or without `with_cpu_sync`."""
        self._barrier()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return few or many SMs, as `prefer_overlap_with_compute` asks; num_sms=0 lets moecomm's own table decide."""
        return self._theoretical_num_sms()

    @counted_by_pool
    def dispatch(
        self,
        x: Any,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """recv_x or (recv_x, recv_sf), recv_topk_idx, recv_topk_weights, handle, event.

        `do_zero_padding`, `do_handle_copy` and the statistics take a small kernel or two of their own; `topk_weights`
        beside `handle` a small round.
        """
        wait_for(previous_event)
        wait_for(previous_event_before_epilogue)
        return self._dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            async_with_compute_stream,
            handle,
            do_handle_copy,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )

    @counted_by_pool
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """combined_x, combined_topk_weights (None without `topk_weights`), event.  Rows are added without weights.

        Two biases are added up first, in float32, by a few kernels of their own.
        """
        wait_for(previous_event)
        wait_for(previous_event_before_epilogue)
        return self._combine(x, handle, topk_weights, bias, num_sms, async_with_compute_stream)


# Names of deep_ep's experiments: memory of others' entries, pipelines, and collectives.
EXPERIMENTS = (
    *("get_engram_storage_size_hint", "engram_write", "engram_fetch"),
    *("get_pp_buffer_size_hint", "pp_set_config", "pp_send", "pp_recv"),
    *("get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint", "agrs_set_config", "create_agrs_session"),
    *("destroy_agrs_session", "agrs_new_session", "agrs_get_inplace_tensor", "all_gather"),
)
for _name in EXPERIMENTS:
    setattr(ElasticBuffer, _name, staticmethod(not_here(_name)))


def _zero_padding(routed: Routed, x: torch.Tensor, scales: torch.Tensor | None) -> None:
    src = kept(routed.handle, "src")
    padding.zero(x, src=src)
    if scales is not None and scales.is_contiguous():
        padding.zero(scales, src=src)
    elif scales is not None:
        scales.masked_fill_(src[:, :1] < 0, 0)


def _overridden(options: dispatch.Options, scales: ScaleLayout, limit: int | None) -> dispatch.Options:
    return options if limit is None and scales == "row" else options._replace(scale_layout=scales, num_sms=limit)


@lru_cache(maxsize=64)
def _combine_options(wire: Wire, limit: int | None) -> combining.Options:
    return combining.Options(weighted=False, wire=wire, num_sms=limit)
