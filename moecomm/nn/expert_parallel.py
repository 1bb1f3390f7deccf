"""The expert-parallel layer: a gate, experts that are distributed over ranks, and the Buffer between them."""

from __future__ import annotations

import copy
from typing import Any, get_args

import torch

from moecomm import ops
from moecomm.base import formats
from moecomm.base.choices import (
    CAST_WIRES,
    Activation,
    BackendName,
    CombineWire,
    GateKind,
    Overflow,
    Quantize,
    dtype_of_wire,
    is_unsummed,
)
from moecomm.base.experts import experts_of
from moecomm.base.placement import Placement, checked
from moecomm.base.protocol import DTYPES
from moecomm.base.validation import (
    check_dense,
    check_drawn,
    check_dtype,
    check_flag,
    check_name,
    check_same_device,
    check_sizes,
)
from moecomm.buffer import Buffer
from moecomm.dispatch.arguments import check_max_rows
from moecomm.dispatch.options import check_overflow
from moecomm.errors import BadInput
from moecomm.nn.buffers import number_layer, shared_buffer
from moecomm.nn.experts import Experts, weights_of
from moecomm.nn.gate import Gate
from moecomm.nn.shard import refuse_pickle
from moecomm.ops.counted import counted
from moecomm.ops.rounds import rows_of
from moecomm.ranks.group import Group
from moecomm.ranks.rendezvous import rendezvous
from moecomm.router import Gating


class ExpertParallel(torch.nn.Module):
    """A mixture-of-experts layer whose experts are distributed over the ranks of a group.

    Rank r owns experts `r * E/R` to `(r + 1) * E/R - 1` and has its own tokens.  A placement changes neither parameters
    nor states: each pass copies the weights of slots from the owners, and adds gradients there, see ops.slot_weights().

    Forward and backward passes are collective: every rank runs both, with any number of tokens up to `max_tokens` (also
    none).  All ranks make their layers in the same order, and run them in the same order: rounds carry the number of
    the layer, by the order in which those of a group (or over a given Buffer) are made, and Mismatch names the numbers
    where two ranks differ.

    Parameters: `gate.weight` [E, H] (and the buffer `gate.bias` [E]) on every rank, `experts.w13` [E/R, 2 I, H] and
    `experts.w2` [E/R, H, I]; with `bias`, `experts.w13_bias` [E/R, 2 I] and `experts.w2_bias` [E/R, H].  state_dict()
    has experts as DTensors of all ranks, see Experts; gather_state() makes plain tensors of them, which safetensors and
    other formats need.  Gradients of the gate are those of this rank's tokens: sum them over ranks like those of other
    replicated parameters.  Gradients of the experts are those of all ranks' tokens.  A layer with a group or a given
    Buffer is not pickled, which is BadInput: save its state_dict().

    Args:
        group: the ranks; see Buffer.
        hidden: H, columns of a token.
        intermediate: I, columns inside an expert.
        num_experts: E, of all ranks together.
        topk: K, experts of a token.
        max_tokens: most tokens that a rank passes; a given `buffer` has its own limit.
        gate: "softmax" or "sigmoid"; with `num_groups`, `topk_groups`, `scale` and `normalize`: see Gating.  None:
            the layer has no gate, and the caller passes the routing to forward().
        corrected: the gate has DeepSeek-V3's score correction.
        max_rows: received rows, one a (token, expert), to make room for on this rank; default: by the Buffer's
            capacity_factor.
        overflow: see ops.dispatch: what becomes of more rows.  "drop": the attribute `dropped`, int32 `[1]` on the
            device, says how many entries of this rank the last forward pass dropped; else it is None.
        payload: dtype in which rows travel; default: `dtype`.
        wire: see Buffer.combine.
        quantize: format in which tokens travel to the experts, see ops.dispatch; not "fp8_tensor", which needs a scale.
        grad_wire: format in which the gradients of the experts' results travel, see ops.combine.
        buffer: Buffer of this layer; default: shared_buffer(), opened at the first forward pass or by open().
        placement: of the default Buffer; see there.  A given `buffer` has its own.
        backend: of the default Buffer.
        seed: of the weights; an expert's weights do not depend on the rank that owns it.
        dtype: of the weights.
        device: of the weights; default: torch's.
        bias: the experts have biases.
        activation, activation_limit, activation_alpha: of the experts; see Buffer.moe.

    Raises:
        BadInput: invalid sizes, or sizes that differ from those of `buffer`.
    """

    _makes_rounds = True  # see moecomm.base.layers

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
        overflow: Overflow | None = None,
        payload: torch.dtype | None = None,
        wire: CombineWire | None = None,
        quantize: Quantize | None = None,
        grad_wire: Quantize | None = None,
        buffer: Buffer | None = None,
        placement: Placement | None = None,
        backend: BackendName = "auto",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        bias: bool = False,
        activation: Activation = "swiglu",
        activation_limit: float | None = None,
        activation_alpha: float | None = None,
    ) -> None:
        super().__init__()
        check_sizes(hidden=hidden, intermediate=intermediate, num_experts=num_experts, topk=topk, max_tokens=max_tokens)
        check_flag("corrected", corrected)
        check_max_rows(max_rows)
        check_overflow(overflow, max_rows)
        check_drawn(seed, dtype, device)
        check_dtype("dtype" if payload is None else "payload", dtype if payload is None else payload, DTYPES)
        if wire is not None and not is_unsummed(wire):
            check_dtype("wire", dtype_of_wire(wire), (*DTYPES, *CAST_WIRES))
        if quantize is not None:
            check_name("quantize", quantize, tuple(name for name in formats.FORMATS if name != "fp8_tensor"))
        if grad_wire is not None:
            check_name("grad_wire", grad_wire, ops.GRAD_WIRES)
        check_name("backend", backend, get_args(BackendName))
        checked(placement)
        if placement is not None and buffer is not None:
            raise BadInput("placement", "one beside a buffer", "None: the Buffer has its own")
        place = _group_of(group, buffer)
        if num_experts < place.ranks:
            raise BadInput("num_experts", num_experts, f"at least {place.ranks}, the number of ranks")
        self.gate: Gate | None = None
        if gate is not None:
            gating = Gating(hidden, num_experts, topk, gate, num_groups, topk_groups, scale, normalize)
            self.gate = Gate(gating, corrected=corrected, seed=seed, dtype=dtype, device=device)
        mine = experts_of(place.rank, num_experts, place.ranks)
        owned: dict[str, Any] = {"num_experts": num_experts, "group": place, "bias": bias, "activation": activation}
        owned |= {"activation_limit": activation_limit, "activation_alpha": activation_alpha}
        self.experts = Experts(mine, hidden, intermediate, **owned, seed=seed, dtype=dtype, device=device)
        self.payload, self.wire = dtype if payload is None else payload, wire
        self.quantize, self.grad_wire = quantize, grad_wire
        self.max_rows, self.overflow = max_rows, overflow
        self.dropped: torch.Tensor | None
        count = torch.zeros(1, dtype=torch.int32, device=self.experts.w13.device) if overflow == "drop" else None
        self.register_buffer("dropped", count, persistent=False)
        self._group, self._backend = group, backend
        self._sizes = {"hidden": hidden, "num_experts": num_experts, "topk": topk, "max_tokens": max_tokens}
        self._placing = {} if placement is None else {"placement": placement}  # setting of the default Buffer
        self._buffer: Buffer | None = None
        self._buffer_name, self._buffer_given, self._placed = "", buffer is not None, False
        self._number = number_layer(group, buffer)
        if buffer is not None:
            self._use(buffer)

    def open(self) -> Buffer:
        """Return the layer's Buffer.  Opens the default Buffer, collectively, if it is not open.

        Call it before the first call of a compiled layer, and after Buffer.shrink(): a graph cannot do so.

        Raises:
            As Buffer.
        """
        if self._buffer is None or (self._buffer.closed and not self._buffer_given):
            device = self.experts.w13.device
            self.experts.warn_if_broadcast()
            about: dict[str, Any] = {"dtype": self.payload, "backend": self._backend, "device": device}
            self._use(shared_buffer(self._group, **self._sizes, **self._placing, **about))
        assert self._buffer is not None
        if self._buffer.name != self._buffer_name:  # it has shrunk
            self._use(self._buffer)
        return self._buffer

    def _use(self, buffer: Buffer) -> None:
        for name in ("hidden", "num_experts", "topk"):
            if getattr(buffer, name) != self._sizes[name]:
                got = f"one with {name} = {getattr(buffer, name)}"
                raise BadInput("buffer", got, f"{self._sizes[name]}, as the layer")
        if buffer.dtype != self.payload:
            raise BadInput("buffer", f"one of {buffer.dtype}", f"one of {self.payload}, the payload")
        self._placed = buffer.placement is not None
        if self._placed:
            if buffer.rounds.num_ranks != self.experts.shard.ranks:
                want = f"one of {self.experts.shard.ranks}: a lost rank's experts are in a checkpoint alone"
                raise BadInput("buffer", f"one of {buffer.rounds.num_ranks} ranks", want)
        elif len(buffer.local_experts) != len(self.experts.w13):
            got = f"one with {len(buffer.local_experts)} experts on this rank"
            raise BadInput("buffer", got, f"{len(self.experts.w13)}, as the layer: after a loss, shrink(keep_ids=True)")
        self._buffer, self._buffer_name = buffer, buffer.name
        # Graphs of torch.compile take a number of a module for a constant, and each layer would be compiled anew.  The
        # shape of a tensor may vary.
        self._numbered = torch.empty(0, 1 + self._number, device=self.experts.w13.device)

    @counted("self", 0, rounds=2)
    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send every token through its experts.

        Args:
            x: `[..., H]`, any floating dtype but float64; T tokens in all.
            topk_idx: int64 or int32 `[T, K]`, in place of the gate's choice; -1 picks none.
            topk_weights: floating `[T, K]`, with `topk_idx`; None: every weight is 1.

        Returns:
            Shape and dtype of x: sum over k of w_k * expert_k(x).  With gradients and autocast off, without `quantize`,
            and with experts in the payload's dtype, the pass is Buffer.moe, which activates in float32 and rounds once.

        Raises:
            BadInput: arguments that do not fit; no open Buffer in a compiled layer.
            As Buffer.dispatch and Buffer.combine; with a placement, also as ops.slot_weights().
        """
        self.experts.shard.check_own("experts.w13", self.experts.w13)
        if torch.compiler.is_compiling():
            if not self._buffer_name:
                raise BadInput("buffer", "none that is open", "layer.open() before the first call of a compiled layer")
        elif self._buffer is None or self._buffer.name != self._buffer_name:
            self.open()
        tokens = _tokens_of(x)
        if topk_idx is None:
            if self.gate is None:
                raise BadInput("topk_idx", "None", "expert ids: this layer has no gate")
            if topk_weights is not None:
                raise BadInput("topk_weights", "weights without topk_idx", "both, or neither: the gate says both")
            topk_idx, topk_weights = self.gate(tokens)
        check_same_device(x=tokens, topk_idx=topk_idx, topk_weights=topk_weights)
        rows, number = tokens.to(self.payload), self._numbered.shape[1] - 1
        if self._runs_fused(tokens):
            weights = None if topk_weights is None else topk_weights.float()
            w13, w2, w13_bias, w2_bias = weights_of(
                self.experts, self.payload, self._buffer_name if self._placed else None
            )
            given = (rows, topk_idx, weights, w13, w2)
            room: dict[str, Any] = {"max_rows": self.max_rows, "overflow": self.overflow, "dropped": self.dropped}
            room |= self.experts.activation.arguments()
            if w13_bias is not None:
                room |= {"w13_bias": w13_bias, "w2_bias": w2_bias}
            if torch.compiler.is_compiling():
                out = ops.moe(self._buffer_name, *given, wire=self.wire, **room, layer=number)
            else:  # the same, without the overhead of torch's operator dispatch
                assert self._buffer is not None
                room["_layer"] = number
                out = self._buffer.moe(rows_of(rows), *given[1:], wire=self.wire, **room)
            return out.to(x.dtype).view(x.shape)
        # No padding is needed: the experts read only rows that tokens_per_expert counts.
        about: dict[str, Any] = {"max_rows": self.max_rows, "overflow": self.overflow, "layer": number}
        about["quantize"] = self.quantize
        routed = ops.dispatch(self._buffer_name, rows, topk_idx, topk_weights, zero_padding=False, **about)
        if self.dropped is not None and routed.dropped is not None:
            self.dropped.copy_(routed.dropped)
        placed = (self._buffer_name,) if self._placed else ()
        y = self.experts(routed.x, routed.tokens_per_expert, *placed)
        out = ops.combine(y.to(self.payload), routed.handle, wire=self.wire, grad_wire=self.grad_wire)
        return out.to(x.dtype).view(x.shape)

    def _runs_fused(self, tokens: torch.Tensor) -> bool:
        """Return whether the pass is Buffer.moe: no gradients, one dtype, no casts, and plain Experts without hooks.

        Parameters of a subclass of Tensor may have no memory of their own: torch's operators compute with them.  With
        gradients, separate operators keep activations that the backward pass of moecomm.ops.moe would recompute.
        """
        if torch.is_grad_enabled() or torch.is_autocast_enabled(tokens.device.type) or self.quantize is not None:
            return False
        experts = self.experts
        hooks = (*experts._forward_hooks, *experts._forward_pre_hooks)  # hooks may gather weights or count calls
        if type(experts) is not Experts or hooks or not (experts.w13.dtype == experts.w2.dtype == self.payload):
            return False
        weights = (experts.w13, experts.w2, experts.w13_bias, experts.w2_bias)
        return all(weight is None or type(weight) in (torch.nn.Parameter, torch.Tensor) for weight in weights)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without a default Buffer: the copy opens its own."""
        unopened = {} if self._buffer_given else {"_buffer": None, "_buffer_name": ""}
        return {**self.__dict__, **unopened}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a layer of one rank.  Raises BadInput for a group or a Buffer, which only this process has."""
        if self._buffer_given or not (self._group is None or isinstance(self._group, str)):
            refuse_pickle("a layer with a given Buffer, or with a group")
        return super().__reduce_ex__(protocol)

    def __copy__(self) -> ExpertParallel:
        """Share the weights; the copy uses the same group, and a Buffer that was given."""
        copied = self.__class__.__new__(self.__class__)
        copied.__setstate__(self.__getstate__())  # type: ignore[no-untyped-call]
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Copy the weights; the copy uses the same group and the same Buffer."""
        for shared in (self._group, self._buffer):
            memo[id(shared)] = shared
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def _tokens_of(x: Any) -> torch.Tensor:
    """Return x as `[T, H]`.

    Raises BadInput for integers, whose dtype the output could not have, and for float64, which no payload can carry.
    """
    check_dense("x", x)
    if not x.is_floating_point() or x.dtype == torch.float64 or x.ndim == 0:
        raise BadInput("x", f"{x.dtype} {tuple(x.shape)}", "[..., hidden] of float32 or a narrower floating dtype")
    tokens: torch.Tensor = x.reshape(-1, x.shape[-1])
    return tokens


def _group_of(group: Any, buffer: Buffer | None) -> Group:
    """Return the group of the layer: that of its Buffer, if one is given.  Raises BadInput."""
    if buffer is not None:
        if not isinstance(buffer, Buffer):
            raise BadInput("buffer", type(buffer).__name__, "a Buffer, or None")
        return buffer.rounds.members.group
    return rendezvous(group)
