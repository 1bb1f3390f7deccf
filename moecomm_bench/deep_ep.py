"""DeepEP on the same rows, where it is installed: its intranode kernels, low-latency kernels and ElasticBuffer.

Written for its interface as of 2.1. An exception becomes a row with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from moecomm_bench.case import QUANT_GROUP, RoundsCase
from moecomm_bench.clock import Timed, device_us
from moecomm_bench.exchange import nccl_group
from moecomm_bench.ours import Input, Ours, operations

NAME = "deep_ep"
_TEST_SMS = 24  # of DeepEP's test of its intranode kernels
_LOW_LATENCY_TOKENS = 511  # more do not fit into the send queues of its defaults
_ROWS = 4  # the low-latency kernels want a multiple of so many rows of all ranks
_QUEUE_ROWS = 256
_DISPATCH_CHUNKS, _COMBINE_CHUNKS = range(4, 33, 2), range(1, 17)  # tried by DeepEP's test
_TRIALS, _TRIAL_CALLS = 3, 8
NOT_COPIED = "ids not copied"  # do_handle_copy=False: a caller's ids do not change while a handle is in use, as ours


def module() -> ModuleType:
    """Return the package. Raises what its import raises, where it is not installed or does not load."""
    return importlib.import_module(NAME)


class DeepEP:
    """DeepEP's Buffers, created for one size at a time. Collective."""

    def __init__(self, case: RoundsCase, module: ModuleType) -> None:
        self._case, self._module = case, module

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        return nccl_group()

    def ways(self) -> dict[str, Callable[[Ours], list[Timed]]]:
        """Return the available interfaces by name; each returns the timed calls for the size of `ours`."""
        found: dict[str, Callable[[Ours], list[Timed]]] = {}
        if hasattr(self._module, "Buffer"):
            found[NAME] = lambda ours: Normal(self._module, self._group, self._case, ours).calls()
            found[f"{NAME} low-latency"] = lambda ours: self._low_latency.calls(ours)
        if hasattr(self._module, "ElasticBuffer"):
            found[f"{NAME} elastic"] = lambda ours: Elastic(self._module, self._group, self._case, ours).calls()
        return found

    @cached_property
    def _low_latency(self) -> DeepEpLowLatency:
        return DeepEpLowLatency(self._module, self._group, self._case)


def _about(what: str, payload: str, layout: str, sms: int, variant: str = "") -> dict[str, Any]:
    return {"what": what, "payload": payload, "layout": layout, "sms": sms, "variant": variant}


def _sms(case: RoundsCase, ours: Ours, layout: str, *more: int) -> list[int]:
    """Return `more` and the SMs of moecomm's dispatches and combines of this size in this layout, each once.

    DeepEP wants even numbers.
    """
    own = [ours.sms(op) for op in operations(case) if op.layout == layout and op.what != "pair"]
    return list(dict.fromkeys([*more, *(sms + sms % 2 for sms in own)]))


def _payloads(case: RoundsCase, given: Input) -> dict[str, Any]:
    """Return rows by payload. DeepEP's kernels for many tokens take float8 rows that are already cast."""
    groups = given.x.float().view(len(given.x), -1, QUANT_GROUP)
    scales = groups.abs().amax(dim=2).clamp(min=1e-4) / 448.0
    cast = (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(len(given.x), -1)
    known = {"bf16": given.x, "fp8": (cast, scales)}
    return {name: known[name] for name in case.payloads if name in known}


def _cast(payload: str) -> list[str]:
    return ["cast before"] if payload == "fp8" else []


class Normal:
    """The intranode kernels of `Buffer` for many tokens: layout `flat`. Collective.

    A dispatch includes the computation of its layout, because a caller's dispatch needs both. It waits on the host for
    counts; a variant makes room for the worst case instead, and can be captured. Chunks are those with which DeepEP's
    test would run: the fastest of those that it tries.
    """

    def __init__(self, module: ModuleType, group: dist.ProcessGroup, case: RoundsCase, ours: Ours) -> None:
        self._kind, self._config, self._group, self._case, self._ours = module.Buffer, module.Config, group, case, ours
        self._settings = _sms(case, ours, "flat", _TEST_SMS)
        ranks, hidden_bytes = group.size(), 2 * case.hidden
        sizes = (
            config.get_nvl_buffer_size_hint(hidden_bytes, ranks)
            for sms in self._settings
            for config in self._usual(sms)
        )
        self._buffer = self._kind(group, max(sizes), 0)

    def calls(self) -> list[Timed]:
        """Return the timed calls."""
        return [timed for sms in self._settings for timed in self._with(sms)]

    def _usual(self, sms: int) -> tuple[Any, Any]:
        self._kind.set_num_sms(sms)
        ranks = self._group.size()
        return self._kind.get_dispatch_config(ranks), self._kind.get_combine_config(ranks)

    def _with(self, sms: int) -> list[Timed]:
        usual, usual_back = self._usual(sms)
        payloads = [_payloads(self._case, given) for given in self._ours.inputs]
        room = self._ours.tokens * self._group.size()
        found = []
        for name in payloads[0]:
            send = partial(
                self._resend, payloads[0][name], self._dispatch(self._ours.inputs[0].x, self._ours.inputs[0], usual)[4]
            )
            config = self._fastest([usual, *self._configs(sms, _DISPATCH_CHUNKS)], send)
            for variant, worst in (([], 0), (["no host wait"], room)):
                calls = [
                    partial(self._dispatch, rows[name], given, config, worst)
                    for rows, given in zip(payloads, self._ours.inputs, strict=True)
                ]
                about = _about("dispatch", name, "flat", sms, ", ".join([*_cast(name), *variant]))
                found.append(Timed(about, calls, graph=worst > 0))
        arrived = [
            (rows, handle)
            for rows, _, _, _, handle, _ in (self._dispatch(given.x, given, usual) for given in self._ours.inputs)
        ]
        back = self._fastest([usual_back, *self._configs(sms, _COMBINE_CHUNKS)], partial(self._combine, *arrived[0]))
        combines = [partial(self._combine, rows, handle, back) for rows, handle in arrived]
        return [*found, Timed(_about("combine", "", "flat", sms), combines)]

    def _configs(self, sms: int, chunks: range) -> list[Any]:
        return [self._config(sms, chunk, _QUEUE_ROWS) for chunk in chunks]

    def _dispatch(self, x: Any, given: Input, config: Any, worst: int = 0) -> Any:
        to_rank, _, to_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(given.topk_idx, self._case.experts)
        return self._buffer.dispatch(
            x,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
            num_tokens_per_rank=to_rank,
            num_tokens_per_expert=to_expert,
            is_token_in_rank=is_in_rank,
            num_worst_tokens=worst,
            config=config,
        )

    def _resend(self, x: Any, handle: Any, config: Any) -> Any:
        return self._buffer.dispatch(x, handle=handle, config=config)

    def _combine(self, rows: Any, handle: Any, config: Any) -> Any:
        return self._buffer.combine(rows, handle, config=config)

    def _fastest(self, configs: list[Any], call: Callable[[Any], Any]) -> Any:
        """Return the configuration with which the slowest rank is fastest. Collective."""
        times = torch.tensor([_least_us(partial(call, config)) for config in configs], device=self._ours.buffer.device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._group)
        return configs[int(times.argmin())]


def _least_us(call: Callable[[], Any]) -> float:
    def several() -> None:
        for _ in range(_TRIAL_CALLS):
            call()

    call()
    return min(device_us(several) for _ in range(_TRIALS)) / _TRIAL_CALLS


class DeepEpLowLatency:
    """The low-latency kernels of `Buffer`, which send a row for each expert: layout `batched`. Collective.

    One Buffer serves every size, because NVSHMEM is initialized once in a process.
    """

    def __init__(self, module: ModuleType, group: dist.ProcessGroup, case: RoundsCase) -> None:
        self._kind, self._group, self._case = module.Buffer, group, case

    @cached_property
    def _buffer(self) -> Any:
        most = max(filter(_fits, map(_room, self._case.tokens)))
        sizes = (most, self._case.hidden, self._group.size(), self._case.experts)
        nbytes, local = self._kind.get_low_latency_rdma_size_hint(*sizes), self._case.experts // self._group.size()
        return self._kind(self._group, 0, nbytes, low_latency_mode=True, num_qps_per_rank=local)

    def calls(self, ours: Ours) -> list[Timed]:
        """Return the timed calls for the size of `ours`; none where it is too large."""
        if not _fits(_room(ours.tokens)):
            return []
        self._clear(ours.buffer.device)
        experts, room = self._case.experts, _room(ours.tokens)
        # Its two buffers take turns. A call empties the counters of the next one.
        options: dict[str, Any] = {"by_expert": True, "period": 2}

        def dispatch(given: Input, fp8: bool) -> Any:
            return self._buffer.low_latency_dispatch(given.x, given.topk_idx, room, experts, use_fp8=fp8)

        found = [
            Timed(
                _about("dispatch", name, "batched", 0),
                [partial(dispatch, given, name == "fp8") for given in ours.inputs],
                **options,
            )
            for name in self._case.payloads
            if name in ("bf16", "fp8")
        ]
        # DeepEP lets nobody hold the rows of more than two calls.
        arrived = [(rows.clone(), handle) for rows, _, handle, *_ in (dispatch(given, False) for given in ours.inputs)]
        combines = [
            partial(self._buffer.low_latency_combine, rows, given.topk_idx, given.topk_weights, handle)
            for given, (rows, handle) in zip(ours.inputs, arrived, strict=True)
        ]
        return [*found, Timed(_about("combine", "", "batched", 0), combines, **options)]

    def _clear(self, device: torch.device) -> None:
        """Zero the memory, in which another size has its counters elsewhere. Collective."""
        for act in (lambda: None, self._buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True).zero_):
            act()
            if device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier(self._group)


def _room(tokens: int) -> int:
    return -(-tokens // _ROWS) * _ROWS


def _fits(tokens: int) -> bool:
    return tokens <= _LOW_LATENCY_TOKENS


class Elastic:
    """ElasticBuffer without a wait on the host: layout `flat`, and with its rows expanded `expert`. Collective.

    Its SMs are the number that it chooses where nothing overlaps, as in DeepEP's test, that of the intranode kernels,
    and those of moecomm's operations in this layout; a second kernel in each call takes all of them.  A dispatch does
    not copy the ids into its handle.
    """

    def __init__(self, module: ModuleType, group: dist.ProcessGroup, case: RoundsCase, ours: Ours) -> None:
        self._case, self._ours = case, ours
        sizes = {"num_max_tokens_per_rank": ours.tokens, "hidden": case.hidden, "num_topk": case.topk}
        self._buffer = module.ElasticBuffer(group, **sizes, prefer_overlap_with_compute=False)

    def calls(self) -> list[Timed]:
        """Return the timed calls."""
        usual = self._buffer.get_theoretical_num_sms(self._case.experts, self._case.topk), _TEST_SMS
        layouts = ["flat", "expert"] if "expert" in self._case.layouts else ["flat"]
        return [
            timed for layout in layouts for timed in self._with(layout, _sms(self._case, self._ours, layout, *usual))
        ]

    def _with(self, layout: str, settings: list[int]) -> list[Timed]:
        payloads = [_payloads(self._case, given) for given in self._ours.inputs]
        expand = layout == "expert"
        found = [
            Timed(
                _about("dispatch", name, layout, sms, ", ".join([*_cast(name), NOT_COPIED])),
                [
                    partial(self._dispatch, rows[name], given, expand, sms)
                    for rows, given in zip(payloads, self._ours.inputs, strict=True)
                ],
            )
            for sms in settings
            for name in payloads[0]
        ]
        arrived = [
            (rows, handle)
            for rows, _, _, handle, _ in (
                self._dispatch(given.x, given, expand, settings[0]) for given in self._ours.inputs
            )
        ]
        for sms in settings:
            combines = [partial(self._buffer.combine, rows, handle=handle, num_sms=sms) for rows, handle in arrived]
            found.append(Timed(_about("combine", "", layout, sms), combines))
        return found

    def _dispatch(self, x: Any, given: Input, expand: bool, sms: int) -> Any:
        return self._buffer.dispatch(
            x,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
            num_experts=self._case.experts,
            num_max_tokens_per_rank=self._ours.tokens,
            num_sms=sms,
            do_cpu_sync=False,
            do_expand=expand,
            do_handle_copy=False,
        )
