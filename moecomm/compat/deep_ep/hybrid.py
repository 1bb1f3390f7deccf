"""deep_ep.HybridEPBuffer: the calls that training frameworks make of it, over moecomm's expert layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from moecomm import combine as combining
from moecomm.base.arrays import check_tensor
from moecomm.base.choices import Layout
from moecomm.base.protocol import MAX_TOPK
from moecomm.base.validation import MOST_SIZE, check_flag, check_integer, check_same_device, check_sizes
from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.arguments import check_dimensions, check_experts, limit_of, refuse
from moecomm.compat.deep_ep.handles import HybridEPDispatchHandle, HybridEPHandle
from moecomm.compat.deep_ep.pool import OverPool, Pool, counted_by_pool, grown, within_budgets
from moecomm.dispatch import Options, Request, dispatch
from moecomm.dispatch.routed import Handle, Routed
from moecomm.dispatch.tables import kept
from moecomm.errors import BadInput
from moecomm.gpu import padding
from moecomm.gpu.routing_map import ids_of, weights_at

__all__ = ["HybridEPBuffer", "HybridEPDispatchHandle", "HybridEPHandle", "indices_to_map"]

_METHODS: dict[str, str] = {
    "expert": "HybridEPBuffer.dispatch_with_permute",
    "flat": "HybridEPBuffer.dispatch",
}  # by layout
_HANDLE = "the handle that {} returned"
_NAMES = {  # see Calls
    "x": "hidden",
    "y": "hidden",
    "scales": "scaling_factor",
    "weight_grads": "probs",
    "max_rows": "num_dispatched_tokens",
}

_Received = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class _Routing(NamedTuple):
    ids: torch.Tensor
    weights: torch.Tensor | None
    num_experts: int
    overflow: torch.Tensor | None = None  # with num_permuted_tokens: see HybridEPHandle
    few: bool = False  # far fewer experts a token than columns of ids: the window is for rows that callers ask for


class _Sent(NamedTuple):
    hidden: torch.Tensor
    scales: torch.Tensor | None
    rows: int | None  # that the caller makes room for; None: the host waits for as many as arrive
    options: Options


class HybridEPBuffer(OverPool):
    """Dispatch grouped by expert, with or without padding, and combine; the backward pass of each is the other.

    `num_sms_dispatch_api` and `num_sms_combine_api` limit blocks; the other settings are of deep_ep's kernels.  All
    ranks open a larger window together if a rank has more than `max_num_of_tokens_per_rank` tokens, or a token more
    experts than before.  With num_permuted_tokens nothing waits, so windows do not grow: tokens are limited, a token
    may have 32 experts, and a window has room for eight rounds of the rows that the first call asks for.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        if group is None:
            raise BadInput("group", "None", "a process group")
        check_sizes(hidden_dim=hidden_dim, num_local_experts=num_local_experts)
        check_integer("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0, MOST_SIZE)
        for name, sms in (("num_sms_dispatch_api", num_sms_dispatch_api), ("num_sms_combine_api", num_sms_combine_api)):
            if sms is not None:
                check_integer(name, sms, 1, 1024)
        self._pool = Pool(group, method=_METHODS["expert"], names=_NAMES)
        self.group = group
        self.rank, self.group_size = self._pool.ranks.rank, self._pool.ranks.ranks
        self.local_rank, self.node_rank, self.num_of_nodes = self.rank, 0, 1
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self.group_size
        self.use_fp8 = use_fp8
        self.num_sms_dispatch_api, self.num_sms_combine_api = num_sms_dispatch_api, num_sms_combine_api
        self.config = SimpleNamespace(
            hidden_dim=hidden_dim,
            max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
            num_of_experts_per_rank=num_local_experts,
            num_of_ranks_per_node=self.group_size,
            num_of_nodes=1,
        )
        self.configurer = SimpleNamespace(buffer_config=self.config)
        self._topk = 0  # of routing maps: at least the most experts that a row of one so far had, on any rank
        self._agreed = False  # whether all ranks have the same config: each may have been given its own tokens
        self._options: dict[tuple[Any, ...], Options] = {}
        self._buffers: dict[tuple[Any, ...], Buffer] = {}  # the pool's, by what a call has at hand

    def empty_jit_cache(self) -> None:
        """Do nothing: an entry of moecomm's cache fits its kernel, or is not used."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> SimpleNamespace:
        """Return a configuration with these values, and make room for as many tokens.  All ranks make this call.

        `num_of_tokens_per_rank` counts if there are more than before; the next dispatch then opens a larger window.
        Nothing else depends on a configuration: calls say their own sizes, and the rest is of deep_ep's kernels.
        """
        if use_fp8 is not None:
            check_flag("use_fp8", use_fp8)
        sizes = {"hidden_dim": hidden_dim, "num_of_experts_per_rank": num_local_experts, "pad_multiple": pad_multiple}
        sizes = {name: value for name, value in sizes.items() if value is not None}
        for name, value in sizes.items():
            check_integer(name, value, 0, MOST_SIZE)
        if num_of_tokens_per_rank is not None:
            check_integer("num_of_tokens_per_rank", num_of_tokens_per_rank, 0, MOST_SIZE)
            tokens = -(-num_of_tokens_per_rank // 16) * 16  # as deep_ep rounds
            if tokens > self.config.max_num_of_tokens_per_rank:
                self.config.max_num_of_tokens_per_rank, self._agreed = tokens, False
        values = vars(self.config) | sizes
        dtype = torch.uint8 if (self.use_fp8 if use_fp8 is None else use_fp8) else torch.bfloat16
        return SimpleNamespace(**values | {"token_data_type": dtype} | kwargs)

    @counted_by_pool
    def dispatch(
        self,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts: int | None = None,
        probs: torch.Tensor | None = None,
        routing_map: torch.Tensor | None = None,
        num_dispatched_tokens_tensor: torch.Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: HybridEPDispatchHandle | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, HybridEPDispatchHandle]:
        """hidden `[rows, H]`, a row for each token that has an expert here, probs `[rows, E]`, scaling_factor, handle.

        Rows are in the order of source ranks and tokens.  probs have zeros beside the experts of this rank; None
        without probs or topk_weights.  With `num_dispatched_tokens` there are so many rows, and the host waits for
        nothing; more are TooManyRows.  Probs take a few small kernels.
        """
        rows = as_number(num_dispatched_tokens)
        if rows is not None:
            check_integer("num_dispatched_tokens", rows, 0, MOST_SIZE)
        options = self._options_of(hidden, 1, "flat")
        hidden, as_given = _values(hidden)
        if handle is not None:
            native = self._pool.native_of(handle, HybridEPDispatchHandle, _HANDLE.format("dispatch"))
            refuse("deep_ep", topk_weights=topk_weights, probs=probs)  # beside a handle
            self._pool.calls.begin(native.rounds)
            routed = dispatch(native.rounds, Request(options), hidden, scales=scaling_factor, handle=native, sync=False)
            return routed.x.view(as_given), None, routed.scales, handle
        by_ids = topk_idx, topk_weights, num_of_experts
        sent = _Sent(hidden, scaling_factor, rows, options)
        routing, routed = self._routed(sent, by_ids, routing_map, probs)
        new_handle = HybridEPDispatchHandle(HybridEPDispatchHandle.makers)
        new_handle.native, new_handle.config = routed.handle, self.config
        new_handle.ids, new_handle.num_experts = routing.ids, routing.num_experts
        recv_probs = None
        if routing.weights is not None:
            weights = routed.topk_weights
            assert weights is not None, "of flat rows"
            recv_probs = weights_at(new_handle.experts, weights, new_handle.num_experts)
        return routed.x.view(as_given), recv_probs, routed.scales, new_handle

    @counted_by_pool
    def combine(
        self,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: HybridEPDispatchHandle | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden `[T, H]`: the sum of a token's rows; `[T, E]` of `probs` `[rows, E]`, 0 beside the token's experts."""
        native = self._pool.native_of(handle, HybridEPDispatchHandle, _HANDLE.format("dispatch"))
        assert handle is not None, "has just been checked"
        check_dimensions("hidden", hidden, "rows", "columns")
        grads = None
        if probs is not None:
            check_dimensions("probs", probs, "rows", "experts")
            shape = (native.y_shape[0], handle.num_experts)
            check_tensor("probs", probs, device=native.plan.device, dtypes=(torch.float32,), shape=shape)
            experts = handle.experts
            grads = probs.gather(1, experts.clamp(min=0).long()).masked_fill_(experts < 0, 0)
        options = combining.Options(num_sms=limit_of(hidden, self.num_sms_combine_api))
        self._pool.calls.begin(native.rounds, combines=True)
        out = combining.combine(native.rounds, combining.Request(options), hidden, native, weight_grads=grads)
        if isinstance(out, torch.Tensor):  # no probs
            return out, None
        combined, weights = out
        return combined, weights_at(handle.ids, weights, handle.num_experts)

    @counted_by_pool
    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: HybridEPHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, HybridEPHandle]:
        """hidden `[rows, H]` by expert, probs `[rows]`, scaling_factor, padded tokens_per_expert, handle.

        tokens_per_expert is int64, on the CPU, or, with `non_blocking`, on the device and nothing waits.  Tokens that
        `num_permuted_tokens` has no room for are dropped (see within_budgets) and handle[-1] is 1: that takes a small
        round of counts, and two small kernels.  A `routing_map` takes a small kernel to find its ids, and the
        first one without num_permuted_tokens a host wait; `topk_idx` spares both.  Another one zeroes padding.
        """
        if use_host_meta is not None:
            check_flag("use_host_meta", use_host_meta)
            non_blocking = not use_host_meta
        if non_blocking is not False:
            check_flag("non_blocking", non_blocking)
        if pad_multiple is not None:
            check_integer("pad_multiple", pad_multiple, 0)
        num_permuted_tokens = as_number(num_permuted_tokens)
        if num_permuted_tokens is not None:
            check_integer("num_permuted_tokens", num_permuted_tokens, 0, MOST_SIZE)
        if non_blocking and num_permuted_tokens is None:
            raise BadInput("num_permuted_tokens", "None", "rows to make room for, beside non_blocking")
        if handle is not None:
            native = self._pool.native_of(handle, HybridEPHandle, _HANDLE.format("dispatch_with_permute"))
            refuse("deep_ep", topk_weights=topk_weights, probs=probs)  # beside a handle
            if num_permuted_tokens not in (None, handle.rows):
                raise BadInput("num_permuted_tokens", num_permuted_tokens, f"{handle.rows}: the handle's")
            options = self._options_of(hidden, 1)
            hidden, as_given = _values(hidden)
            self._pool.calls.begin(native.rounds)
            routed = dispatch(native.rounds, Request(options), hidden, scales=scaling_factor, handle=native, sync=False)
            received = self._received(routed, (routed.x, None, routed.scales), handle.rows, pad_multiple, as_given)
            return (*received, handle.tokens_per_expert, handle)
        options = self._options_of(hidden, pad_multiple or 1)
        hidden, as_given = _values(hidden)
        sent = _Sent(hidden, scaling_factor, num_permuted_tokens, options)
        by_ids = topk_idx, topk_weights, num_of_experts
        routing, routed = self._routed(sent, by_ids, routing_map, probs, num_of_experts_per_rank)
        x, scales, weights, counts = routed.plan.expert_tensors(routed, counted=True)
        if not non_blocking:
            counts = counts.to("cpu", copy=True)
        native = routed.handle
        rows = native.args.max_rows if num_permuted_tokens is None else num_permuted_tokens
        new_handle = self._handle(native, routing, counts, rows)
        outputs = x, None if routing.weights is None else weights, scales
        received = self._received(routed, outputs, rows, pad_multiple, as_given)
        return (*received, counts, new_handle)

    @counted_by_pool
    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: HybridEPHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden `[T, H]`: the sum of a token's rows, without weights; `[T, E]` of `probs` `[rows]`, 0 elsewhere."""
        native = self._pool.native_of(handle, HybridEPHandle, _HANDLE.format("dispatch_with_permute"))
        assert handle is not None, "has just been checked"
        if getattr(hidden, "ndim", 0) != 2:
            check_dimensions("hidden", hidden, "rows", "columns")
        rows, most = handle.rows, native.args.max_rows
        if hidden.shape[0] != rows:
            raise BadInput("hidden", f"{len(hidden)} rows", f"the {rows} of the dispatch")
        if most < rows:  # more room was asked for than all tokens of all ranks can fill
            hidden, probs = hidden[:most], None if probs is None else probs[:most]
        options = combining.Options(
            weighted=False,
            wire=hidden.dtype,  # deep_ep, too, rounds the sum of a rank's rows before it travels
            num_sms=limit_of(hidden, self.num_sms_combine_api),
        )
        self._pool.calls.begin(native.rounds, combines=True)
        out = combining.combine(native.rounds, combining.Request(options), hidden, native, weight_grads=probs)
        if isinstance(out, torch.Tensor):  # no probs
            return out, None
        combined, weights = out
        return combined, weights_at(handle.ids, weights, handle.num_experts)

    def _routed(
        self,
        sent: _Sent,
        by_ids: tuple[torch.Tensor | None, torch.Tensor | None, int | None],
        routing_map: torch.Tensor | None,
        probs: torch.Tensor | None,
        per_rank: int | None = None,
    ) -> tuple[_Routing, Routed]:
        """Dispatch by topk_idx, topk_weights and num_of_experts, or by a map."""
        topk_idx, topk_weights, num_experts = by_ids
        if routing_map is not None:
            check_map(sent.hidden, routing_map, probs)
            num_experts = routing_map.shape[1]
        elif topk_idx is None or num_experts is None:
            raise BadInput("routing_map", "None", "it, topk_idx and num_of_experts, or handle")
        else:
            check_dimensions("topk_idx", topk_idx, "tokens", "topk")
        check_experts(num_experts, self.group_size)
        if per_rank is not None:
            check_integer("num_of_experts_per_rank", per_rank, 1)
            if per_rank != (local := num_experts // self.group_size):
                raise BadInput("num_of_experts_per_rank", per_rank, f"{local}, as the routing has")
        if routing_map is not None:
            return self._route_map(sent, routing_map, probs)
        assert topk_idx is not None, "has just been checked"
        if sent.rows is not None:
            shape, dtypes = (sent.hidden.shape[0], None), (torch.int64, torch.int32)
            check_tensor("topk_idx", topk_idx, device=sent.hidden.device, dtypes=dtypes, shape=shape)
        return self._route(sent, _Routing(topk_idx, topk_weights, num_experts))

    def _route_map(self, sent: _Sent, routing_map: torch.Tensor, probs: torch.Tensor | None) -> tuple[_Routing, Routed]:
        """Dispatch by a routing map.

        With `rows` nothing waits, so there is room for the most experts that a token can have.  Without `rows`, a token
        with more experts than any before ends the round on all ranks, which then make room together.
        """
        num_experts = routing_map.shape[1]
        if sent.rows is not None:
            ids, weights = ids_of(routing_map, probs, min(MAX_TOPK, num_experts))
            return self._route(sent, _Routing(ids, weights, num_experts, few=True))
        if self._topk == 0:
            self._topk = self._most_picks(routing_map, sent.options)
        ids, weights = ids_of(routing_map, probs, self._topk)
        try:
            return self._route(sent, _Routing(ids, weights, num_experts))
        except BadInput as error:
            if error.argument != "topk_idx" or error.got != f"expert {num_experts}":
                raise
            most = self._most_picks(routing_map, sent.options)
            if most <= self._topk:  # what an earlier call has left behind
                raise
        self._topk = min(MAX_TOPK, 1 << (most - 1).bit_length())  # so that it grows a few times at most
        return self._route_map(sent, routing_map, probs)

    def _handle(self, native: Handle, routing: _Routing, counts: torch.Tensor, rows: int) -> HybridEPHandle:
        handle = HybridEPHandle(HybridEPHandle.makers)
        handle.native, handle.ids, handle.num_experts = native, routing.ids, routing.num_experts
        handle.tokens_per_expert, handle.rows, handle.config = counts, rows, self.config
        overflow = routing.overflow
        handle.overflow_flag = (
            counts.new_zeros(1, dtype=torch.int32, device=native.plan.device) if overflow is None else overflow
        )
        return handle

    def _most_picks(self, routing_map: torch.Tensor, options: Options) -> int:
        """Collective: the most experts of a token."""
        picks = int(routing_map.sum(dim=1).max()) if len(routing_map) else 0
        most = self._pool.calls.agree(_METHODS[options.layout], f"routing_map of {routing_map.shape[1]} experts", picks)
        if most > MAX_TOPK:
            raise BadInput("routing_map", f"{most} experts for a token of a rank", f"at most {MAX_TOPK}")
        return max(1, most)

    def _route(self, sent: _Sent, routing: _Routing) -> tuple[_Routing, Routed]:
        """Dispatch; where a rank has more tokens than the Buffer takes, again with a larger one.

        Budgets of `rows`, ours and those of other ranks, leave entries of the routing out.  A flat dispatch, whose
        caller knows how many rows come, has none.
        """
        hidden, scales, rows, options = sent
        if rows is not None and options.layout == "expert":
            entries = within_budgets(self._pool, routing.ids, routing.num_experts, rows, options.expert_alignment)
            routing = routing._replace(ids=entries.ids, overflow=entries.overflow)
        ids, weights, num_experts, _, few = routing
        most = self.config.max_num_of_tokens_per_rank  # other tokens once they grow
        key = (hidden.shape[1], hidden.dtype, num_experts, ids.shape[1], few, most, rows is None, options.layout)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = self._buffer(sent, routing, grow=False)
        self._pool.calls.begin(buffer.rounds)
        request = Request(options)
        if rows is not None:
            routed = dispatch(buffer.rounds, request, hidden, ids, weights, scales=scales, max_rows=rows, sync=False)
            return routing, routed
        routed = grown(
            buffer,
            hidden,
            ids,
            lambda buffer: dispatch(buffer.rounds, request, hidden, ids, weights, scales=scales, sync=True),
            lambda: self._buffer(sent, routing, grow=True),
            scales=scales,
            layout=options.layout,
            alignment=options.expert_alignment,
        )
        return routing, routed

    def _buffer(self, sent: _Sent, routing: _Routing, *, grow: bool) -> Buffer:
        hidden, _, rows, options = sent
        method, sizes = _METHODS[options.layout], self.config
        if grow or not self._agreed:
            tokens = len(hidden) if grow else max(len(hidden), sizes.max_num_of_tokens_per_rank)
            most = self._pool.calls.agree(method, f"num_of_experts={routing.num_experts}", tokens)
            sizes.max_num_of_tokens_per_rank, self._agreed = most, True
        return self._pool.elastic(
            hidden.device,
            hidden.shape[1],
            routing.num_experts,
            routing.ids.shape[1],
            sizes.max_num_of_tokens_per_rank,
            torch.bfloat16 if hidden.dtype is torch.float8_e4m3fn else hidden.dtype,
            expand=options.layout == "expert",
            rows=rows if routing.few else None,
            waits=rows is None,
            method=method,
        )

    def _options_of(self, hidden: torch.Tensor, align: int, layout: Layout = "expert") -> Options:
        """Raise BadInput unless these can be rows."""
        kind = getattr(hidden, "is_cuda", None), getattr(hidden, "layout", None), getattr(hidden, "ndim", 0)
        key = (*kind, align, layout, self.num_sms_dispatch_api)
        options = self._options.get(key)
        if options is None:
            check_dimensions("hidden", hidden, "rows", "columns")
            limit = limit_of(hidden, self.num_sms_dispatch_api)
            options = self._options[key] = Options(layout, align, num_sms=limit)
        return options

    def _received(
        self, routed: Routed, outputs: _Received, rows: int, pad_multiple: int | None, as_given: torch.dtype
    ) -> _Received:
        """Return rows, weights and scales with padding zeroed, in the caller's dtype, and at least `rows` rows."""
        x, weights, scales = outputs
        if pad_multiple is not None and pad_multiple > 1:
            src = kept(routed.handle, "src")
            padding.zero(x, src=src)
            if scales is not None:
                padding.zero(scales, src=src)
        if x.dtype is not as_given:
            x = x.view(as_given)
        if x.shape[0] < rows:  # more room was asked for than all tokens of all ranks can fill
            return _longer(x, rows), _longer(weights, rows), _longer(scales, rows)
        return x, weights, scales


def _values(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """Return rows as moecomm takes them, and the dtype to return them in: deep_ep keeps FP8 rows in uint8."""
    dtype = hidden.dtype
    return hidden.view(torch.float8_e4m3fn) if dtype is torch.uint8 else hidden, dtype


def _longer(tensor: Any, rows: int) -> Any:
    """Return a copy with so many rows, the added ones not initialised; None for None."""
    if tensor is None:
        return None
    longer = tensor.new_empty((rows, *tensor.shape[1:]))
    longer[: len(tensor)] = tensor
    return longer


_PROBS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """routing_map bool `[T, E]` and probs float32 `[T, E]` (None without weights) of ids; -1 is none."""
    check_dimensions("topk_idx", topk_idx, "tokens", "topk")
    check_tensor(
        "topk_idx",
        topk_idx,
        device=topk_idx.device,
        dtypes=(torch.int64, torch.int32),
        shape=(num_of_tokens, None),
    )
    column = torch.where(topk_idx >= 0, topk_idx, num_of_experts).long()
    shape = (num_of_tokens, num_of_experts + 1)
    routing_map = torch.zeros(shape, dtype=torch.bool, device=column.device).scatter_(1, column, True)
    routing_map = routing_map[:, :num_of_experts].contiguous()
    if topk_weights is None:
        return routing_map, None
    check_tensor("topk_weights", topk_weights, device=column.device, dtypes=(torch.float32,), shape=tuple(column.shape))
    probs = torch.zeros(shape, dtype=torch.float32, device=column.device).scatter_(1, column, topk_weights)
    return routing_map, probs[:, :num_of_experts].contiguous()


def as_number(value: Any) -> Any:
    """The number in a tensor of one, as Megatron's backward pass passes it; anything else as it is."""
    return value.item() if type(value) is torch.Tensor and value.ndim == 0 else value


def check_map(hidden: torch.Tensor, routing_map: Any, probs: Any) -> None:
    """Raise BadInput unless these are a map of the rows, and its probabilities or None."""
    try:
        device, (tokens, _) = hidden.device, routing_map.shape
        fine = type(routing_map) is torch.Tensor and routing_map.layout is torch.strided
        fine = fine and routing_map.dtype is torch.bool and routing_map.device == device
        fine = fine and tokens == hidden.shape[0] and device.type != "meta"
        if probs is not None:
            fine = fine and type(probs) is torch.Tensor and probs.layout is torch.strided
            fine = fine and probs.shape == routing_map.shape and probs.device == device
            fine = fine and probs.is_floating_point()
    except (AttributeError, TypeError, ValueError):
        fine = False
    if not fine:  # which takes longer to say
        check_dimensions("routing_map", routing_map, "tokens", "experts")
        shape = (hidden.shape[0], routing_map.shape[1])
        check_tensor("routing_map", routing_map, device=hidden.device, dtypes=(torch.bool,), shape=shape)
        check_same_device(hidden=hidden, routing_map=routing_map, probs=probs)
        if probs is not None:
            check_dimensions("probs", probs, "tokens", "experts")
            check_tensor("probs", probs, device=hidden.device, dtypes=_PROBS, shape=shape)
