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

from moecomm.bench.case import QUANT_GROUP, Case
from moecomm.bench.clock import Timed
from moecomm.bench.exchange import nccl_group
from moecomm.bench.ours import Input, Ours

Dispatch = Callable[[Any, Input], Any]
_SMS = 24  # as in DeepEP's own tests
_LOW_LATENCY_TOKENS = 511


def module() -> ModuleType | None:
    """Return the package, or None where it is not installed or does not load."""
    try:
        return importlib.import_module("deep_ep")
    except (ImportError, OSError):
        return None


class DeepEP:
    """DeepEP's Buffers, created for one size at a time. Collective."""

    name = "deep_ep"

    def __init__(self, case: Case) -> None:
        found = module()
        assert found is not None
        self._case, self._module = case, found

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        return nccl_group()

    def ways(self) -> dict[str, Callable[[Ours], list[Timed]]]:
        """Return the available interfaces by name; each returns the timed calls for the size of `ours`."""
        found: dict[str, Callable[[Ours], list[Timed]]] = {}
        if hasattr(self._module, "Buffer"):
            found |= {"deep_ep": self._normal, "deep_ep low-latency": self._low_latency}
        if hasattr(self._module, "ElasticBuffer"):
            found["deep_ep elastic"] = self._elastic
        return found

    def _about(self, what: str, payload: str, layout: str, sms: int) -> dict[str, Any]:
        return {"what": what, "payload": payload if what == "dispatch" else "", "layout": layout, "sms": sms}

    def _payloads(self, given: Input) -> dict[str, Any]:
        """Return rows by payload. DeepEP's kernels for many tokens take float8 rows that are already cast."""
        groups = given.x.float().view(len(given.x), -1, QUANT_GROUP)
        scales = groups.abs().amax(dim=2).clamp(min=1e-4) / 448.0
        cast = (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(len(given.x), -1)
        known = {"bf16": given.x, "fp8": (cast, scales)}
        return {name: known[name] for name in self._case.payloads if name in known}

    def _many(self, ours: Ours, dispatch: Dispatch, combine: Callable[[Any, Any], Any], *, graph: bool) -> list[Timed]:
        """Time both calls of an interface for many tokens. `graph`: its dispatch can be captured."""
        payloads = [self._payloads(given) for given in ours.inputs]
        found = [
            Timed(
                self._about("dispatch", name, "flat", _SMS),
                [partial(dispatch, rows[name], given) for rows, given in zip(payloads, ours.inputs, strict=True)],
                graph=graph,
            )
            for name in payloads[0]
        ]
        arrived = [dispatch(given.x, given) for given in ours.inputs]
        combines = [partial(combine, rows, handle) for rows, *_, handle, _ in arrived]
        return [*found, Timed(self._about("combine", "", "flat", _SMS), combines)]

    def _normal(self, ours: Ours) -> list[Timed]:
        """Time layout plus dispatch, because a caller's dispatch needs both, and combine."""
        kind = self._module.Buffer
        kind.set_num_sms(_SMS)
        ranks, hidden_bytes = self._group.size(), 2 * self._case.hidden
        configs = (kind.get_dispatch_config(ranks), kind.get_combine_config(ranks))
        nbytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs)
        buffer, experts = kind(self._group, nbytes, 0), self._case.experts

        def dispatch(x: Any, given: Input) -> Any:
            to_rank, _, to_expert, is_in_rank, _ = buffer.get_dispatch_layout(given.topk_idx, experts)
            counts = {
                "num_tokens_per_rank": to_rank,
                "num_tokens_per_expert": to_expert,
                "is_token_in_rank": is_in_rank,
            }
            return buffer.dispatch(x, topk_idx=given.topk_idx, topk_weights=given.topk_weights, **counts)

        # DeepEP's dispatch waits on the host for counts, which would never arrive during a capture.
        return self._many(ours, dispatch, buffer.combine, graph=False)

    def _low_latency(self, ours: Ours) -> list[Timed]:
        """Time the low-latency calls, which send a row for each expert: like `batched`."""
        if ours.tokens > _LOW_LATENCY_TOKENS:
            return []
        kind, experts = self._module.Buffer, self._case.experts
        sizes = (ours.tokens, self._case.hidden, self._group.size(), experts)
        local = experts // self._group.size()
        nbytes = kind.get_low_latency_rdma_size_hint(*sizes)
        buffer = kind(self._group, 0, nbytes, low_latency_mode=True, num_qps_per_rank=local)

        def dispatch(given: Input, fp8: bool) -> Any:
            return buffer.low_latency_dispatch(given.x, given.topk_idx, ours.tokens, experts, use_fp8=fp8)

        found = [
            Timed(
                self._about("dispatch", name, "batched", 0),
                [partial(dispatch, given, name == "fp8") for given in ours.inputs],
                by_expert=True,
            )
            for name in self._case.payloads
            if name in ("bf16", "fp8")
        ]
        # Its two receive buffers alternate, so the rows of an input are copied before the next dispatch but one.
        arrived = [(rows.clone(), handle) for rows, _, handle, *_ in (dispatch(given, False) for given in ours.inputs)]
        combines = [
            partial(buffer.low_latency_combine, rows, given.topk_idx, given.topk_weights, handle)
            for given, (rows, handle) in zip(ours.inputs, arrived, strict=True)
        ]
        return [*found, Timed(self._about("combine", "", "batched", 0), combines, by_expert=True)]

    def _elastic(self, ours: Ours) -> list[Timed]:
        sizes = {"num_max_tokens_per_rank": ours.tokens, "hidden": self._case.hidden, "num_topk": self._case.topk}
        buffer = self._module.ElasticBuffer(self._group, **sizes)
        experts, most = self._case.experts, ours.tokens

        def dispatch(x: Any, given: Input) -> Any:
            routing = {"topk_idx": given.topk_idx, "topk_weights": given.topk_weights, "num_experts": experts}
            return buffer.dispatch(x, **routing, num_max_tokens_per_rank=most, num_sms=_SMS, do_cpu_sync=False)

        def combine(rows: Any, handle: Any) -> Any:
            return buffer.combine(rows, handle=handle, num_sms=_SMS)

        return self._many(ours, dispatch, combine, graph=True)
