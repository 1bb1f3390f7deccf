"""Gated experts of one rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from moecomm import ops
from moecomm.base.choices import Activation
from moecomm.base.validation import MOST_SIZE, check_dense, check_drawn, check_flag, check_same_device, check_sizes
from moecomm.buffer import Buffer
from moecomm.errors import BadInput
from moecomm.fused.activations import check_activation
from moecomm.fused.biases import add_bias
from moecomm.fused.weights import expert_weights, first_weights
from moecomm.nn import ownership, training
from moecomm.nn.shard import ExpertShard, is_dtensor
from moecomm.ops.grouped import grouped_linear


class Experts(torch.nn.Module):
    """Gated experts, w2 activation(w13 x), for rows that are grouped by expert; with biases w13_bias and w2_bias.

    `w13` [experts, 2 I, H] (gate and up projections) and `w2` [experts, H, I] are drawn from `seed` and the expert's
    number, so they do not depend on the rank that owns it.  `w13_bias` [experts, 2 I] and `w2_bias` [experts, H] begin
    as zeros.

    State: with a `group` of processes, state_dict() has DTensors `[E, ...]` that are sharded along the experts, as
    torch.distributed.checkpoint takes them; with `keep_vars=True` it has the parameters themselves.  Otherwise, unless
    there are no other experts, it has plain tensors, and their numbers as extra state.  load_state_dict() takes both,
    and plain tensors of all experts, of which it takes this rank's.  Plain tensors of the shape of the parameters
    without extra state are taken as they are.

    Args:
        experts: numbers of the experts, among those of all ranks.
        hidden: H, columns of a row.
        intermediate: I, columns inside an expert; a multiple of 16 bytes.
        num_experts: E, of all ranks together; needed with `group`.
        group: the ranks that have the other experts, as a Buffer splits them; see Buffer.  None: not known, so that
            torch's wrappers and clip_grad_norm_() take the weights for those of every rank.
        seed: of the weights.
        dtype: of the weights.
        device: of the weights; default: torch's.
        bias: the experts have biases.
        activation, activation_limit, activation_alpha: see Buffer.moe.

    Raises:
        BadInput: sizes that grouped GEMMs do not support; experts that are not those of this rank of the group; in
            load_state_dict(), a state without all experts of this rank.
    """

    def __init__(
        self,
        experts: range,
        hidden: int,
        intermediate: int,
        *,
        num_experts: int | None = None,
        group: Any = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        bias: bool = False,
        activation: Activation = "swiglu",
        activation_limit: float | None = None,
        activation_alpha: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(experts, range) or len(experts) == 0 or len(experts) > MOST_SIZE:
            raise BadInput("experts", repr(experts), "a range of one or more")
        check_sizes(hidden=hidden, intermediate=intermediate)
        check_drawn(seed, dtype, device)
        check_flag("bias", bias)
        self.activation = check_activation(activation, activation_limit, activation_alpha)
        if intermediate * dtype.itemsize % 16:
            raise BadInput("intermediate", intermediate, f"rows of a multiple of 16 bytes, in {dtype}")
        training.mark(self, ExpertShard(experts, num_experts, group))
        device = torch.get_default_device() if device is None else device
        drawn = [expert_weights(e, hidden, intermediate, seed=seed, dtype=dtype) for e in experts]
        w13, w2 = (torch.stack(weights).to(device=device) for weights in zip(*drawn, strict=True))
        self.w13, self.w2 = torch.nn.Parameter(w13), torch.nn.Parameter(w2)
        self.w13_bias: torch.nn.Parameter | None = None
        self.w2_bias: torch.nn.Parameter | None = None
        if bias:
            self.w13_bias, self.w2_bias = (torch.nn.Parameter(w.new_zeros(w.shape[:2])) for w in (w13, w2))
        # Rank 0's first weights, on other ranks until they have been compared.
        self._of_rank_0: torch.Tensor | None = None
        if self.shard.group is not None and self.shard.group.rank:
            self._of_rank_0 = first_weights(0, hidden, seed=seed, dtype=dtype)
        training.watch(self)

    @property
    def shard(self) -> ExpertShard:
        shard = ownership.shard_of(self)
        assert shard is not None
        return shard

    def warn_if_broadcast(self) -> None:
        """Warn, once, if this rank has rank 0's experts: a loop over parameters() has broadcast them.

        It is seen only while rank 0 has the weights that were drawn.
        """
        weights, wanted = self.w13.detach(), vars(self).get("_of_rank_0")
        if wanted is None or is_dtensor(weights) or weights.is_meta:
            return
        if weights.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._of_rank_0 = None
        if torch.equal(weights.flatten()[: len(wanted)].cpu(), wanted.to(weights.dtype)):
            warnings.warn(
                f"experts {self.shard.experts.start} to {self.shard.experts.stop - 1} have the weights of rank 0's: "
                "broadcast all parameters but those of moecomm.nn.expert_parameters(model)",
                RuntimeWarning,
                stacklevel=2,
            )

    def forward(
        self, x: torch.Tensor, tokens_per_expert: torch.Tensor, buffer: Buffer | str | None = None
    ) -> torch.Tensor:
        """Apply each expert to its group of rows.

        Args:
            x: `[rows, H]`, rows of the first expert first, and so on; rows after the last group may hold anything.
            tokens_per_expert: int32 or int64 `[experts]`, on the device of x: rows of each group.
            buffer: a Buffer with a placement, or its `name`: groups are those of its slots, and the call is collective,
                see ops.slot_weights().

        Returns:
            `[rows, H]` in the dtype of the weights or of autocast; rows after the last group are undefined.  Gradients
            of the weights are sums over the rows of the groups alone.

        Raises:
            BadInput: another shape, dtype or device.
            As ops.slot_weights(), with a `buffer`.
        """
        if not torch.compiler.is_compiling():
            training.watch(self)  # parameters may have been assigned or added
        check_dense("x", x)
        check_dense("tokens_per_expert", tokens_per_expert)
        check_same_device(x=x, tokens_per_expert=tokens_per_expert, w13=self.w13)
        if x.ndim != 2 or x.shape[1] != self.w13.shape[2] or not x.is_floating_point():
            raise BadInput("x", f"{x.dtype} {tuple(x.shape)}", f"floating [rows, {self.w13.shape[2]}]")
        dtype = self.w13.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        w13, w2, w13_bias, w2_bias = weights_of(self, dtype, buffer)
        if tokens_per_expert.shape != w13.shape[:1] or tokens_per_expert.dtype not in (torch.int32, torch.int64):
            got = f"{tokens_per_expert.dtype} {tuple(tokens_per_expert.shape)}"
            raise BadInput("tokens_per_expert", got, f"int32 ({w13.shape[0]},)")
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        both = add_bias(grouped_linear(x.to(dtype), w13, ends), w13_bias, ends)
        inner = self.activation.apply(*both.chunk(2, dim=-1))
        return add_bias(grouped_linear(inner, w2, ends), w2_bias, ends)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.  fully_shard() would go past torch's hooks in a module without this method."""
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        training.watch(self)  # a move from the meta device makes new parameters
        return self


def weights_of(
    experts: Experts, dtype: torch.dtype, buffer: Buffer | str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return w13 and w2 in a dtype, and the biases as they are; None: the experts have none.

    Args:
        experts: with the parameters.
        dtype: of the weights.
        buffer: see Experts.forward.
    """
    w13, w2, biases = experts.w13.to(dtype), experts.w2.to(dtype), (experts.w13_bias, experts.w2_bias)
    if buffer is None:
        return w13, w2, *biases
    given = [weight for weight in (w13, w2, *biases) if weight is not None]
    w13, w2, *placed = ops.slot_weights(buffer, given)
    return w13, w2, *(placed or biases)
