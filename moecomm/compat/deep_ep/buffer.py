"""deep_ep.Buffer: the interface of deep_ep 1.x and of the legacy buffer of 2.x, over moecomm."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from moecomm import combine as combining
from moecomm.base.arrays import has_memory
from moecomm.base.protocol import MAX_RANKS
from moecomm.base.validation import check_dense, check_flag, check_integer, check_same_device, check_sizes
from moecomm.compat.deep_ep.arguments import check_dimensions, check_experts, described, not_here, refuse
from moecomm.compat.deep_ep.event import (
    Config,
    EventHandle,
    EventOverlap,
    check_even_sms,
    finished,
    uses_cuda,
    wait_for,
)
from moecomm.compat.deep_ep.handles import NormalHandle, counts_of
from moecomm.compat.deep_ep.low_latency import LOW_LATENCY_NAMES, LowLatency
from moecomm.compat.deep_ep.pool import Pool, counted_by_pool, grown
from moecomm.dispatch import Options, Request
from moecomm.dispatch import dispatch as run_dispatch
from moecomm.dispatch.routed import Routed
from moecomm.errors import BadInput
from moecomm.ranks.settings import Settings
from moecomm.rounds.call_count import CountedCall

_PACKED = 8  # columns in an element of NVFP4 rows


class Payload(NamedTuple):
    """The tensors of a dispatch, as moecomm takes them."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    extras: tuple[torch.Tensor, ...] = ()
    combined: tuple[int, torch.dtype] | None = None  # columns and dtype of rows that return; None: those of `rows`
    dtype: torch.dtype | None = None  # of the caller's rows, where they travel in another

    def arrived(self, rows: Any, scales: Any, routed: Routed) -> Any:
        """Return rows, or a tuple of all that was given."""
        if scales is None:
            return rows
        return (rows if self.dtype is None else rows.view(self.dtype), scales, *routed.extras)


def unpack(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows, and scales if there are any, as moecomm takes them."""
    if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.ndim == 2:
        return x, None
    rows, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
    if not isinstance(rows, torch.Tensor) or not (scales is None or isinstance(scales, torch.Tensor)):
        raise BadInput("x", type(rows).__name__, "a tensor, or a tuple of two: rows and scales")
    check_dense("x", rows)
    if scales is not None:
        check_dense("x", scales)
    if rows.ndim != 2:
        raise BadInput("x", f"shape {tuple(rows.shape)}", "(tokens, hidden)")
    if scales is not None and not scales.is_contiguous() and scales.stride(-1) != 1:
        scales = scales.contiguous()  # by column, as some quantizers make them
    return rows, scales


def unpack_all(x: Any) -> Payload:
    """Return what deep_ep's dispatch takes: rows; rows of one byte an element and scales; NVFP4 rows, scales, factors.

    The third is of deep_ep's branch hybrid-ep: int32 `[T, H/8]`, int32 `[T, n]` and float32 `[T, m]`.
    """
    if not isinstance(x, tuple) or len(x) != 3:
        rows, scales = unpack(x)
        if scales is None or rows.dtype.itemsize != 1 or rows.dtype is torch.float8_e4m3fn:
            return Payload(rows, scales)
        return Payload(rows.view(torch.float8_e4m3fn), scales, dtype=rows.dtype)  # bytes are bytes
    rows, scales = unpack(x[:2])
    factors, _ = unpack(x[2])
    if not rows.dtype is scales.dtype is torch.int32 or factors.dtype is not torch.float32:  # type: ignore[union-attr]
        got = ", ".join(described(tensor) for tensor in x)
        raise BadInput("x", got, "int32 [tokens, hidden / 8], int32 [tokens, hidden / 64], float32 [tokens, n]")
    return Payload(rows, scales, (factors,), (rows.shape[1] * _PACKED, torch.bfloat16))


def one_bias(bias: Any) -> Any:
    """None, a tensor, or the sum of two in float32: it is rounded with what it is added to."""
    if bias is None or isinstance(bias, torch.Tensor):
        return bias
    if not isinstance(bias, tuple) or len(bias) != 2:
        raise BadInput("bias", type(bias).__name__, "None, a tensor or a tuple of two")
    first, second = bias
    if first is None or second is None:
        return second if first is None else first
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        raise BadInput("bias", f"{type(first).__name__} and {type(second).__name__}", "tensors or None")
    if first.shape != second.shape or first.dtype is not second.dtype or first.device != second.device:
        raise BadInput("bias", f"{described(first)} and {described(second)}", "two alike")
    check_same_device(bias=first, **{"the second bias": second})
    return first.float() + second.float()


def route(
    pool: Pool,
    tensors: Payload,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    num_experts: int,
    worst: int,
    num_sms: int | None,
) -> Routed:
    """A flat dispatch; where a rank has more tokens than the Buffer takes, again with a larger one."""
    rows = tensors.rows
    buffer = pool.flat(rows, ids, num_experts, worst, combined=tensors.combined)
    pool.calls.begin(buffer.rounds)
    request = limited(num_sms)
    more: dict[str, Any] = {"scales": tensors.scales, "extras": tensors.extras}
    if worst:
        return run_dispatch(buffer.rounds, request, rows, ids, weights, max_rows=worst, sync=False, **more)
    return grown(
        buffer,
        rows,
        ids,
        lambda buffer: run_dispatch(buffer.rounds, request, rows, ids, weights, sync=True, **more),
        lambda: pool.flat(rows, ids, num_experts, worst, grow=True, combined=tensors.combined),
        **more,
    )


@lru_cache(maxsize=64)
def limited(num_sms: int | None) -> Request:
    """Return the request of a flat dispatch."""
    return Request(Options("flat", num_sms=num_sms))


def an_expert_of_each_rank(is_token_in_rank: torch.Tensor | None, num_experts: int, ranks: int) -> torch.Tensor:
    """Ids that send every token where `is_token_in_rank` says."""
    if is_token_in_rank is None:
        raise BadInput("topk_idx", "None", "expert ids, is_token_in_rank or handle=")
    check_dimensions("is_token_in_rank", is_token_in_rank, "tokens", "ranks")
    if is_token_in_rank.dtype is not torch.bool or is_token_in_rank.shape[1:] != (ranks,):
        raise BadInput("is_token_in_rank", f"{is_token_in_rank.dtype} {tuple(is_token_in_rank.shape)}", "bool [T, R]")
    first = torch.arange(ranks, device=is_token_in_rank.device) * (num_experts // ranks)
    return torch.where(is_token_in_rank, first, -1)


def exchange_counts(pool: Pool, num_tokens_per_expert: torch.Tensor) -> list[int]:
    """Everybody's tokens for our experts, as a small round of its own: rank r gets a row of counts from each."""
    ranks = pool.ranks.ranks
    local = len(num_tokens_per_expert) // ranks
    counts = torch.zeros((ranks, -(-local // 4) * 4), dtype=torch.float32, device=num_tokens_per_expert.device)
    counts[:, :local] = num_tokens_per_expert.view(ranks, local)  # float32 is exact up to 2^24
    ids = torch.arange(ranks, device=counts.device).unsqueeze(1)
    buffer = pool.flat(counts, ids, ranks, 0)
    pool.calls.begin(buffer.rounds)
    rows = buffer.dispatch(counts, ids, layout="flat", sync=True).x
    return [int(count) for count in rows[:, :local].sum(dim=0).tolist()]


def aligned(counts: list[int], alignment: int) -> list[int]:
    """Return the counts, rounded up."""
    return counts if alignment == 1 else [-(-count // alignment) * alignment for count in counts]


_SUMS = combining.Request(sum_grads=True, bias_first=True)
_HANDLE = "the handle, as it is, that dispatch returned"
_NAMES = {**LOW_LATENCY_NAMES, "max_rows": "num_worst_tokens", "window_bytes": "num_nvl_bytes"}
_TOPK_HINT = 32  # of size hints, whose callers do not say it: the most there can be


class Buffer(LowLatency):
    """One object for normal and low-latency calls; see deep_ep's documentation, and the package for differences.

    Memory is not taken here but by the first call with new sizes (hidden, experts, K, tokens), on all ranks alike.
    `num_nvl_bytes` is the least that a window for normal calls gets; more keeps more outputs alive without a copy.
    `low_latency_mode`, `num_qps_per_rank`, `allow_nvlink_for_*`, `allow_mnnvl` and `use_fabric` are accepted and change
    nothing: both modes are always there, and ranks are reached over NVLink.  With `enable_shrink` a low-latency call
    that finds a rank lost masks it and goes on; where ranks lost it in different calls, and on GPUs, it raises PeerLost
    or Timeout, and the next call works.
    """

    num_sms: int = 20
    _num_sms_was_set = False

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
        allow_nvlink_for_normal_mode: bool = True,
    ) -> None:
        refuse("deep_ep", comm=comm)
        if group is None:
            raise BadInput("group", "None", "a process group")
        check_integer("num_nvl_bytes", num_nvl_bytes, 0)
        check_integer("num_rdma_bytes", num_rdma_bytes, 0)
        check_flag("enable_shrink", enable_shrink)
        self._pool = Pool(group, num_nvl_bytes, masks=bool(enable_shrink), names=_NAMES)
        self.group = group
        self.rank, self.group_size = self._pool.ranks.rank, self._pool.ranks.ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink

    def destroy(self) -> None:
        """Give the memory back.  Idempotent, and allowed without `explicitly_destroy` too."""
        self._pool.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: kernels are compiled for the GPU at hand."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Limit the SMs of normal calls without a config; until it is called, moecomm's own table decides."""
        check_even_sms(new_num_sms)
        Buffer.num_sms, Buffer._num_sms_was_set = new_num_sms, True

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the most bytes of a bfloat16 low-latency result and its handle; a window has room for three."""
        tokens = num_max_dispatch_tokens_per_rank
        check_sizes(num_max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_experts=num_experts)
        check_integer("num_ranks", num_ranks, 1, MAX_RANKS)
        sizes = Settings(num_ranks, hidden, num_experts, _TOPK_HINT, tokens, torch.bfloat16, "", None)
        return sizes.round_bytes("batched")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A Config with the current number of SMs; any number of ranks will do."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """A Config with the current number of SMs; any number of ranks will do."""
        return Config(Buffer.num_sms)

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return an empty tensor, for code that zeroes the buffer to reset it.  Raises Unsupported for a `size`."""
        refuse("deep_ep", size=size, offset=offset)
        if not isinstance(dtype, torch.dtype):
            raise BadInput("dtype", repr(dtype), "a dtype")
        return torch.empty(0, dtype=dtype, device="cuda" if uses_cuda() else "cpu")

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """num_tokens_per_rank, num_tokens_per_rdma_rank (None), num_tokens_per_expert, is_token_in_rank, event.

        Some ten small kernels, for callers that want these; of them, dispatch with `topk_idx` needs nothing but the
        shape of num_tokens_per_expert.  On GPUs, where nothing waits for ids, those that no expert has are counted as
        none, and the dispatch refuses them.
        """
        check_flag("async_finish", async_finish)
        check_experts(num_experts, self.group_size)
        check_dimensions("topk_idx", topk_idx, "tokens", "topk")
        if not has_memory(topk_idx):
            raise BadInput("topk_idx", "a tensor without memory", "one that has some")
        if topk_idx.ndim != 2 or topk_idx.dtype not in (torch.int64, torch.int32):
            raise BadInput("topk_idx", f"{topk_idx.dtype} {tuple(topk_idx.shape)}", "int64 or int32 [tokens, topk]")
        if not topk_idx.is_cuda and (bad := topk_idx[(topk_idx < -1) | (topk_idx >= num_experts)]).numel():
            raise BadInput("topk_idx", f"expert {int(bad[0])}", f"-1 to {num_experts - 1}")
        wait_for(previous_event)
        per_rank, per_expert, is_token_in_rank = counts_of(topk_idx, num_experts, self.group_size)
        return per_rank, None, per_expert, is_token_in_rank, finished(async_finish)

    @counted_by_pool
    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int] | None, Any, EventOverlap]:
        """recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event.

        Waits for the device, for the list, unless `num_worst_tokens` or `handle` is given.  Without `topk_idx` the
        list takes a small round of its own.
        """
        if async_finish is not False:
            check_flag("async_finish", async_finish)
        if previous_event is not None:
            wait_for(previous_event)
        pool, num_sms = self._pool, self._limit(config, x)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise BadInput("handle", "topk_idx or topk_weights beside it", "rows only: it repeats a routing")
            tensors = unpack_all(x)
            native = pool.native_of(handle, NormalHandle, _HANDLE)
            pool.calls.begin(native.rounds)
            more: dict[str, Any] = {"scales": tensors.scales, "extras": tensors.extras, "handle": native, "sync": False}
            routed = run_dispatch(native.rounds, limited(num_sms), tensors.rows, **more)
            recv_x = tensors.arrived(routed.x, routed.scales, routed)
            return recv_x, None, None, None, None, finished(async_finish)
        tensors = unpack_all(x)
        if num_tokens_per_expert is None:
            raise BadInput("num_tokens_per_expert", "None", "what get_dispatch_layout returned, or handle=")
        check_integer("expert_alignment", expert_alignment, 1)
        check_integer("num_worst_tokens", num_worst_tokens, 0)
        check_dimensions("num_tokens_per_expert", num_tokens_per_expert, "experts")
        num_experts, ids = num_tokens_per_expert.shape[0], topk_idx
        if ids is None:
            check_experts(num_experts, self.group_size)
            if topk_weights is not None:
                raise BadInput("topk_weights", "a tensor", "topk_idx beside it")
            if num_worst_tokens:
                want = "topk_idx beside it: it says which rows are in use"
                raise BadInput("num_worst_tokens", num_worst_tokens, want)
            if num_tokens_per_expert.dtype not in (torch.int32, torch.int64):
                raise BadInput("num_tokens_per_expert", described(num_tokens_per_expert), "int32 [experts]")
            if is_token_in_rank is not None:
                places = {"is_token_in_rank": is_token_in_rank, "num_tokens_per_expert": num_tokens_per_expert}
                check_same_device(x=tensors.rows, **places)
            ids = an_expert_of_each_rank(is_token_in_rank, num_experts, self.group_size)
        elif isinstance(ids, torch.Tensor):
            check_dimensions("topk_idx", ids, "tokens", "topk")
        routed = route(pool, tensors, ids, topk_weights, num_experts, num_worst_tokens, num_sms)
        new_handle = NormalHandle(NormalHandle.makers)  # quicker than through a __new__ of its own
        new_handle.native = routed.handle
        outputs: tuple[Any, ...]
        if routed.unpack is None:  # all in one step
            outputs = routed.plan.flat_tensors(routed)
        else:
            outputs = routed.x, routed.scales, routed.topk_idx, routed.topk_weights
        recv, recv_scales, recv_topk_idx, recv_topk_weights = outputs
        recv_x = tensors.arrived(recv, recv_scales, routed)
        if topk_idx is None:
            with CountedCall(pool.calls):  # another round
                counts = exchange_counts(pool, num_tokens_per_expert)
            recv_topk_idx = None
        else:
            counts = [] if num_worst_tokens else routed.tokens_per_expert.tolist()
        if topk_weights is None:
            recv_topk_weights = None
        counts = aligned(counts, expert_alignment)
        return recv_x, recv_topk_idx, recv_topk_weights, counts, new_handle, finished(async_finish)

    @counted_by_pool
    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """combined_x, combined_topk_weights (None without `topk_weights`), event.

        `topk_weights` are added over all ranks that have a token, entries beside recv_topk_idx == -1 too.  Two biases
        are added up first, in float32, by a few kernels of their own.
        """
        if async_finish is not False:
            check_flag("async_finish", async_finish)
        if previous_event is not None:
            wait_for(previous_event)
        num_sms, native = self._limit(config, x), self._pool.native_of(handle, NormalHandle, _HANDLE)
        self._pool.calls.begin(native.rounds, combines=True)
        total = None if bias is None else one_bias(bias)
        request = _SUMS if num_sms is None else _SUMS._replace(options=combining.Options(num_sms=num_sms))
        out = combining.combine(native.rounds, request, x, native, bias=total, weight_grads=topk_weights)
        out, weights = (out, None) if topk_weights is None else out
        return out, weights, finished(async_finish)

    internode_dispatch = staticmethod(not_here("internode_dispatch", "call dispatch, which serves every rank"))
    internode_combine = staticmethod(not_here("internode_combine", "call combine, which serves every rank"))
    dispatch_pcie = staticmethod(not_here("dispatch_pcie", "call dispatch"))
    combine_pcie = staticmethod(not_here("combine_pcie", "call combine"))

    @staticmethod
    def _limit(config: Config | None, x: Any) -> int | None:
        """Blocks that a caller has limited a call to; None: moecomm's own choice, as always on CPUs."""
        if config is None:
            if not Buffer._num_sms_was_set:
                return None
        elif not isinstance(config, Config):
            raise BadInput("config", type(config).__name__, "None or a Config")
        rows = x[0] if isinstance(x, tuple) and x else x
        if not isinstance(rows, torch.Tensor) or not rows.is_cuda:
            return None
        return Buffer.num_sms if config is None else config.num_sms or None
