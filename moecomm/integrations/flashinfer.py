"""moecomm as a communication backend of FlashInfer's moe_ep (checked against 0.7.2), by its registry.

    import moecomm.integrations.flashinfer  # registers "moecomm"

    comm = flashinfer.moe_ep.create_communication(bootstrap, params, "moecomm")

or, in its layers, `SplitConfig(comm="moecomm")`.  Rows of any dtype, with or without scales; dispatch_payloads() takes
any list of tensors.  Ranks are masked by `active_rank_mask`, as in its one-sided all-to-all, and by the calls of its
Fleet (flashinfer_masks.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import flashinfer
import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.choices import BackendName, OnTimeout, Wire
from moecomm.base.experts import experts_of
from moecomm.base.validation import check_flag
from moecomm.buffer import Buffer
from moecomm.dispatch.routed import Handle, Routed
from moecomm.errors import BadInput, Closed, Unsupported
from moecomm.integrations.flashinfer_masks import MaskedRanks, active_ranks
from moecomm.ops.counted import counted

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
        use_low_precision_combine: of NVLinkOneSidedConfig: results travel in FP8 with a scale for 128 columns, and are
            added in float32.

    Attributes:
        eplb_gathered_stats: int32 `[ranks, n]`, what all ranks passed as `eplb_local_stats` to the last dispatch; zeros
            of masked ranks.  None: they passed none.
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
        use_low_precision_combine: bool = False,
    ) -> None:
        check_flag("use_low_precision_combine", use_low_precision_combine)
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
        self.eplb_gathered_stats: torch.Tensor | None = None
        self._wire: Wire | None = "fp8" if use_low_precision_combine else None
        self._everybody = _an_expert_of_each_rank(self._buffer)
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

        `hidden_states` `[T, n]` and `hidden_states_scale` `[T, ...]` have any dtypes with elements of 1, 2 or 4 bytes:
        a row of FP8, INT8 or packed FP4 as well as one of `params.token_dtype`, with at most as many bytes.
        `runtime_max_tokens_per_rank`: another name of `max_tokens_per_rank`.  `active_rank_mask`: uint64 `[1]` on the
        CPU, one bit for each rank that takes part, alike on all of these; a rank of which the bit is set again makes
        this call, too.  None: those of the call before.  `eplb_local_stats`: int32 `[n]`, n up to the number of
        experts, on all ranks or none; a round more gathers them.

        Raises:
            As Buffer.dispatch.
        """
        if max_tokens_per_rank is None:
            max_tokens_per_rank = runtime_max_tokens_per_rank
        most = self.params.max_tokens_per_rank if max_tokens_per_rank is None else max_tokens_per_rank
        weights = None if topk_weights is None else topk_weights.float().contiguous()
        routed = self._route(
            hidden_states, topk_ids, weights, hidden_states_scale, (), most, eplb_local_stats, active_rank_mask
        )
        local, arrived, scales = routed.topk_idx, routed.topk_weights, routed.scales
        assert local is not None and arrived is not None
        if scales is not None and hidden_states_scale is not None:
            scales = scales.reshape(len(scales), *hidden_states_scale.shape[1:])
        here = _in_use(routed).unsqueeze(1) & (local >= 0)
        ids = torch.where(here, local + self._open().rounds.local_experts.start, self.params.invalid_expert_id)
        return MoEEpDispatchResult(
            hidden_states=routed.x.view(hidden_states.dtype),
            topk_ids=ids.to(topk_ids.dtype),
            topk_weights=None if topk_weights is None else torch.where(here, arrived, 0.0).to(topk_weights.dtype),
            tokens_per_rank=most,
            hidden_states_scale=scales,
            eplb_gathered_stats=self.eplb_gathered_stats,
        )

    @counted("self", 0)
    def dispatch_payloads(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: Sequence[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """MoeAlltoAll.dispatch: any tensors `[T, ...]` of 1-, 2-, 4- or 8-byte elements.  Collective.

        A row of the first has at most as many bytes as one of `params.token_dtype`, and no elements of 8.  combine()
        ends the round.

        Returns:
            `[ranks, runtime_max_tokens_per_rank, ...]` of each.  Taken as one dimension, the first two have the rows
            that arrived first, in the order of dispatch(): ranks have no places of their own.  In the rows behind them
            the payload of `expert_id_payload_index` is `invalid_token_expert_id`, where both are given.

        Raises:
            As Buffer.dispatch.
        """
        payloads = list(input_payloads)
        if not payloads or any(not isinstance(payload, torch.Tensor) or payload.ndim == 0 for payload in payloads):
            raise BadInput("input_payloads", f"{len(payloads)} items", "tensors [tokens, ...], one or more")
        at, most, first = expert_id_payload_index, runtime_max_tokens_per_rank, payloads[0]
        if invalid_token_expert_id is not None and at not in range(len(payloads)):
            want = f"0 to {len(payloads) - 1}, the place of ids, beside invalid_token_expert_id"
            raise BadInput("expert_id_payload_index", at, want)
        others = tuple(payloads[1:])
        routed = self._route(
            _by_row(first), token_selected_experts, None, None, others, most, eplb_local_stats, active_rank_mask
        )
        x = routed.x.view(first.dtype)
        found = [x.reshape(len(x), *first.shape[1:]), *routed.extras]
        if invalid_token_expert_id is not None and at is not None:
            in_use = _in_use(routed).view(-1, *[1] * (found[at].ndim - 1))
            found[at] = torch.where(in_use, found[at], invalid_token_expert_id)
        return [tensor.contiguous().unflatten(0, (self.ep_size, most)) for tensor in found]

    def _route(
        self,
        rows: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        extras: tuple[torch.Tensor, ...],
        most: int,
        stats: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> Routed:
        buffer = self._open()
        if self._handle is not None:
            raise BadInput("dispatch", "a second one", "the combine of the first")
        if not max(1, len(rows)) <= most <= self.params.max_tokens_per_rank:
            least, limit = max(1, len(rows)), self.params.max_tokens_per_rank
            raise BadInput("max_tokens_per_rank", most, f"{least} to {limit}")
        if mask is not None:
            self.follow(active_ranks(mask, self.ep_size))
        if scales is None and rows.dtype is torch.float8_e4m3fn:
            rows = rows.view(torch.uint8)  # a scale of all rows does not travel
        self.eplb_gathered_stats = None if stats is None else self._gathered(buffer, stats)
        routed = buffer.dispatch(
            rows.contiguous(),
            topk_ids.contiguous(),
            weights,
            layout="flat",
            scales=None if scales is None else _by_row(scales).contiguous(),
            extras=extras,
            max_rows=self.ep_size * most,
            sync=False,
        )
        self._handle = routed.handle
        return routed

    def _gathered(self, buffer: Buffer, stats: torch.Tensor) -> torch.Tensor:
        """Return int32 `[ranks, n]`, by a round in which each rank sends its row to all."""
        most = self.params.max_tokens_per_rank
        if len(self._everybody) > most:
            need = f"{len(self._everybody)}, the number of ranks over top_k"
            raise Unsupported(f"eplb_local_stats with max_tokens_per_rank = {most}: they want at least {need}")
        check_tensor("eplb_local_stats", stats, device=buffer.device, dtypes=(torch.int32,), shape=(None,))
        if not 1 <= len(stats) <= self.params.num_experts:
            raise BadInput("eplb_local_stats", f"{len(stats)} words", f"1 to num_experts = {self.params.num_experts}")
        rows = stats.repeat(len(self._everybody), 1)
        extras: tuple[torch.Tensor, ...] = ()
        if stats.nbytes > buffer.hidden * buffer.dtype.itemsize:  # too wide for a row: beside one word
            rows, extras = rows[:, :1].contiguous(), (rows,)
        routed = buffer.dispatch(rows, self._everybody, layout="flat", extras=extras, max_rows=self.ep_size, sync=False)
        source = torch.where(_in_use(routed), routed.src[:, 0], self.ep_size).long()
        gathered = stats.new_zeros(self.ep_size + 1, len(stats))  # the last one is of rows that are not in use
        return gathered.index_copy_(0, source, routed.extras[0] if extras else routed.x)[: self.ep_size]

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
        out: torch.Tensor = buffer.combine(expert_output.reshape(handle.y_shape), handle, out=output, wire=self._wire)
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


def _an_expert_of_each_rank(buffer: Buffer) -> torch.Tensor:
    """Return ids int64 `[tokens, topk]`, each rank's first expert once."""
    ranks, topk = buffer.num_ranks, buffer.topk
    first = [experts_of(rank, buffer.num_experts, ranks).start for rank in range(ranks)]
    return torch.tensor(first + [-1] * (-ranks % topk), device=buffer.device).view(-1, topk)


def _by_row(tensor: torch.Tensor) -> torch.Tensor:
    """`[T, n]` of `[T, ...]`."""
    return tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1)


def _in_use(routed: Routed) -> torch.Tensor:
    """Return bool `[rows]`: a token has arrived there."""
    rows = len(routed.topk_idx)  # type: ignore[arg-type]
    return torch.arange(rows, dtype=torch.int32, device=routed.num_rows.device) < routed.num_rows
