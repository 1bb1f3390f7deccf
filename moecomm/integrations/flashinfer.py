"""moecomm as a communication backend of FlashInfer's moe_ep (checked against 0.7.2), by its registry.

    import moecomm.integrations.flashinfer  # registers "moecomm"

    comm = flashinfer.moe_ep.create_communication(bootstrap, params, "moecomm")

or, in its layers, `SplitConfig(comm="moecomm")`.  Unquantized rows of `params.token_dtype`, and float8_e4m3fn rows with
scales of any kind beside them; other quantized rows, and `eplb_local_stats`, are Unsupported.  Ranks are masked by
`active_rank_mask`, as in its one-sided all-to-all, and by the calls of its Fleet (flashinfer_masks.py).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import flashinfer
import torch

from moecomm.base.choices import BackendName, OnTimeout
from moecomm.buffer import Buffer
from moecomm.errors import BadInput, Closed, Unsupported
from moecomm.integrations.flashinfer_masks import MaskedRanks, active_ranks
from moecomm.ops.counted import counted
from moecomm.routed import Handle

try:
    from flashinfer.moe_ep import MoEEpCommunication, MoEEpDispatchResult, register_communication
except ImportError as error:
    found = getattr(flashinfer, "__version__", "this version")
    raise Unsupported(
        f"flashinfer {found} has no registry of communication backends ({error}): install flashinfer-python 0.7.2 or "
        "later, which has flashinfer.moe_ep.register_communication"
    ) from error

_TIMEOUT_S = 600.0  # ranks drift apart by whatever one of them does alone: loading weights, compiling kernels


@register_communication("moecomm")  # type: ignore[untyped-decorator,unused-ignore]
class Communication(MaskedRanks, MoEEpCommunication):  # type: ignore[misc]
    """Rank-major dispatch and combine over moecomm's flat layout.  In CUDA graphs too: nothing waits on the host.

    Args:
        bootstrap: BootstrapConfig; its `process_group`, or the default group, has the ranks.
        params: MoEEpCommParams.
        moecomm_backend, timeout_s, window_bytes, on_timeout: of the Buffer, whose `backend` is the first.
    """

    supports_cuda_graph: ClassVar[bool] = True

    def __init__(
        self,
        bootstrap: Any,
        params: Any,
        *,
        moecomm_backend: BackendName = "auto",
        timeout_s: float = _TIMEOUT_S,
        window_bytes: int | None = None,
        on_timeout: OnTimeout = "raise",
    ) -> None:
        super().__init__(bootstrap, params)
        group = bootstrap.process_group
        if group is None:
            group = torch.distributed.group.WORLD if bootstrap.world_size > 1 else "self"
        self._buffer: Buffer | None = Buffer(
            group,
            hidden=params.hidden_size,
            num_experts=params.num_experts,
            topk=params.top_k,
            max_tokens=params.max_tokens_per_rank,
            dtype=params.token_dtype,
            backend=moecomm_backend,
            timeout_s=timeout_s,
            window_bytes=window_bytes,
            capacity_factor=math.inf,  # results have `ep_size * max_tokens_per_rank` rows, whatever the routing
            on_timeout=on_timeout,
        )
        self._handle: Handle | None = None

    @classmethod
    def is_platform_supported(cls) -> bool:
        """True: what a backend lacks is told when it opens."""
        return True

    @counted("self", 0)
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> Any:
        """Rows first, in the order of source ranks and their tokens; behind them, rows with no expert.  Collective.

        `runtime_max_tokens_per_rank`: another name of `max_tokens_per_rank`.  `active_rank_mask`: uint64 `[1]` on the
        CPU, one bit for each rank that takes part, alike on all of these; a rank of which the bit is set again makes
        this call, too.  None: those of the call before.

        Raises:
            As Buffer.dispatch.
        """
        buffer = self._open()
        if self._handle is not None:
            raise BadInput("dispatch", "a second one", "the combine of the first")
        if eplb_local_stats is not None:
            raise Unsupported("eplb_local_stats: statistics are not gathered")
        if hidden_states.dtype not in (self.params.token_dtype, torch.float8_e4m3fn):
            raise Unsupported(f"rows of {hidden_states.dtype}: {self.params.token_dtype}, or float8_e4m3fn with scales")
        if max_tokens_per_rank is None:
            max_tokens_per_rank = runtime_max_tokens_per_rank
        most = self.params.max_tokens_per_rank if max_tokens_per_rank is None else max_tokens_per_rank
        if not max(1, len(hidden_states)) <= most <= self.params.max_tokens_per_rank:
            least, limit = max(1, len(hidden_states)), self.params.max_tokens_per_rank
            raise BadInput("max_tokens_per_rank", most, f"{least} to {limit}")
        if active_rank_mask is not None:
            self.follow(active_ranks(active_rank_mask, self.ep_size))
        weights = None if topk_weights is None else topk_weights.float().contiguous()
        routed = buffer.dispatch(
            hidden_states.contiguous(),
            topk_ids.contiguous(),
            weights,
            layout="flat",
            scales=None if hidden_states_scale is None else hidden_states_scale.contiguous(),
            max_rows=self.ep_size * most,
            sync=False,
        )
        self._handle = routed.handle
        local, arrived = routed.topk_idx, routed.topk_weights
        assert local is not None and arrived is not None
        row = torch.arange(len(local), dtype=torch.int32, device=local.device)
        here = (row < routed.num_rows).unsqueeze(1) & (local >= 0)
        ids = torch.where(here, local + buffer.local_experts.start, self.params.invalid_expert_id)
        return MoEEpDispatchResult(
            hidden_states=routed.x,
            topk_ids=ids.to(topk_ids.dtype),
            topk_weights=None if topk_weights is None else torch.where(here, arrived, 0.0).to(topk_weights.dtype),
            tokens_per_rank=most,
            hidden_states_scale=routed.scales,
        )

    @counted("self", 0)
    def combine(
        self,
        expert_output: torch.Tensor,
        *,
        output: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[T, H]`: the sum of each token's rows, in float32 in a fixed order, rounded once.  Collective.

        `active_rank_mask`: that of the dispatch.

        Raises:
            As Buffer.combine.
        """
        buffer = self._open()
        if self._handle is None:
            raise BadInput("combine", "no dispatch before it", "one combine to a dispatch")
        if active_rank_mask is not None and active_ranks(active_rank_mask, self.ep_size) != self.active():
            raise BadInput("active_rank_mask", active_rank_mask.tolist(), "that of the dispatch")
        handle, self._handle = self._handle, None
        out: torch.Tensor = buffer.combine(expert_output.reshape(handle.y_shape), handle, out=output)
        return out

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor | None:
        """`[ranks * tokens_per_rank, H]` in the window: combine reads it where it is."""
        if self._handle is None:
            raise BadInput("get_combine_input_buffer", "no dispatch before it", "it between dispatch and combine")
        return self._open().empty(self._handle, dtype)

    def destroy(self) -> None:
        """Give the memory back.  Idempotent."""
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = self._handle = None

    def _open(self) -> Buffer:
        if self._buffer is None:
            raise Closed("communication")
        return self._buffer
