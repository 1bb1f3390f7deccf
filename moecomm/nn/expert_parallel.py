"""The layer: a gate, experts that are spread over ranks, and the Buffer between them."""

from __future__ import annotations

import copy
from typing import Any

import torch

from moecomm import backends, ops
from moecomm.buffer import Buffer
from moecomm.core.choices import BackendName, GateKind
from moecomm.core.rendezvous import rendezvous
from moecomm.core.settings import DTYPES
from moecomm.core.validation import (
    check_dense,
    check_drawn,
    check_dtype,
    check_flag,
    check_name,
    check_same_device,
    check_sizes,
)
from moecomm.dispatch.arguments import check_max_rows
from moecomm.errors import BadInput
from moecomm.nn.buffers import shared_buffer
from moecomm.nn.experts import Experts
from moecomm.nn.gate import Gate
from moecomm.ops.counted import counted
from moecomm.ops.rounds import rows_of
from moecomm.router import Gating


class ExpertParallel(torch.nn.Module):
    """A mixture-of-experts layer whose experts are spread over the ranks of a group.

    Rank r has experts `[r * E/R, (r + 1) * E/R)`, and its own tokens.  The forward pass is collective, and so is the
    backward pass: every rank runs both, with as many tokens as it has (none is fine), and layers in the same order.

    State: `gate.weight` [E, H] (and `gate.bias` [E]) on every rank, `experts.w13` [E/R, 2 I, H] and `experts.w2`
    [E/R, H, I]; see shard_state and gather_state.  Gradients of the gate are those of this rank's tokens, to be
    summed over ranks as other replicated parameters' are; gradients of the experts are those of all tokens.

    Args:
        group: the ranks; see Buffer.
        hidden: H, columns of a token.
        intermediate: I, columns inside an expert.
        num_experts: E, of all ranks together.
        topk: experts a token picks.
        max_tokens: the most tokens that a rank passes; with `buffer` what that has.
        gate: "softmax" or "sigmoid"; with `num_groups`, `topk_groups`, `scale` and `normalize`: see Gating.  None:
            the layer has no gate, and forward() is given the routing.
        corrected: the gate has DeepSeek-V3's score correction.
        max_rows: rows that this rank has room for, a (token, expert) each; default: the worst case, all tokens of all
            ranks.  More is bad input on every rank.
        payload: the dtype in which rows travel; default: `dtype`.
        wire: see Buffer.combine.
        buffer: used by this layer; default: shared_buffer(), opened at the first forward pass or by open().
        backend: of the default Buffer.
        seed, dtype, device: of the weights, drawn the same on whichever rank has them; device: default: torch's.

    Raises:
        BadInput: sizes that can't be used, or others than those of `buffer`.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        hidden: int,
        intermediate: int,
        num_experts: int,
        topk: int,
        max_tokens: int,
        gate: GateKind | None = "softmax",
        num_groups: int = 1,
        topk_groups: int = 1,
        scale: float = 1.0,
        normalize: bool = True,
        corrected: bool = False,
        max_rows: int | None = None,
        payload: torch.dtype | None = None,
        wire: torch.dtype | None = None,
        buffer: Buffer | None = None,
        backend: BackendName = "auto",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(hidden=hidden, intermediate=intermediate, num_experts=num_experts, topk=topk, max_tokens=max_tokens)
        check_flag("corrected", corrected)
        check_max_rows(max_rows)
        check_drawn(seed, dtype, device)
        check_dtype("dtype" if payload is None else "payload", dtype if payload is None else payload, DTYPES)
        if wire is not None:
            check_dtype("wire", wire, DTYPES)
        check_name("backend", backend, ("auto", *backends.NAMES))
        rank, num_ranks = _place(group, buffer)
        if num_experts % num_ranks:
            raise BadInput("num_experts", num_experts, f"a multiple of the number of ranks, {num_ranks}")
        self.gate: Gate | None = None
        if gate is not None:
            gating = Gating(hidden, num_experts, topk, gate, num_groups, topk_groups, scale, normalize)
            self.gate = Gate(gating, corrected=corrected, seed=seed, dtype=dtype, device=device)
        local = num_experts // num_ranks
        mine = range(rank * local, (rank + 1) * local)
        self.experts = Experts(mine, hidden, intermediate, seed=seed, dtype=dtype, device=device)
        self.payload, self.wire, self.max_rows = dtype if payload is None else payload, wire, max_rows
        self._group, self._backend = group, backend
        self._sizes = {"hidden": hidden, "num_experts": num_experts, "topk": topk, "max_tokens": max_tokens}
        self._buffer: Buffer | None = None
        self._buffer_name, self._buffer_given = "", buffer is not None
        if buffer is not None:
            self._use(buffer)

    def open(self) -> Buffer:
        """The layer's Buffer, opened, collectively, if it has not been or has been closed; one that was given stays.

        A graph can't open one: to be called before the first call of a compiled layer.

        Raises:
            As Buffer.
        """
        if self._buffer is None or (self._buffer.closed and not self._buffer_given):
            device = self.experts.w13.device
            self._use(
                shared_buffer(self._group, **self._sizes, dtype=self.payload, backend=self._backend, device=device)
            )
        assert self._buffer is not None
        return self._buffer

    def _use(self, buffer: Buffer) -> None:
        for name in ("hidden", "num_experts", "topk"):
            if getattr(buffer, name) != self._sizes[name]:
                got = f"one with {name} = {getattr(buffer, name)}"
                raise BadInput("buffer", got, f"{self._sizes[name]}, as the layer")
        if buffer.dtype != self.payload:
            raise BadInput("buffer", f"one of {buffer.dtype}", f"one of {self.payload}, the payload")
        self._buffer, self._buffer_name = buffer, buffer.name

    @counted("self", 0, rounds=2)
    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Every token through its experts.

        Args:
            x: `[..., H]`, in any floating dtype.
            topk_idx, topk_weights: `[T, K]` each, instead of what the gate says: int64 or int32, -1 picks none; and
                floating, None: every weight is 1.

        Returns:
            As x, in its dtype: sum over k of w_k * expert_k(x).  Where gradients and autocast are off, this is
            Buffer.moe if the experts have the dtype of the payload: SwiGLU is then not rounded in between.

        Raises:
            As Buffer.dispatch and Buffer.combine.
        """
        if not self._buffer_name:
            if torch.compiler.is_compiling():
                raise BadInput("buffer", "none that is open", "layer.open() before the first call of a compiled layer")
            self.open()
        tokens = _tokens_of(x)
        if topk_idx is None:
            if self.gate is None:
                raise BadInput("topk_idx", "None", "expert ids: this layer has no gate")
            if topk_weights is not None:
                raise BadInput("topk_weights", "weights without topk_idx", "both, or neither: the gate says both")
            topk_idx, topk_weights = self.gate(tokens)
        check_same_device(x=tokens, topk_idx=topk_idx, topk_weights=topk_weights)
        rows = tokens.to(self.payload)
        if self._runs_fused(tokens):
            weights = None if topk_weights is None else topk_weights.float()
            given = (rows, topk_idx, weights, self.experts.w13, self.experts.w2)
            if torch.compiler.is_compiling():
                out = ops.moe(self._buffer_name, *given, max_rows=self.max_rows, wire=self.wire)
            else:  # the same, without torch's way to an operator
                assert self._buffer is not None
                out = self._buffer.moe(rows_of(rows), *given[1:], max_rows=self.max_rows, wire=self.wire)
            return out.to(x.dtype).view(x.shape)
        # The experts go by the counts, and so nothing reads rows that did not come.
        routed = ops.dispatch(
            self._buffer_name, rows, topk_idx, topk_weights, max_rows=self.max_rows, zero_padding=False
        )
        y = self.experts(routed.x, routed.tokens_per_expert)
        out = ops.combine(y.to(self.payload), routed.handle, wire=self.wire)
        return out.to(x.dtype).view(x.shape)

    def _runs_fused(self, tokens: torch.Tensor) -> bool:
        """Whether the pass is Buffer.moe: no gradients, one dtype for rows and experts, and experts that are nothing
        but their weights.  With gradients it is not: what its backward pass computes again is kept here.
        """
        if torch.is_grad_enabled() or torch.is_autocast_enabled(tokens.device.type):
            return False
        experts = self.experts
        hooks = (*experts._forward_hooks, *experts._forward_pre_hooks)  # they may bring the weights, or count calls
        return type(experts) is Experts and not hooks and experts.w13.dtype == experts.w2.dtype == self.payload

    def __getstate__(self) -> dict[str, Any]:
        """Without the Buffer, for torch.save: as one that has not been opened yet.  One that was given stays."""
        unopened = {} if self._buffer_given else {"_buffer": None, "_buffer_name": ""}
        return {**self.__dict__, **unopened}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """A layer with weights of its own, over the same ranks and the same Buffer."""
        for shared in (self._group, self._buffer):
            memo[id(shared)] = shared
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def _tokens_of(x: Any) -> torch.Tensor:
    """`[T, H]`.  Of whole numbers, the output could not be whole."""
    check_dense("x", x)
    if not x.is_floating_point() or x.ndim == 0:
        raise BadInput("x", f"{x.dtype} {tuple(x.shape)}", "a floating tensor [..., hidden]")
    tokens: torch.Tensor = x.reshape(-1, x.shape[-1])
    return tokens


def _place(group: Any, buffer: Buffer | None) -> tuple[int, int]:
    """This rank, and how many there are."""
    if buffer is not None:
        if not isinstance(buffer, Buffer):
            raise BadInput("buffer", type(buffer).__name__, "a Buffer, or None")
        return buffer.rank, buffer.num_ranks
    ranks = rendezvous(group)
    return ranks.rank, ranks.ranks
