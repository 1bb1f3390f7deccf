"""Overhead of moecomm.compat.deep_ep over moecomm's own calls: both alternate, over the same Buffers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from operator import sub
from typing import Any

import torch
import torch.distributed as dist

from moecomm.base.choices import Layout
from moecomm.base.protocol import MAX_TOPK
from moecomm.buffer import Buffer
from moecomm.compat import deep_ep
from moecomm.dispatch.reference import quantize
from moecomm.dispatch.routed import Handle
from moecomm.errors import BadInput
from moecomm.gpu import padding, routing_map
from moecomm.ranks.rendezvous import rendezvous
from moecomm.tools.progress import progress
from moecomm_bench.case import RoundsCase
from moecomm_bench.clock import Clock, percentiles, rounded
from moecomm_bench.deep_ep import NOT_COPIED
from moecomm_bench.ranks import device_of, on_ranks

MOST_LOW_LATENCY = 512  # tokens of a low-latency call: DeepEP's own limit; more would take most of the memory
ALIGNMENT = 16  # rows of an expert, as grouped GEMMs in FP8 need
BY = ("native", "compat")
AGAIN = "again"  # the native call a second time, on the host: its difference from itself is noise
ORDERS = ((*BY, AGAIN), ("compat", AGAIN, "native"), (AGAIN, *BY))
HOST_BATCHES = 100  # so that 30 of 3000 calls are behind a 99th percentile
_COLUMNS: dict[str, Any] = {
    "quantize": "fp8",
    "scale_layout": "column",
}  # the default of low_latency_dispatch

Tensors = tuple[Any, ...]


@dataclass(frozen=True)
class Pair:
    """One operation through moecomm's own call and through deep_ep's; both return the tensors that callers use."""

    what: str
    payload: str  # of dispatch
    variant: str
    native: Callable[[], Tensors]
    compat: Callable[[], Tensors]

    @property
    def about(self) -> dict[str, str]:
        """The fields that identify the operation in a row."""
        return {"what": self.what, "payload": self.payload, "variant": self.variant}


class DeepEpLayer:
    """deep_ep's Buffers for one size, and their calls paired with those of the moecomm.Buffers behind. Collective."""

    def __init__(self, case: RoundsCase, group: Any, device: torch.device, tokens: int) -> None:
        self.tokens, self._experts = tokens, case.experts
        ranks = rendezvous(group)
        idx, weights = case.routing(tokens, ranks.rank)
        generator = torch.Generator(device=device).manual_seed(case.seed * 1000 + ranks.rank)
        self._x = torch.randn(tokens, case.hidden, generator=generator, device=device).to(torch.bfloat16)
        self._idx, self._weights = idx.to(device), weights.to(device)
        self._to_expert = self._idx.new_empty(case.experts)  # only its shape is used
        self._ranks, self._worst = ranks.ranks, ranks.ranks * tokens
        self.window_bytes = 0  # of the Buffer behind the next pairs
        self._deep = deep_ep.Buffer(group)
        self._elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=tokens, explicitly_destroy=True)
        self._hybrid = deep_ep.HybridEPBuffer(group, case.hidden, tokens, case.experts // ranks.ranks)

    def __enter__(self) -> DeepEpLayer:
        return self

    def __exit__(self, *error: object) -> None:
        self._deep.destroy()
        self._elastic.destroy()
        self._hybrid._pool.close()

    def meet(self) -> Any:
        """Run a round in which ranks wait for each other on the device."""
        return self._normal(self._x)

    def pairs(self) -> Iterator[Pair]:
        """Yield all operations at this size; measure each before taking the next."""
        yield from self._normal_pairs()
        for expand in (False, True):
            yield from self._elastic_pairs(expand)
        yield from self._hybrid_pairs()
        if self.tokens <= MOST_LOW_LATENCY:
            yield from self._low_latency_pairs()

    def _normal(self, x: Any) -> Any:
        return self._deep.dispatch(
            x,
            topk_idx=self._idx,
            topk_weights=self._weights,
            num_tokens_per_expert=self._to_expert,
            num_worst_tokens=self._worst,
        )

    def _owner(self, native: Handle) -> Buffer:
        """Return the Buffer of the handle, over which the same round can be timed without deep_ep's interface.

        Later rows have the bytes of its window.
        """
        pools = (self._deep._pool, self._elastic._pool, self._hybrid._pool)
        found = next(pool.opened[native.rounds] for pool in pools if native.rounds in pool.opened)
        self.window_bytes = found.nbytes
        return found

    def _normal_pairs(self) -> Iterator[Pair]:
        x, deep = self._x, self._deep
        recv_x, _, recv_weights, _, handle, _ = self._normal(x)
        buffer, native = self._owner(handle.native), handle.native
        y, recv_weights = recv_x.clone(), recv_weights.clone()
        del recv_x  # frees window memory for the timed rounds
        given: dict[str, Any] = {
            "topk_idx": self._idx,
            "topk_weights": self._weights,
            "layout": "flat",
            "max_rows": self._worst,
        }

        def dispatch(rows: torch.Tensor, scales: torch.Tensor | None) -> Tensors:
            routed = buffer.dispatch(rows, scales=scales, sync=False, **given)
            out = (routed.x, routed.topk_idx, routed.topk_weights)
            return out if scales is None else (*out, routed.scales)

        def by_deep_ep(rows: torch.Tensor, scales: torch.Tensor) -> Tensors:
            (recv, recv_scales), *out = self._normal((rows, scales))[:3]
            return (recv, *out, recv_scales)

        yield Pair("dispatch", "bf16", "", partial(dispatch, x, None), lambda: self._normal(x)[:3])
        cast = quantize(x)
        yield Pair("dispatch", "fp8", "", partial(dispatch, *cast), partial(by_deep_ep, *cast))
        yield Pair(
            "dispatch",
            "bf16",
            "handle",
            lambda: (buffer.dispatch(x, handle=native, sync=False).x,),
            lambda: deep.dispatch(x, handle=handle)[:1],
        )
        yield Pair("combine", "", "", lambda: (buffer.combine(y, native),), lambda: deep.combine(y, handle)[:1])
        yield Pair(
            "combine",
            "",
            "topk_weights",
            lambda: buffer.combine(y, native, weight_grads=recv_weights),
            lambda: deep.combine(y, handle, topk_weights=recv_weights)[:2],
        )

    def _elastic_pairs(self, expand: bool) -> Iterator[Pair]:
        """Yield the operations of ElasticBuffer (DeepEP 2): a row for each (token, rank); expanded, (token, expert)."""
        x, idx, weights, elastic = self._x, self._idx, self._weights, self._elastic
        options: dict[str, Any] = {"num_experts": self._experts, "do_cpu_sync": False, "do_expand": expand}
        call = partial(elastic.dispatch, x, idx, weights, **options)
        recv_x, _, _, handle, _ = call()
        buffer, native = self._owner(handle.native), handle.native
        rows, y = native.args.max_rows, recv_x.clone()
        del recv_x
        layout: Layout = "expert" if expand else "flat"
        variant = "expanded" if expand else ""

        def dispatch() -> Tensors:
            routed = buffer.dispatch(x, idx, weights, layout=layout, max_rows=rows, sync=False)
            return (routed.x, routed.row_weights) if expand else (routed.x, routed.topk_idx, routed.topk_weights)

        def by_deep_ep(copied: bool) -> Tensors:
            recv, ids, recv_weights, _, _ = call(do_handle_copy=copied)
            return (recv, recv_weights) if expand else (recv, ids, recv_weights)

        name = "elastic dispatch"
        yield Pair(name, "bf16", variant, dispatch, partial(by_deep_ep, True))
        uncopied = ", ".join(filter(None, (variant, NOT_COPIED)))
        yield Pair(name, "bf16", uncopied, dispatch, partial(by_deep_ep, False))
        how: dict[str, Any] = {"weighted": False, "wire": y.dtype if expand else None}
        combine = partial(buffer.combine, y, native, **how)
        yield Pair("elastic combine", "", variant, lambda: (combine(),), lambda: elastic.combine(y, handle)[:1])

    def _hybrid_pairs(self) -> Iterator[Pair]:
        """Yield the operations of HybridEPBuffer as Megatron-core calls it, with a routing map.

        There is room for all rows that can arrive, or with many tokens for twice the mean, so that nothing waits.
        """
        x, some = self._x, self._idx.shape[1] * self.tokens
        room = some * (self._ranks if self.tokens <= MOST_LOW_LATENCY else 2)
        dense = routing_map.weights_at(self._idx, self._weights, self._experts)
        chosen, most = dense > 0, min(MAX_TOPK, self._experts)
        named: dict[str, Any] = {"hidden": x, "routing_map": chosen, "probs": dense, "non_blocking": True}
        for align, variant in ((1, "map"), (ALIGNMENT, "map, padded")):
            rows = room + (align - 1) * self._experts // self._ranks
            call = partial(self._hybrid.dispatch_with_permute, **named, num_permuted_tokens=rows, pad_multiple=align)
            recv_x, of_rows, _, _, handle = call()
            assert of_rows is not None
            buffer, native = self._owner(handle.native), handle.native
            y, recv_weights = recv_x.clone(), of_rows.clone()
            del recv_x, of_rows
            given: dict[str, Any] = {"layout": "expert", "expert_alignment": align, "max_rows": rows, "sync": False}
            dispatch = partial(self._by_map, buffer, chosen, dense, most, given)
            yield Pair("hybrid dispatch", "bf16", variant, dispatch, partial(_rows_probs_and_counts, call))

        def combine() -> Tensors:
            out, grads = buffer.combine(y, native, weighted=False, weight_grads=recv_weights, wire=y.dtype)
            return out, routing_map.weights_at(handle.ids, grads, self._experts)

        by_deep_ep = partial(self._hybrid.combine_with_unpermute, hidden=y, probs=recv_weights, handle=handle)
        yield Pair("hybrid combine", "", "probs", combine, by_deep_ep)

    def _by_map(
        self, buffer: Any, chosen: torch.Tensor, probs: torch.Tensor, most: int, given: dict[str, Any]
    ) -> Tensors:
        ids, weights = routing_map.ids_of(chosen, probs, most)
        routed = buffer.dispatch(self._x, ids, weights, **given)
        if given["expert_alignment"] > 1:
            padding.zero(routed.x, src=routed.src)
        return routed.x, routed.row_weights, routed.rows_per_expert

    def _low_latency_pairs(self) -> Iterator[Pair]:
        x, idx, weights, deep = self._x, self._idx, self._weights, self._deep
        call = partial(deep.low_latency_dispatch, x, idx, self.tokens, self._experts, topk_weights=weights)
        recv_x, _, handle, *_ = call(use_fp8=False)
        buffer, native = self._owner(handle.native), handle.native
        y = recv_x.clone()
        del recv_x

        def dispatch(options: dict[str, Any]) -> Tensors:
            routed = buffer.dispatch(x, idx, weights, layout="batched", sync=False, **options)
            out = (routed.x, routed.tokens_per_expert)
            return (*out, routed.scales) if options else out

        def with_scales() -> Tensors:
            (rows, scales), counts, *_ = call(use_fp8=True)
            return rows, counts, scales

        def combine(theirs: torch.Tensor) -> Tensors:
            return deep.low_latency_combine(y, idx, theirs, handle)[:1]

        name = "low-latency "  # the larger first: later graphs reuse the window memory that its graphs took
        yield Pair(name + "dispatch", "bf16", "", partial(dispatch, {}), lambda: call(use_fp8=False)[:2])
        yield Pair(name + "dispatch", "fp8", "", partial(dispatch, _COLUMNS), with_scales)
        alone = partial(buffer.combine, y, native, wire="exact")
        yield Pair(name + "combine", "", "", lambda: (alone(),), partial(combine, weights))
        others = weights.clone()  # not the tensor that the dispatch was given
        own = partial(buffer.combine, y, native, wire="exact", topk_weights=others)
        yield Pair(name + "combine", "", "other weights", lambda: (own(),), partial(combine, others))


def _rows_probs_and_counts(call: Callable[[], Tensors]) -> Tensors:
    rows, probs, _, counts, _ = call()
    return rows, probs, counts


def run(case: RoundsCase) -> dict[str, Any] | None:
    """Measure a case on all ranks; None in a process that has nothing to report.

    Returns {benchmark, case, backend, rows}: see `merge`. Raises BadInput, RanksFailed.
    """
    case.check()
    by_rank = on_ranks("moecomm_bench.deep_ep_layer:run_rank", asdict(case), case.ranks)
    return None if by_rank is None else merge(case, by_rank)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Run one rank of the benchmark."""
    case = RoundsCase(**job)
    device = device_of(group, case.backend)
    mode = {"graph": case.mode == "graph", "cold": case.cold}
    rows = []
    with progress(group, sum(18 if tokens <= MOST_LOW_LATENCY else 14 for tokens in case.tokens)) as step:
        for tokens in case.tokens:
            clock = Clock(group, device, **mode, chain=case.chain_of(tokens), replays=case.replays)
            with DeepEpLayer(case, group, device, tokens) as layer:
                for pair in layer.pairs():
                    step(f"{tokens} tokens: {' '.join(filter(None, pair.about.values()))}")
                    about = {"tokens": tokens, **pair.about, "window_bytes": layer.window_bytes}
                    rows.append(about | _timed(clock, pair, layer))
    return {"rows": rows}


def _timed(clock: Clock, pair: Pair, layer: DeepEpLayer) -> dict[str, Any]:
    """Time a pair: `us` by caller and replay; `host_us` by caller, empty for graphs; or `why` it has no times.

    On the host each call is first in a third of the measurements, because the first one after a wait takes longest.
    """
    calls = {name: getattr(pair, name) for name in BY}
    on_host = {**calls, AGAIN: pair.native}
    try:
        us = clock.alternately(calls, layer.meet)
        host: dict[str, list[float]] = {name: [] for name in on_host}
        for order in ORDERS if not clock.graph else ():
            in_order = (on_host[name] for name in order)
            for name, times in zip(order, clock.host_times(*in_order, batches=HOST_BATCHES), strict=False):
                host[name] += times
    except BadInput as error:  # no room in the window, on all ranks alike
        return {"why": str(error)}
    return {"us": us, "host_us": host}


def merge(case: RoundsCase, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all ranks.

    A row is {tokens, what, payload, variant, window_bytes, us: {native, compat: {p50, p90, p99}}, of_native, host_us:
    {native, compat}, host_more_us, host_p99_us, host_p99_more_us, host_p99_again_us}, or has `why` in place of figures.

    - `window_bytes`: window of a rank's Buffer behind the interface.
    - `us`: times of the slowest rank.
    - `of_native`: time of deep_ep's call over that of moecomm's.
    - `host_us`: median over ranks of the median time until an eager call returns; None for graphs.
    - `host_more_us`: median of the extra host time of deep_ep's call over its neighbor, on the rank where that is
      largest.
    - `host_p99_us`, `host_p99_more_us`: 99th percentiles in place of medians, and the difference of both callers'.
    - `host_p99_again_us`: the same difference of the native call and its repetition, which is noise.
    """
    rows = [_merged(parts) for parts in zip(*(found["rows"] for found in by_rank), strict=True)]
    of_layer = asdict(case) | {"inputs": 1}  # Layer draws one
    return {"benchmark": "deep-ep-layer", "case": of_layer, "backend": case.backend, "rows": rows}


def _merged(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    row = dict(parts[0])
    whys = [part["why"] for part in parts if "why" in part]
    if whys:
        return {key: value for key, value in row.items() if key not in ("us", "host_us")} | {"why": whys[0]}
    us = row["us"] = {name: percentiles([part["us"][name] for part in parts]) for name in BY}
    row["of_native"] = rounded(us["compat"]["p50"] / us["native"]["p50"], 4)
    host = [part["host_us"] for part in parts]
    if not host[0]["native"]:
        none = dict.fromkeys(BY)
        differences = dict.fromkeys(("host_more_us", "host_p99_more_us", "host_p99_again_us"))
        return row | {"host_us": none, "host_p99_us": none, **differences}
    for key, of_rank in (("host_us", statistics.median), ("host_p99_us", _p99)):
        row[key] = {name: round(statistics.median(of_rank(turns[name]) for turns in host), 2) for name in BY}
    more = [statistics.median(map(sub, turns["compat"], turns["native"])) for turns in host]
    row["host_more_us"] = round(max(more), 2)
    for key, name in (("host_p99_more_us", "compat"), ("host_p99_again_us", AGAIN)):
        row[key] = round(max(_p99(turns[name]) - _p99(turns["native"]) for turns in host), 2)
    return row


def _p99(times: list[float]) -> float:
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]
