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
from moecomm.bench.ours import Ours

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

    def _about(self, ours: Ours, what: str, payload: str, layout: str, sms: int) -> dict[str, Any]:
        row = self._case.row_bytes(payload) if what == "dispatch" else 2 * self._case.hidden
        by_expert = layout == "batched"  # DeepEP's low-latency kernels send one row for each expert
        moved = row + (self._case.beside_bytes(layout) if what == "dispatch" else 0)
        return {
            "what": what,
            "payload": payload if what == "dispatch" else "",
            "layout": layout,
            "sms": sms,
            "wire_bytes": ours.traffic.wire(by_expert=by_expert) * moved,
            "logical_bytes": ours.traffic.logical(layout) * row,
        }

    def _payloads(self, ours: Ours) -> dict[str, Any]:
        """Return rows by payload. DeepEP's kernels for many tokens take float8 rows that are already cast."""
        groups = ours.x.float().view(ours.tokens, -1, QUANT_GROUP)
        scales = groups.abs().amax(dim=2).clamp(min=1e-4) / 448.0
        cast = (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(ours.tokens, -1)
        known = {"bf16": ours.x, "fp8": (cast, scales)}
        return {name: known[name] for name in self._case.payloads if name in known}

    def _normal(self, ours: Ours) -> list[Timed]:
        """Time layout plus dispatch, because a caller's dispatch needs both, and combine."""
        kind = self._module.Buffer
        kind.set_num_sms(_SMS)
        ranks, hidden_bytes = self._group.size(), 2 * self._case.hidden
        configs = (kind.get_dispatch_config(ranks), kind.get_combine_config(ranks))
        nbytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs)
        buffer, experts = kind(self._group, nbytes, 0), self._case.experts

        def dispatch(x: Any) -> Any:
            to_rank, _, to_expert, is_in_rank, _ = buffer.get_dispatch_layout(ours.topk_idx, experts)
            counts = {
                "num_tokens_per_rank": to_rank,
                "num_tokens_per_expert": to_expert,
                "is_token_in_rank": is_in_rank,
            }
            return buffer.dispatch(x, topk_idx=ours.topk_idx, topk_weights=ours.weights, **counts)

        arrived, *_, handle, _ = dispatch(ours.x)
        # DeepEP's dispatch waits on the host for counts, which would never arrive during a capture.
        found = [
            Timed(self._about(ours, "dispatch", name, "flat", _SMS), partial(dispatch, x), graph=False)
            for name, x in self._payloads(ours).items()
        ]
        found.append(Timed(self._about(ours, "combine", "", "flat", _SMS), partial(buffer.combine, arrived, handle)))
        return found

    def _low_latency(self, ours: Ours) -> list[Timed]:
        if ours.tokens > _LOW_LATENCY_TOKENS:
            return []
        kind, experts = self._module.Buffer, self._case.experts
        sizes = (ours.tokens, self._case.hidden, self._group.size(), experts)
        local = experts // self._group.size()
        nbytes = kind.get_low_latency_rdma_size_hint(*sizes)
        buffer = kind(self._group, 0, nbytes, low_latency_mode=True, num_qps_per_rank=local)

        def dispatch(fp8: bool) -> Any:
            return buffer.low_latency_dispatch(ours.x, ours.topk_idx, ours.tokens, experts, use_fp8=fp8)

        rows, _, handle, *_ = dispatch(False)
        found = [
            Timed(self._about(ours, "dispatch", name, "batched", 0), partial(dispatch, name == "fp8"))
            for name in self._case.payloads
            if name in ("bf16", "fp8")
        ]
        bring = partial(buffer.low_latency_combine, rows, ours.topk_idx, ours.weights, handle)
        found.append(Timed(self._about(ours, "combine", "", "batched", 0), bring))
        return found

    def _elastic(self, ours: Ours) -> list[Timed]:
        sizes = {"num_max_tokens_per_rank": ours.tokens, "hidden": self._case.hidden, "num_topk": self._case.topk}
        buffer = self._module.ElasticBuffer(self._group, **sizes)
        routing = {"topk_idx": ours.topk_idx, "topk_weights": ours.weights, "num_experts": self._case.experts}
        known = {**routing, "num_max_tokens_per_rank": ours.tokens, "num_sms": _SMS, "do_cpu_sync": False}

        def dispatch(x: Any) -> Any:
            return buffer.dispatch(x, **known)

        arrived, _, _, handle, _ = dispatch(ours.x)
        found = [
            Timed(self._about(ours, "dispatch", name, "flat", _SMS), partial(dispatch, x))
            for name, x in self._payloads(ours).items()
        ]
        bring = partial(buffer.combine, arrived, handle=handle, num_sms=_SMS)
        found.append(Timed(self._about(ours, "combine", "", "flat", _SMS), bring))
        return found
