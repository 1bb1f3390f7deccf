"""deep_ep's low-latency dispatch and combine, over moecomm's batched layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from moecomm import combine as combining
from moecomm.base.arrays import as_tensor, check_tensor, has_memory
from moecomm.base.protocol import PEER_COUNTERS, SCALAR_COUNTERS
from moecomm.base.validation import check_flag, check_flags, check_integer, check_same_device
from moecomm.buffer import Buffer
from moecomm.combine.arguments import takes_weights
from moecomm.compat.deep_ep.arguments import check_dimensions, check_experts, check_stats, refuse
from moecomm.compat.deep_ep.calls import AFTER_THE_HOOK
from moecomm.compat.deep_ep.event import EventHandle, EventOverlap, finished
from moecomm.compat.deep_ep.handles import LazyTuple
from moecomm.compat.deep_ep.pool import OverPool, Pool, counted_by_pool
from moecomm.dispatch import Options, Request, dispatch, dispatch_begin
from moecomm.dispatch.routed import Handle, Routed, has_arrived
from moecomm.dispatch.tables import kept, table
from moecomm.errors import BadInput, RoundFailed, Unsupported
from moecomm.membership.masking import is_masked, require_repeats
from moecomm.observe.stats.counters import WAITS
from moecomm.rounds.rounds import Rounds

_FIRST_WAIT = PEER_COUNTERS - len(WAITS)


class WaitCost:
    """Wait times of rounds for each peer, added to a caller's tensor on the current stream; a graph can capture it.

    Args:
        name: of the argument.
        total: int64 `[R]`.
        ranks: of the group.
        device: of the rounds.
    """

    def __init__(self, name: str, total: torch.Tensor, ranks: int, device: torch.device) -> None:
        check_dimensions(name, total, "ranks")
        check_tensor(name, total, device=device, dtypes=(torch.int64,), shape=(ranks,))
        if not total.is_contiguous():
            raise BadInput(name, "a tensor with gaps", "a contiguous one")
        self._total = total

    def before(self, rounds: Rounds, phase: Literal["dispatch", "combine"]) -> None:
        """Note the waits before a round, or a half of one."""
        self._begun = _waited(rounds, phase)

    def after(self, rounds: Rounds, phase: Literal["dispatch", "combine"]) -> None:
        """Add the waits of the round."""
        self._total.add_(_waited(rounds, phase) - self._begun)


def _waited(rounds: Rounds, phase: Literal["dispatch", "combine"]) -> torch.Tensor:
    """Return a new tensor, int64 `[R]`: the time that this rank has waited for headers, and for rows of this phase."""
    ranks = rounds.num_ranks
    peers = rounds.session.counters()[SCALAR_COUNTERS : SCALAR_COUNTERS + PEER_COUNTERS * ranks].view(-1, ranks)
    return peers[_FIRST_WAIT] + peers[_FIRST_WAIT + WAITS.index(phase)]


class Arrival:
    """Receive of the rows of a dispatch, once: when called, or ahead of the next dispatch if that begins earlier.

    Called after that, which may be on another stream, it makes the current stream wait for the rows.

    Args:
        buffer, routed: of the dispatch.
        cost: adds up the waits.
        then: called on the stream that has received the rows.
    """

    def __init__(
        self, buffer: Buffer, routed: Routed, cost: WaitCost | None = None, then: Callable[[], object] | None = None
    ) -> None:
        self._buffer, self._cost, self._then = buffer, cost, then
        self._routed: Routed | None = routed
        self._early: EventHandle | None = None  # after the rows, on the stream that received them for the hook

    def __call__(self) -> None:
        if not self._receive() and self._early is not None:
            self._early.current_stream_wait()

    def receive_early(self) -> None:
        """Receive the rows on the current stream, unless the hook has been called, which may be on another one."""
        if self._receive():
            self._early = EventHandle()

    def _receive(self) -> bool:
        """Return whether this call receives the rows."""
        routed, self._routed = self._routed, None  # so that the window has its memory back when the caller's are gone
        if routed is None:
            return False
        then, self._then = self._then, None
        if self._cost is not None:
            self._cost.before(self._buffer.rounds, "dispatch")
        self._buffer.dispatch_end(routed, sync=False)
        if self._cost is not None:
            self._cost.after(self._buffer.rounds, "dispatch")
        if then is not None:
            then()
        return True


# Requests of a dispatch: rows as they are, in FP8, with scales that are powers of two or their exponents, in FP4.
_PLAIN = Request(Options("batched"))
_FP8 = Request(Options("batched", quantize="fp8", scale_layout="column"))
_ROUNDED = Request(Options("batched", quantize="fp8", scale_format="ue8m0"))
_UE8M0 = Request(Options("batched", quantize="fp8", scale_format="ue8m0", scale_layout="column"))
_NVFP4 = Request(Options("batched", quantize="nvfp4", scale_layout="swizzled"))
_REQUESTS = {  # by use_fp8, round_scale, use_ue8m0, use_nvfp4
    **{(True, rounded, False, False): _ROUNDED if rounded else _FP8 for rounded in (False, True)},
    (True, True, True, False): _UE8M0,
    **{(False, rounded, False, fp4): _NVFP4 if fp4 else _PLAIN for rounded in (False, True) for fp4 in (False, True)},
}
# deep_ep adds up all rows of a token in float32 at its source rank.
_WEIGHTED = combining.Request(combining.Options(wire="exact"))
_WEIGHTS_HIDDEN = 8  # columns of the rows that routing weights travel beside: 16 bytes, the least there is
LOW_LATENCY_NAMES = {"y": "x", "weight_grads": "topk_weights"}  # see Calls
_HANDLE = "the handle, as it is, that low_latency_dispatch returned"


class _Kind(NamedTuple):
    """The Buffer and the request of low-latency dispatches of the same sizes and options: see Pool.kinds."""

    buffer: Buffer
    request: Request
    weights_follow: bool  # a combine can't bring routing weights: they take a round of their own before it


class LowLatencyHandle(LazyTuple):
    """deep_ep's handle of a low-latency dispatch: `packed_recv_src_info` i32[E/R, R * Tmax], token of its source rank
    for each row; `packed_recv_layout_range` i64[E/R, R], begin << 32 | count of the rows from each rank; Tmax; H; E.

    The two tensors are computed when they are first read, after the dispatch has arrived.  A combine that has lost a
    rank leaves them as they were: rows of that rank are not used.
    """

    makers = (
        lambda self: kept(self.arrived(), "src")[..., 1].contiguous(),
        lambda self: layout_range(self.arrived()),
        lambda self: self.native.rounds.max_tokens,
        lambda self: self.native.rounds.hidden,
        lambda self: self.native.rounds.experts.count,
    )

    native: Handle
    topk_idx: torch.Tensor  # of the dispatch, by which a combine knows it again
    ids: torch.Tensor  # for the round that sends weights: a copy, where the dispatch was given none of them
    ids_version: int | None = None  # of the caller's tensor; None: a copy, or one without a version
    topk_weights: torch.Tensor | None  # those that the dispatch carried, until others have taken their place
    weights_follow: bool  # see _Kind
    first: Handle | None = None  # of the dispatch, whose rows the caller has, where a later one has lost a rank
    combine_rows: torch.Tensor | None = None  # in the window, for the next combine without a copy

    def arrived(self) -> Handle:
        """Return moecomm's handle of the rows that the caller has.

        Raises:
            BadInput: the hook of the dispatch has not been called.
        """
        native = self.first or self.native
        if not has_arrived(native.args):
            raise BadInput("handle", "one of a dispatch that has only begun", AFTER_THE_HOOK)
        return native


class LowLatency(OverPool):
    """The low-latency half of Buffer.

    With `enable_shrink`, a rank alone changes its masks: see PendingMasks.  Else all ranks that stay make such a call.
    """

    group_size: int

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank, or take it in again: that rank then makes this call, too.

        Raises:
            BadInput: this rank is to be masked.
            Unsupported: masking before the first low-latency call, whose sizes are not known; see Buffer.mask.
        """
        check_integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        check_flag("mask", mask)
        opened = self._pool.low_latency()
        if mask and not opened:
            raise Unsupported("low_latency_update_mask_buffer(mask=True) before the first low-latency call")
        if mask and rank_to_mask == self._pool.ranks.rank:
            raise BadInput("rank_to_mask", f"this rank, {rank_to_mask}", "another one")
        for masks in self._pool.pending.values():
            masks.want(rank_to_mask, mask)
        for buffer in () if self._pool.masks else opened:
            if mask != is_masked(buffer.rounds, rank_to_mask):
                change = buffer.mask if mask else buffer.unmask
                change([rank_to_mask])

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each masked rank, and 0 for others."""
        masked = self._pool.masked()
        write_mask(mask_status, [rank in masked for rank in range(self.group_size)])

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all masked ranks in again, of which each makes this call."""
        for masks in self._pool.pending.values():
            masks.want_all()
        for buffer in () if self._pool.masks else self._pool.low_latency():
            # A rank's own list lacks the rank itself.
            own = {buffer.rank} if is_masked(buffer.rounds, buffer.rank) else set()
            if joining := own.union(buffer.masked):
                buffer.unmask(joining)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: normal calls leave nothing to clean.

        With `enable_shrink` it is collective, as in deep_ep, and masks ranks that are lost.
        """
        self._pool.require_open()
        check_experts(num_experts, self.group_size)
        for buffer in self._pool.low_latency() if self._pool.masks else ():
            if (buffer.max_tokens, buffer.hidden) == (num_max_dispatch_tokens_per_rank, hidden):
                none = torch.empty((0, hidden), dtype=buffer.dtype, device=buffer.device)
                ids = torch.empty((0, buffer.topk), dtype=torch.int64, device=buffer.device)
                self._pool.receive(buffer)
                self._pool.agree(buffer)
                buffer.dispatch(none, ids, layout="batched", max_rows=1, sync=True)

    @counted_by_pool
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: torch.Tensor | None = None,
        use_nvfp4: bool = False,
        use_ue8m0_for_sf: bool = False,
        x_global_scale: torch.Tensor | None = None,
        num_sms: int | None = None,
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """recv_x or (recv_x, scales), recv_count, handle, event, hook (None without `return_recv_hook`).

        `topk_weights`, which deep_ep does not have, spares low_latency_combine a small round when it is given the same
        tensor, unchanged.  `round_scale` without `use_ue8m0`, and `cumulative_local_expert_recv_stats`, take a kernel
        of their own each, and `dispatch_wait_recv_cost_stats`, in nanoseconds, three.  A hook that has not been called
        when the next dispatch of these sizes begins runs then; called later, it makes the current stream wait for the
        rows.

        `use_nvfp4`, of deep_ep's branch hybrid-ep: rows are uint8 `[R * Tmax, H/2, E/R]`, scales float8_e4m3fn `[32, 4,
        ceil(R * Tmax / 128), 4, ceil(H / 64), E/R]`, both of them permuted views: in memory the experts come first, and
        scales lie in the blocks of formats.swizzle().  The first element of `x_global_scale` is the global scale of
        moecomm.formats; without `use_nvfp4` it is not read.
        """
        if num_sms is not None or use_ue8m0_for_sf is not False:
            refuse("deep_ep", use_ue8m0_for_sf=use_ue8m0_for_sf, num_sms=num_sms)
        asked = (use_fp8, round_scale, use_ue8m0, use_nvfp4)
        if {type(async_finish), type(return_recv_hook), *map(type, asked)} != {bool}:
            check_flags(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0, use_nvfp4=use_nvfp4)
            check_flags(async_finish=async_finish, return_recv_hook=return_recv_hook)
        if use_nvfp4 and x_global_scale is None:
            raise BadInput("x_global_scale", "None", "float32, on the device of x, beside use_nvfp4")
        if async_finish and return_recv_hook:
            raise _two_waits()
        most = num_max_dispatch_tokens_per_rank
        if {type(most), type(num_experts)} != {int}:  # 2.0 and True are equal to numbers that have been checked
            check_experts(num_experts, self.group_size)
            check_integer("num_max_dispatch_tokens_per_rank", most, 1)
        try:
            key = (x.shape[1:], x.dtype, x.device, x.layout, topk_idx.shape[1:], topk_idx.layout, most, num_experts)
        except AttributeError:  # no tensors
            key = None
        kind: _Kind = self._pool.kinds.get((key, asked)) or self._new_kind(x, topk_idx, most, num_experts, key, asked)
        stats, cost = cumulative_local_expert_recv_stats, None
        if stats is not None:
            check_stats(stats, num_experts // self.group_size, x.device)
        if dispatch_wait_recv_cost_stats is not None:
            name = "dispatch_wait_recv_cost_stats"
            cost = WaitCost(name, dispatch_wait_recv_cost_stats, self.group_size, x.device)
        # With masks, CPU ranks receive at once: a call that has lost a rank is then over, and can be made again.
        repeats = self._pool.masks and kind.buffer.rounds.on_cpu
        begins = return_recv_hook and not repeats
        routed = self._sent(kind, x, topk_idx, topk_weights, x_global_scale if use_nvfp4 else None, cost, begins)
        handle = LowLatencyHandle(LowLatencyHandle.makers)  # quicker than through a __new__ of its own
        handle.native, handle.topk_idx, handle.topk_weights = routed.handle, topk_idx, topk_weights
        handle.weights_follow = kind.weights_follow
        keeps_ids = repeats or (topk_weights is None and kind.weights_follow)
        handle.ids = topk_idx.clone() if keeps_ids else topk_idx
        if kind.weights_follow and not keeps_ids and not topk_idx.is_inference():
            handle.ids_version = topk_idx._version
        account = write_scales = None
        if kind.request is _PLAIN:
            recv_x, counts = routed.plan.batched_tensors(routed)
        elif kind.request is _FP8 or kind.request is _UE8M0:
            values, counts, scales = routed.plan.batched_tensors(routed, scaled=True)
            recv_x = values, scales
        else:
            recv_x, counts, write_scales = _arriving(routed, kind.request)
        if write_scales is not None or stats is not None:
            account = partial(_account, routed, write_scales, counts, stats)
        event = finished(True) if async_finish else object.__new__(EventOverlap)  # quicker than through its __init__
        if begins:
            hook = Arrival(kind.buffer, routed, cost, account)
            self._pool.receiving[id(kind.buffer)] = hook.receive_early
            return recv_x, counts, handle, event, hook
        if account is not None:
            account()
        return recv_x, counts, handle, event, _nothing if return_recv_hook else None

    def _new_kind(self, x: Any, topk_idx: Any, most: int, num_experts: int, key: Any, asked: tuple[bool, ...]) -> _Kind:
        """Check sizes, and open the Buffer for them if there is none."""
        if asked not in _REQUESTS:
            *_, use_ue8m0, use_nvfp4 = asked
            if use_nvfp4:
                raise BadInput("use_nvfp4", True, "use_fp8=False and use_ue8m0=False beside it")
            raise BadInput("use_ue8m0", use_ue8m0, "use_fp8 and round_scale beside it")
        check_dimensions("x", x, "tokens", "hidden")
        check_dimensions("topk_idx", topk_idx, "tokens", "topk")
        buffer = self._pool.batched(x.device, x.shape[1], num_experts, topk_idx.shape[1], most, x.dtype)
        kind = self._pool.kinds[key, asked] = _Kind(buffer, _REQUESTS[asked], not takes_weights(buffer.rounds))
        return kind

    def _sent(
        self, kind: _Kind, x: Any, topk_idx: Any, topk_weights: Any, scale: Any, cost: WaitCost | None, begins: bool
    ) -> Routed:
        """Dispatch, and again where a call that all ranks have made has lost a rank.  `begins`: rows arrive later."""
        pool, rounds = self._pool, kind.buffer.rounds
        if isinstance(scale, torch.Tensor):
            scale = scale.reshape(-1)[:1]
        while True:
            pool.calls.begin(rounds)
            if pool.receiving:
                pool.receive(kind.buffer)
            if pool.pending:
                pool.agree(kind.buffer)
            if cost is not None:
                cost.before(rounds, "dispatch")
            experts = rounds.experts
            ids = topk_idx if experts.ids is None and experts.live is None else experts.own_ids(topk_idx)  # -1: masked
            try:
                if begins:
                    routed = dispatch_begin(rounds, kind.request, x, ids, topk_weights, global_scale=scale, early=True)
                else:
                    routed = dispatch(rounds, kind.request, x, ids, topk_weights, global_scale=scale, sync=False)
            except RoundFailed as error:
                require_repeats(error)
                continue
            if cost is not None:
                cost.after(rounds, "dispatch")
            return routed

    @counted_by_pool
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        overlap: bool = False,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int | None = None,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int | None = None,
        threshold: int | None = None,
        num_sms: int | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """combined_x, event, hook (None without `return_recv_hook`; it has nothing left to do).

        Entries of `topk_idx` that are -1 are left out; if it is another tensor than that of the dispatch, two kernels
        set their weights to 0.

        The routing weights have to reach the ranks that add rows up.  Unless the dispatch was given the same
        `topk_weights`, the combine brings them there or, where it can't (more than 4096 entries of the most tokens of a
        rank), a small round of their own ahead of it.
        """
        if {type(zero_copy), type(async_finish), type(return_recv_hook)} != {bool}:
            check_flags(zero_copy=zero_copy, async_finish=async_finish, return_recv_hook=return_recv_hook)
        newer = (src_signals, src_signal_expect_value, packed_recv_count, comp_signal, block_m, threshold, num_sms)
        if {*map(id, newer)} != {id(None)} or overlap is not False or use_logfmt is not False:
            refuse(
                "deep_ep",
                use_logfmt=use_logfmt,
                overlap=overlap,
                src_signals=src_signals,
                src_signal_expect_value=src_signal_expect_value,
                packed_recv_count=packed_recv_count,
                comp_signal=comp_signal,
                block_m=block_m,
                threshold=threshold,
                num_sms=num_sms,
            )
        if async_finish and return_recv_hook:
            raise _two_waits()
        pool = self._pool
        native = pool.native_of(handle, LowLatencyHandle, _HANDLE)
        pool.calls.begin(native.rounds, combines=True)
        if topk_weights is None:
            raise BadInput("topk_weights", "None", "the routing weights, float32 [tokens, topk]")
        if zero_copy:
            if handle.combine_rows is None:
                raise BadInput("zero_copy", True, "rows written to get_next_low_latency_combine_buffer(handle)")
            x = handle.combine_rows
        own = cost = None
        if combine_wait_recv_cost_stats is not None:
            name = "combine_wait_recv_cost_stats"
            cost = WaitCost(name, combine_wait_recv_cost_stats, self.group_size, native.rounds.device)
        if topk_idx is not handle.topk_idx:
            topk_weights = _without_the_left_out(native, topk_idx, topk_weights)
        if topk_weights is not handle.topk_weights:
            if handle.weights_follow:
                if handle.ids_version is not None and handle.ids_version != handle.ids._version:
                    raise BadInput("topk_idx", "a tensor that has changed since its dispatch", "one that stays")
                _send_weights(pool, native, handle.ids, topk_weights)
                handle.topk_weights = None
            else:
                own = topk_weights
        combined: torch.Tensor | None = None
        while combined is None:
            if cost is not None:
                cost.before(native.rounds, "combine")
            rows = x if handle.first is None else _rows_left(handle, x)
            try:
                combined = combining.combine(native.rounds, _WEIGHTED, rows, native, out=out, topk_weights=own)
            except RoundFailed as error:
                require_repeats(error)
                _route_again(handle, topk_weights)
                native, own = handle.native, None  # whose rows have these weights
                pool.calls.begin(native.rounds, combines=True)
        if cost is not None:
            cost.after(native.rounds, "combine")
        event = finished(True) if async_finish else object.__new__(EventOverlap)  # quicker than through its __init__
        return combined, event, _nothing if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: Any) -> torch.Tensor:
        """`[E/R, R * Tmax, H]` in the window, for low_latency_combine(zero_copy=True); the same one for one handle."""
        native = self._pool.native_of(handle, LowLatencyHandle, _HANDLE)
        handle.arrived()
        if handle.combine_rows is None:
            handle.combine_rows = combining.empty(native.rounds, native, native.rounds.dtype)
        rows: torch.Tensor = handle.combine_rows
        return rows


def write_mask(mask_status: torch.Tensor, masked: list[bool]) -> None:
    """Write 1 for each rank that is masked, and 0 for others."""
    check_dimensions("mask_status", mask_status, "ranks")
    check_same_device(mask_status=mask_status)
    if not has_memory(mask_status):
        raise BadInput("mask_status", "a tensor without memory", "one that has some")
    if mask_status.shape != (len(masked),) or mask_status.dtype is not torch.int32:
        raise BadInput("mask_status", f"{mask_status.dtype} {tuple(mask_status.shape)}", "int32 [ranks]")
    mask_status.copy_(torch.tensor(masked, dtype=torch.int32))


def layout_range(handle: Handle) -> torch.Tensor:
    """int64 `[E/R, R]`: begin << 32 | count of the rows that each expert has from each rank."""
    src = kept(handle, "src")[..., 0]
    ids = torch.arange(handle.rounds.num_ranks, dtype=torch.int32, device=src.device)
    valid = torch.arange(src.shape[1], device=src.device) < kept(handle, "tokens_per_expert").unsqueeze(1)
    count = ((src.unsqueeze(2) == ids) & valid.unsqueeze(2)).sum(dim=1)
    return (count.cumsum(dim=1) - count) << 32 | count


def _account(
    routed: Routed, write: Callable[[torch.Tensor], object] | None, counts: torch.Tensor, stats: torch.Tensor | None
) -> None:
    """Finish a receive once rows are here: write scales in the form asked for, and add to the statistics."""
    if write is not None:
        scales = routed.scales
        assert scales is not None
        write(scales)
    if stats is not None:
        stats.add_(counts)


def _arriving(routed: Routed, request: Request) -> tuple[Any, torch.Tensor, Callable[[torch.Tensor], object]]:
    """Return recv_x, recv_count, and what writes scales, which arrive in another form, once they are here."""
    x, counts = routed.plan.batched_tensors(routed)
    experts, rows, hidden = x.shape[0], x.shape[1], routed.handle.rounds.hidden
    if request is _NVFP4:
        assert routed.unpack is not None, "of another format than those that kernels know"
        blocks = experts, -(-rows // 128), -(-hidden // 64), 32, 4, 4
        scales = torch.empty(blocks, dtype=torch.float8_e4m3fn, device=x.device)
        recv_x = routed.unpack("x", routed).permute(1, 2, 0), scales.permute(3, 4, 1, 5, 2, 0)
        return recv_x, counts, lambda arrived: scales.view(arrived.shape).copy_(arrived)
    columns = torch.empty((experts, -(-hidden // 128), rows), dtype=torch.float32, device=x.device)
    scales = columns.transpose(1, 2)
    bits = scales.view(torch.int32)  # of powers of two, whose exponents arrive
    return (x, scales), counts, lambda arrived: bits.copy_(arrived.view(torch.uint8)).bitwise_left_shift_(23)


def _send_weights(pool: Pool, native: Handle, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """A round of 16-byte rows: its weights land in the rows' order, and become those of the handle."""
    rounds = native.rounds
    sizes = (_WEIGHTS_HIDDEN, rounds.experts.count, rounds.topk, rounds.max_tokens, torch.bfloat16)
    small = pool.batched(rounds.device, *sizes, rounds.placement)
    rows = torch.empty((native.num_tokens, _WEIGHTS_HIDDEN), dtype=torch.bfloat16, device=rounds.device)
    pool.agree(small)
    pool.calls.begin(small.rounds)
    weights = small.dispatch(rows, topk_idx, topk_weights, layout="batched", sync=False).row_weights
    assert weights is not None
    table(native, native.args.route.row_weights, native.y_shape[:-1], torch.float32).copy_(weights)


def _route_again(handle: LowLatencyHandle, topk_weights: torch.Tensor) -> None:
    """Dispatch a handle's tokens again, to the ranks that are left.  The rows that arrive are not used."""
    rounds = handle.native.rounds
    rows = torch.empty((handle.native.num_tokens, rounds.hidden), dtype=rounds.dtype, device=rounds.device)
    try:
        routed = dispatch(rounds, _PLAIN, rows, rounds.experts.own_ids(handle.ids), topk_weights, sync=False)
    except RoundFailed as error:
        require_repeats(error)
        return _route_again(handle, topk_weights)
    handle.first = handle.first or handle.native
    handle.native, handle.topk_weights = routed.handle, topk_weights
    return None


def _rows_left(handle: LowLatencyHandle, y: torch.Tensor) -> torch.Tensor:
    """Return the rows `y` of the first dispatch of a handle in the order of its last one, which has lost ranks."""
    assert handle.first is not None, "the caller has looked"
    if not isinstance(y, torch.Tensor) or y.shape != handle.first.y_shape:
        return y  # which combine refuses
    ranks, counts = kept(handle.first, "src")[..., 0], kept(handle.first, "tokens_per_expert").tolist()
    lost = torch.tensor(sorted(handle.native.rounds.masked), dtype=ranks.dtype, device=ranks.device)
    left = torch.empty_like(y)
    for expert, count in enumerate(counts):
        rows = y[expert, :count][~torch.isin(ranks[expert, :count], lost)]
        left[expert, : len(rows)] = rows
    return left


def _without_the_left_out(native: Handle, topk_idx: Any, topk_weights: Any) -> torch.Tensor:
    """Return the routing weights, with 0 where the ids are -1."""
    device, shape = native.rounds.device, (native.num_tokens, native.rounds.topk)
    topk_idx, topk_weights = as_tensor("topk_idx", topk_idx)[0], as_tensor("topk_weights", topk_weights)[0]
    check_tensor("topk_idx", topk_idx, device=device, dtypes=(torch.int64, torch.int32), shape=shape)
    check_tensor("topk_weights", topk_weights, device=device, dtypes=(torch.float32,), shape=shape)
    weights: torch.Tensor = topk_weights.masked_fill(topk_idx < 0, 0.0)
    return weights


def _two_waits() -> BadInput:
    return BadInput("async_finish", True, "False beside return_recv_hook: the hook is the wait")


def _nothing() -> None:
    """The hook of a combine."""
