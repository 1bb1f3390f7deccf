"""Adapter of moecomm for the EP benchmark of CollectiveX (SemiAnalysisAI/InferenceX, experimental/CollectiveX).

It goes into the folder `bench` there; README.md beside this file says what else to add.

normal: rows of `flat`, one for each (token, rank); combine adds them without weights. low-latency: rows of `batched`,
one for each (token, expert); combine multiplies them by the weights that the dispatch has carried. FP8: a BF16 dispatch
casts rows on the way, with a scale for each 128 columns, and `stage` makes them BF16 again. A combine is in BF16.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from ep_backend import EPBackend

import moecomm
from moecomm import formats
from moecomm.formats import FORMATS


class MoecommBackend(EPBackend):
    """A moecomm Buffer as a backend of CollectiveX."""

    name = "moecomm"
    maturity = "candidate"
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16", "fp8")

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        super().__init__(args, rank, world_size, local_rank, device)
        self.group: Any = dist.group.WORLD
        self.local_experts = args.experts // world_size
        self.layout, self.wire = "flat", None
        self.fp8 = self.precision == "fp8"
        if self.mode == "low-latency":
            self.layout = "batched"
            self.receive_layout, self.combine_weight_semantics = "token-expert", "weighted-kernel-sum"
            # Its model adds a token's rows in float32. Sums that travel in BF16 miss its tolerance now and then.
            self.wire = "exact"
        self.kernel_generation = f"moecomm-{self.layout}"
        if self.fp8:
            self.stage_device_work = True
            self.dispatch_dtype, self.dispatch_value_bytes = "fp8-e4m3fn", 1
            self.dispatch_scale_bytes_per_copy = 4 * FORMATS["fp8"].scale_columns(args.hidden)

    def create_buffer(self, spec: Any) -> None:
        """Open the Buffer. Collective."""
        domain = int(self.args.scale_up_domain)
        self.buffer = moecomm.Buffer(
            self.group,
            hidden=self.args.hidden,
            num_experts=self.args.experts,
            topk=self.args.topk,
            max_tokens=spec.max_tokens_per_rank,
            device=self.device,
            domain_ranks=domain if domain < self.world_size else None,
        )

    def semantic_payload(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows that arrive, in BF16."""
        if not self.fp8:
            return x
        return formats.dequantize(*formats.quantize(x, "fp8"), "fp8", dtype=x.dtype)

    def dispatch(self, problem: Any) -> Any:
        """Dispatch. The host does not wait for GPUs."""
        cast = {"quantize": "fp8"} if self.fp8 else {}
        routed = self.buffer.dispatch(
            problem.dispatch_x, problem.topk_idx, problem.topk_weights, layout=self.layout, **cast
        )
        return types.SimpleNamespace(routed=routed)

    def stage(self, problem: Any, handle: Any) -> None:
        """Let the experts' rows be those that arrived: where they lie, or from FP8 in the window."""
        handle.combine_input = self._rows(handle)

    def combine(self, problem: Any, handle: Any) -> torch.Tensor:
        """Combine the rows that are staged."""
        return self._combined(handle.combine_input, handle)

    def recv_tokens(self, handle: Any) -> int:
        """Return the number of rows that arrived."""
        return int(handle.routed.num_rows)

    def inspect_dispatch(self, problem: Any, handle: Any) -> Any:
        """Return the rows that arrived, their experts and weights, and the rows of each expert."""
        routed, first = handle.routed, self.rank * self.local_experts
        counts = routed.tokens_per_expert.long()
        used = self._used(handle)
        payload = self._rows(handle)[used]
        if self.layout == "batched":
            experts = first + used.nonzero()[:, 0]
            return types.SimpleNamespace(payload=payload, expert_ids=experts, local_expert_counts=counts)
        local = routed.topk_idx[used].long()
        experts, weights = torch.where(local >= 0, local + first, local), routed.topk_weights[used]
        return types.SimpleNamespace(payload=payload, expert_ids=experts, weights=weights, local_expert_counts=counts)

    def combine_transformed(self, problem: Any, handle: Any, transformed: torch.Tensor) -> torch.Tensor:
        """Combine rows in the order of inspect_dispatch."""
        rows = self.buffer.empty(handle.routed.handle).zero_()
        rows[self._used(handle)] = transformed.to(rows.dtype)
        return self._combined(rows, handle)

    def finalize(self, rc: int) -> int:
        """Close the Buffer, and end the process group."""
        self.buffer.close()
        ended: int = super().finalize(rc)
        return ended

    def _combined(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        combined: torch.Tensor = self.buffer.combine(rows, handle.routed.handle, wire=self.wire)
        return combined

    def _used(self, handle: Any) -> torch.Tensor:
        """Return which rows have arrived: [rows], batched [experts of the rank, rows]."""
        routed = handle.routed
        counts = routed.tokens_per_expert if self.layout == "batched" else routed.num_rows
        places = torch.arange(routed.x.shape[-2], device=counts.device)
        used = places < counts[:, None]
        return used if self.layout == "batched" else used[0]

    def _rows(self, handle: Any) -> torch.Tensor:
        """Return the rows that arrived, in BF16."""
        routed = handle.routed
        if not self.fp8:
            rows: torch.Tensor = routed.x
            return rows
        given, scales = routed.x.flatten(0, -2), routed.scales.flatten(0, -2)
        wide = formats.dequantize(given, scales, "fp8", dtype=torch.bfloat16)
        return self.buffer.empty(routed.handle).copy_(wide.view(*routed.x.shape[:-1], -1))
