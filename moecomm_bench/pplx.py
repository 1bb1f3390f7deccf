"""pplx-kernels, Perplexity's all-to-all inside a host, on the same rows, where it is installed: pairs alone.

Dispatch appends to a list of rows that combine sends back and empties, so that calls must alternate: neither is timed
by itself. A failed check of the library itself ends the process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moecomm.dispatch.reference import quantize
from moecomm.errors import Unsupported
from moecomm_bench.case import QUANT_GROUP, RoundsCase
from moecomm_bench.clock import Timed
from moecomm_bench.ours import Input, Ours

NAME = "pplx"
# Its published times have no more. A block that sends a second token overwrites the first in shared memory without a
# barrier, so there must not be more tokens than SMs, either.
_MOST_TOKENS = 128
_COLUMNS = 16  # of a multiple: rows travel in words of 16 bytes
_SCALES = 4  # of a multiple, likewise


class Pplx:
    """Its all-to-all, opened for each payload of a size, closed when the next size is opened. Collective.

    Rows are those of layout "batched": one for each (token, expert), in the slots of their expert.
    """

    def __init__(self, case: RoundsCase) -> None:
        self._case = case
        self._open: list[PplxExchange] = []
        self.version = ""

    def ways(self) -> dict[str, Callable[[Ours], list[Timed]]]:
        """Return the all-to-all by name; it returns the timed calls for the size of `ours`."""
        return {NAME: self._calls} if "batched" in self._case.layouts else {}

    def _calls(self, ours: Ours) -> list[Timed]:
        kind = self._kind()
        self._close(ours.buffer.device)
        if ours.tokens > _most_tokens(ours.buffer.device):
            return []
        about = {"what": "pair", "layout": "batched", "sms": 0, "version": self.version}
        found = []
        for payload in self._case.payloads:
            if payload in ("bf16", "fp8"):
                exchange = PplxExchange(kind, self._case, payload, ours.tokens, ours.buffer.device)
                self._open.append(exchange)
                pairs = [exchange.pair(given) for given in ours.inputs]
                found.append(Timed({**about, "payload": payload}, pairs, by_expert=True))
        return found

    def _kind(self) -> Any:
        """Return the class of its all-to-all. Raises Unsupported where it is not installed or does not fit."""
        try:
            package = importlib.import_module("pplx_kernels")
            self.version = importlib.metadata.version("pplx-kernels")
        except Exception as error:
            raise Unsupported(f"{NAME}: can't be imported ({error})") from error
        if not hasattr(package.ops._ops, "all_to_all_intranode_create"):  # its import only logs that
            raise Unsupported(f"{NAME}: its library can't be loaded")
        if self._case.ranks < 2 or self._case.hidden % _COLUMNS:
            sizes = f"{self._case.ranks} ranks and {self._case.hidden} columns"
            raise Unsupported(f"{NAME}: takes at least 2 ranks and a multiple of {_COLUMNS} columns, not {sizes}")
        return package.AllToAll

    def _close(self, device: torch.device) -> None:
        """Close what is open, once no rank uses it."""
        if not self._open:
            return
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        for exchange in self._open:
            exchange.all_to_all.destroy()
        self._open = []


def _most_tokens(device: torch.device) -> int:
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _MOST_TOKENS
    return min(_MOST_TOKENS, sms)


class PplxExchange:
    """The all-to-all of one payload and size, and memory for the rows that arrive, which all inputs share. Collective.

    Attributes:
        counts: rows that have arrived, by local expert.
        rows, scales: slots by local expert, `[L, R * T, ...]`; no scales of bf16.
    """

    def __init__(self, kind: Any, case: RoundsCase, payload: str, tokens: int, device: torch.device) -> None:
        self.payload, local, slots = payload, case.experts // case.ranks, case.ranks * tokens
        cast = payload == "fp8"
        groups = -(-case.hidden // (QUANT_GROUP * _SCALES)) * _SCALES
        self.counts = torch.empty(local, dtype=torch.int32, device=device)
        dtype = torch.float8_e4m3fn if cast else torch.bfloat16
        self.rows = torch.empty(local, slots, case.hidden, dtype=dtype, device=device)
        self.scales = torch.empty(local, slots, groups, dtype=torch.float32, device=device) if cast else None
        ranks = dist.group.WORLD
        assert ranks is not None
        self.all_to_all = kind.intranode(
            max_num_tokens=tokens,
            num_experts=case.experts,
            experts_per_token=case.topk,
            rank=ranks.rank(),
            world_size=case.ranks,
            dp_size=1,
            hidden_dim=case.hidden,
            hidden_dim_bytes=case.hidden * dtype.itemsize,
            hidden_dim_scale_bytes=4 * groups if cast else 0,
            group_name=ranks.group_name,
        )

    def pair(self, given: Input) -> Callable[[], torch.Tensor]:
        """Return a dispatch and a combine of an input.

        Rows in FP8 are cast in advance, as for DeepEP. Then other rows in bf16 are combined, where experts would have
        left theirs: values do not matter, because the order of rows of an expert differs from call to call.
        """
        ids, out = given.topk_idx.to(torch.uint32), torch.empty_like(given.x)
        rows, scales, y = given.x, None, self.rows
        if self.scales is not None:
            rows, narrow = quantize(given.x)
            scales = torch.nn.functional.pad(narrow, (0, self.scales.shape[2] - narrow.shape[1]))
            y = torch.randn(self.rows.shape, dtype=torch.bfloat16, device=given.x.device)

        def run() -> torch.Tensor:
            self.all_to_all.dispatch(
                out_expert_num_tokens=self.counts,
                out_expert_x=self.rows,
                out_expert_x_scale=self.scales,
                dp_x=rows,
                dp_x_scale=scales,
                indices=ids,
                bound_m=None,
            )
            self.all_to_all.combine(out_tokens=out, indices=ids, weights=given.topk_weights, expert_y=y, bound_m=None)
            return out

        return run
