"""Common parts of prepare and finalize of both formats."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled

from moecomm import _native
from moecomm import combine as combining
from moecomm.dispatch.routed import Handle
from moecomm.errors import BadInput, Unsupported
from moecomm.integrations.vllm.managers import OpenedBuffers
from moecomm.rounds.call_count import counted

MICRO_BATCHES = 2


class Sent(NamedTuple):
    """A dispatch that finalize has not seen yet, and what must live until the stream of rounds has read it."""

    handle: Handle
    inputs: tuple[Any, ...]


class Slots:
    """The dispatch of each micro-batch: vLLM runs two of them in turns, each in a thread of its own."""

    def __init__(self) -> None:
        self._sent: list[Sent | None] = [None] * MICRO_BATCHES

    def put(self, sent: Sent) -> None:
        """Keep the dispatch of the micro-batch that runs."""
        self._sent[dbo_current_ubatch_id()] = sent

    def clear(self) -> None:
        """Forget all dispatches, so that the window has its memory back."""
        self._sent = [None] * MICRO_BATCHES

    def get(self) -> Handle:
        """The handle of the micro-batch that runs.  Raises BadInput before its dispatch."""
        sent: Sent | None = self._sent[dbo_current_ubatch_id()]
        if sent is None:
            raise BadInput("finalize", "no dispatch before it", "prepare first")
        return sent.handle


class BesideCaller:
    """Runner of rounds beside the caller's work, until the caller waits: on a stream of its own, on GPUs.

    Between micro-batches vLLM itself chooses streams; a round is then run where it is called, and so it is on CPUs.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def start(self, device: torch.device, run: Callable[[], object]) -> Callable[[], None]:
        """Start `run` next to other work and return a function that waits for it.

        The tensors that `run` reads must live until that function has been called.
        """
        if device.type != "cuda" or dbo_enabled():
            run()
            return nothing
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = self._stream
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()

        def wait() -> None:
            torch.cuda.current_stream(device).wait_stream(side)

        return wait


counted_by_pool = counted(attrgetter("_rounds.pool.calls"))  # decorates collective methods


class PrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """The answers to vLLM that both formats share."""

    def __init__(self, rounds: OpenedBuffers, num_dispatchers: int) -> None:
        super().__init__()
        self._rounds, self._num_dispatchers = rounds, num_dispatchers
        self._slots, self._beside = Slots(), BesideCaller()
        rounds.layers.add(self._slots)

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int64."""
        return torch.int64

    def num_dispatchers(self) -> int:
        """Ranks."""
        return self._num_dispatchers

    def output_is_reduced(self) -> bool:
        """True."""
        return True

    def supports_async(self) -> bool:
        """True."""
        return True

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        """Rows, scales, counts, ids and weights: see prepare_async().  Collective."""
        steps = self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        return _ended(steps)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """`output` `[T, H]` of the dtype of the rows, written in place, with the weights of prepare().  Collective."""
        steps = self.finalize_async(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )
        _ended(steps)


def _ended(steps: Any) -> Any:
    """Finish a call: `steps` is the function with the result, or a tuple of waits and that function."""
    *waits, result = steps if isinstance(steps, tuple) else (steps,)
    for wait in waits:
        wait()
    return result()


def nothing() -> None:
    """Do nothing: there is nothing to wait for."""


def apart(y: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return `y`, or a copy of it if it shares memory with `output`.

    Where shapes agree, vLLM's kernel lets experts write to `output`; combine reads `y` while it writes `output`.
    """
    return y.clone() if _native.share_memory(y, output) else y


def in_window(handle: Handle, dtype: torch.dtype) -> torch.Tensor | None:
    """Return rows for a combine to read where they are; None: there is no room for any, and combine copies them."""
    try:
        return combining.empty(handle.rounds, handle, dtype)
    except BadInput:
        return None


def weighted_input(x: torch.Tensor, topk_weights: torch.Tensor, apply: bool) -> torch.Tensor:
    """Return `x`, times the routing weight if it is applied before the experts; then topk is 1."""
    if not apply:
        return x
    if topk_weights.shape[1] != 1:
        raise Unsupported("apply_router_weight_on_input: with one expert a token only")
    return x * topk_weights.to(x.dtype)
