"""Rows to experts and home again where every expert is padded to its capacity: as many rows whatever the routing.

moecomm.ops in batched rows.  Nothing here waits for the device, so that graphs of CUDA hold both passes.
"""

from __future__ import annotations

from typing import Any

import torch

from moecomm import ops
from moecomm.base.choices import Quantize
from moecomm.buffer import Buffer
from moecomm.errors import Unsupported
from moecomm.integrations.megatron.buffers import PLAIN, Buffers, Formats, Key, Limits
from moecomm.integrations.megatron.exchange import ExpertDispatched
from moecomm.ranks.settings import Settings

_ROUNDS = 3  # that the window has room for: two that graphs keep to themselves, and one


class PaddedExchange(Buffers):
    """Dispatch by expert, and combine, between the ranks of a group, all with as many tokens.

    Args:
        group, num_experts, topk, limits: see Buffers.
    """

    def __init__(self, group: Any, num_experts: int, topk: int, limits: Limits) -> None:
        super().__init__(group, num_experts, topk, limits)
        self._buffers: dict[Key, tuple[Buffer, int]] = {}  # and for how many rows of an expert
        self._captured: list[Buffer] = []  # in whose windows a replay writes, also when there is a larger one

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        rows: int,
        formats: Formats = PLAIN,
    ) -> ExpertDispatched:
        """Collective.  Gradients: x and topk_weights.

        Args:
            x: `[T, H]`.
            topk_idx: int64 `[T, K]`, -1 picks none.
            topk_weights: floating `[T, K]`.
            rows: of each expert, on all ranks alike; the expert gets no more.
            formats: see there.

        Returns:
            Dispatched, with `rows` in every place of tokens_per_expert.

        Raises:
            As Buffer and moecomm.ops.dispatch; Unsupported for the first dispatch of so many tokens in a graph.
        """
        buffer = self._buffer(x, rows)
        about: dict[str, Any] = {"layout": "batched", "max_rows": rows, "num_sms": self.limits.num_sms}
        routed = ops.dispatch(buffer, x, topk_idx, topk_weights, quantize=formats.quantize, **about)
        assert routed.row_weights is not None
        counts = torch.full((len(routed.x),), rows, dtype=torch.int64)
        way = routed.handle, formats.grad_wire
        return ExpertDispatched(routed.x.flatten(0, 1), routed.row_weights.flatten(), counts, way)

    @staticmethod
    def combine(y: torch.Tensor, way: tuple[ops.Handle, Quantize | None]) -> torch.Tensor:
        """The sum of each token's rows, without weights: `[T, H]`.  Collective.  Gradient: y.

        Raises:
            As moecomm.ops.combine.
        """
        handle, grad_wire = way
        assert handle.row_weights is not None
        y = y.reshape(*handle.row_weights.shape, y.shape[-1])
        if y.requires_grad:  # schedules cut y off from the dispatch: see exchange.py
            handle = handle._replace(graph=None)
        return ops.combine(y, handle, weighted=False, wire=y.dtype, grad_wire=grad_wire)

    def _buffer(self, x: torch.Tensor, rows: int) -> Buffer:
        """Return a Buffer with room for `x` and `rows`.  All ranks have as many tokens, and enlarge it together."""
        key, ranks = (x.shape[1], x.dtype, x.device), self._ranks.ranks
        tokens = max(1, len(x), -(-rows // ranks))
        buffer, room = self._buffers.get(key, (None, 0))
        if buffer is None or buffer.closed:
            most = max(tokens, self.limits.max_tokens or 1)
        elif tokens > buffer.max_tokens or rows > room:
            most = max(tokens, buffer.max_tokens + buffer.max_tokens // 4)
        else:
            if buffer.rounds.session.capturing() and buffer not in self._captured:
                self._captured.append(buffer)
            return buffer
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported(f"a graph whose capture is the first pass of {len(x)} tokens: run one before it")

        def room_of(settings: Settings) -> int:
            return -(-rows * settings.max_tokens // tokens)

        def window(settings: Settings) -> int:
            return -(-_ROUNDS * settings.round_bytes("batched", room_of(settings)) // 4096) * 4096

        buffer = self._open(key, most, window)
        self._buffers[key] = buffer, room_of(buffer.rounds.settings)
        return buffer
