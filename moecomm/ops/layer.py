"""An operator for a whole expert layer, and an operator for its gradients.

The backward pass is one operator, so that no compiler places rounds of other layers between its rounds or moves the
dispatch of x, which does not depend on the gradient, away from them.  It keeps only the inputs of the forward pass: it
dispatches x and the gradient, and one combine returns the gradients of x and of the weights.  All ranks run these three
rounds, whichever gradients a rank needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch

from moecomm.base import tangents
from moecomm.base.choices import Activation, Balance, Overflow
from moecomm.dispatch import observers
from moecomm.dispatch.chunks import in_parts
from moecomm.dispatch.options import Gradients
from moecomm.errors import TooManyRows, Unsupported
from moecomm.fused import layer
from moecomm.fused.activations import GatedActivation, check_activation
from moecomm.fused.biases import add_bias
from moecomm.fused.options import Options, Request
from moecomm.fused.weights import GRANULARITY, deinterleave, interleave
from moecomm.ops import rounds, swiglu
from moecomm.ops.grouped import grouped_linear, grouped_outer
from moecomm.ops.operator import operator
from moecomm.rounds import names
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import CollectiveCall, several_rounds
from moecomm.weights import slots
from moecomm.weights.copies import Copies, copies_of

_ROWS = ("expert", 1)  # layout, expert_alignment
_BACKWARD = "backward of moe"
# Of x, topk_weights, w13, w2, w13_bias and w2_bias.
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_BIAS_COLUMNS = 8  # of the operand in place of a bias: grouped GEMMs want rows of 16 bytes


@operator("moe")
def moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    w13: torch.Tensor,
    w13_scales: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    buffer: str,
    activation: str,
    interleaved: bool,
    max_rows: int | None,
    wire: str | None,
    num_sms: int | None,
    check_weights: bool,
    fused: bool | None,
    overflow: str | None,
    gradients: bool = False,
    number: int = 0,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
    balance: str | None = None,
    w13_factors: torch.Tensor | None = None,
    w2_factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Operator of moecomm.ops.moe; scales only for quantized weights, factors only for NVFP4.

    Args:
        wire: see wire_named().
        gradients: this rank wants some.
        number: of the layer.
    """
    tangents.refuse("moecomm::moe", x, topk_weights, w13, w2, bias, w13_bias, w2_bias)
    options = Options(
        activation=cast("Activation", activation),
        activation_limit=activation_limit,
        activation_alpha=activation_alpha,
        interleaved=interleaved,
        max_rows=max_rows,
        wire=rounds.wire_named(wire),
        num_sms=num_sms,
        check_weights=check_weights,
        fused=fused,
        overflow=cast("Overflow | None", overflow),
        balance=cast("Balance | None", balance),
    )
    owner, ids = names.find(buffer), topk_idx.contiguous()
    if balance is not None and gradients:
        _check_copied(owner, balance)
    out: torch.Tensor = layer.moe(
        owner,
        Request(options, Gradients.ROWS if gradients else Gradients.NONE, number),
        rounds.rows_of(x),
        ids if owner.experts.ids is None and owner.experts.live is None else owner.experts.own_ids(ids),
        None if topk_weights is None else topk_weights.contiguous(),
        _weights(w13, w13_scales, w13_factors),
        _weights(w2, w2_scales, w2_factors),
        bias=None if bias is None else rounds.rows_of(bias),
        w13_bias=w13_bias,
        w2_bias=w2_bias,
    )
    return out


def _check_copied(owner: Rounds, balance: str) -> None:
    """Raise Unsupported where gradients of copied experts cannot be added to those of their owners."""
    if owner.masked:
        raise Unsupported(f"gradients with balance={balance!r} beside masked ranks {sorted(owner.masked)}")
    if owner.session.capturing():  # the host reads which slots are copies
        raise Unsupported(f"gradients with balance={balance!r} in a capture")


def _weights(
    values: torch.Tensor, scales: torch.Tensor | None, factors: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    if scales is None:
        return values
    return (values, scales) if factors is None else (values, scales, factors)


@moe.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("moe_backward")
def moe_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    buffer: str,
    interleaved: bool,
    max_rows: int | None,
    overflow: str | None,
    wants_w13: bool,
    wants_w2: bool,
    number: int = 0,
    activation: str = "swiglu",
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
    balance: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Map the gradient of the output to those of x [T, H], topk_weights [T, K], weights and biases of experts.

    Gradients of w13 and w2 that are not wanted, and of biases that there are not, are [0].
    """
    owner = names.find(buffer)
    waits = layer.goes_in_parts(owner, cast("Overflow | None", overflow), max_rows)
    gated = check_activation(activation, activation_limit, activation_alpha)
    experts = _Experts(w13, w2, w13_bias, w2_bias, interleaved, gated)
    tensors = {"w13": w13, "w2": w2, "w13_bias": w13_bias, "w2_bias": w2_bias}
    if balance is not None:
        _check_copied(owner, balance)
    copies = copies_of(owner, cast("Balance | None", balance), gated, interleaved, **tensors)
    on_gpu = not owner.on_cpu  # CPU ranks wait by themselves
    wait = on_gpu and (waits or copies is not None)
    how = (experts, copies, buffer, max_rows, wants_w13, wants_w2, wait, number)

    def part(tokens: slice) -> _Gradients:
        weights = None if topk_weights is None else topk_weights[tokens]
        return _backward(grad[tokens], x[tokens], topk_idx[tokens], weights, *how, tokens.start)

    with CollectiveCall(owner, 3), observers.muted():
        tangents.refuse("moecomm::moe_backward", grad, x, topk_weights, w13, w2, w13_bias, w2_bias)
        if on_gpu and waits:
            owner.check()  # raises the error of an earlier round
        try:
            return _backward(grad, x, topk_idx, topk_weights, *how, None)
        except TooManyRows:
            if not waits:
                raise
        return several_rounds(owner, lambda: _joined(found for _, found in in_parts(len(x), owner.max_tokens, part)))


def _joined(parts: Iterable[_Gradients]) -> _Gradients:
    """Join the gradients of parts of the tokens.  Those of x and topk_weights are by token; the others are sums."""
    of_tokens: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    sums: list[torch.Tensor] = []  # in float32
    dtypes: list[torch.dtype] = []
    for of_x, of_weights, *of_experts in parts:
        of_tokens[0].append(of_x)
        of_tokens[1].append(of_weights)
        if not sums:
            sums, dtypes = [t.float() for t in of_experts], [t.dtype for t in of_experts]
            continue
        for total, more in zip(sums, of_experts, strict=True):
            total.add_(more)
    w13, w2, w13_bias, w2_bias = (total.to(dtype) for total, dtype in zip(sums, dtypes, strict=True))
    return torch.cat(of_tokens[0]), torch.cat(of_tokens[1]), w13, w2, w13_bias, w2_bias


class _Experts(NamedTuple):
    """The experts of this rank."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    interleaved: bool
    activation: GatedActivation


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    experts: _Experts,
    copies: Copies | None,
    buffer: str,
    max_rows: int | None,
    wants_w13: bool,
    wants_w2: bool,
    wait: bool,
    number: int,
    first_token: int | None,
) -> _Gradients:
    """Run the three rounds of the backward pass, and the products between them.

    `wait`: for the dispatch, whose error is raised before the next round, and before its copies are read.
    `first_token`: see dispatch.prepare.
    """
    room = -1 if max_rows is None else max_rows
    how = (buffer, *_ROWS, room, False, None, first_token, number)
    copy = None if copies is None else copies.run
    arrived = rounds.run_new(x, topk_idx.long(), topk_weights, *how, _BACKWARD, copies=copy)
    if wait:
        names.find(buffer).check()
    sources = None if copies is None else copies.sources()
    rows, _, row_weights, _, _, tokens_per_expert, _, memory = arrived
    back = (memory, buffer, _ROWS[0], len(rows))
    seen = rounds.run_again(grad, *back, False, None, number, _BACKWARD)
    ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
    w13, w2, w13_bias, w2_bias, interleaved, activation = experts
    width = GRANULARITY if interleaved else w2.shape[2]  # so many gate rows, then as many up rows
    # Without the routing weight: the weight's gradient is the dot product of this with the activated values.
    grad_inner = grouped_linear(seen, w2.transpose(1, 2), ends)
    # From here on, rows after the last group hold anything; no product reads them.
    as_w13 = w13_bias if w13_bias is None or not interleaved else interleave(w13_bias.unsqueeze(2)).squeeze(2)
    both = add_bias(grouped_linear(rows, w13, ends), as_w13, ends)
    found = swiglu.gradients(both, grad_inner, row_weights, width, ends[-1:], activation)
    grad_rows, grad_weights = grouped_linear(found.both, w13.transpose(1, 2), ends), found.weights
    if w2_bias is not None:
        column = w2_bias.to(seen.dtype).unsqueeze(1).expand(-1, _BIAS_COLUMNS, -1).contiguous()
        grad_weights = grad_weights + grouped_linear(seen, column, ends)[:, 0].float()
    grad_x, grad_topk_weights = rounds.run_back(grad_rows, grad_weights, *back, len(x), None, number, _BACKWARD)
    grad_w13_bias = _sums(found.both, torch.ones_like(row_weights), ends, w13_bias)
    if interleaved and w13_bias is not None:
        grad_w13_bias = deinterleave(grad_w13_bias.unsqueeze(2)).squeeze(2)
    # Another rank may want the gradient of an expert of which this one has a copy.
    grad_w13 = grouped_outer(found.both, rows, ends) if wants_w13 or copies is not None else w13.new_empty(0)
    grad_w2 = grouped_outer(seen, found.inner, ends) if wants_w2 or copies is not None else w2.new_empty(0)
    grads = [grad_w13, grad_w2, grad_w13_bias, _sums(seen, row_weights, ends, w2_bias)]
    if sources is not None:
        there = [nth for nth, weights in enumerate((w13, w2, w13_bias, w2_bias)) if weights is not None]
        sums = slots.add_copies(names.find(buffer), [grads[nth] for nth in there], sources)
        for nth, total in zip(there, sums, strict=True):
            grads[nth] = total
    for nth, wanted in enumerate((wants_w13, wants_w2)):
        grads[nth] = grads[nth] if wanted else w13.new_empty(0)
    return grad_x, grad_topk_weights, grads[0], grads[1], grads[2], grads[3]


def _sums(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the weighted sum of the rows of each group, of the dtype of `bias`: its gradient.  None: [0].

    A grouped GEMM adds in an order of its own; atomic additions would give other bits every time.
    """
    if bias is None:
        return rows.new_empty(0)
    columns = weights.to(rows.dtype).unsqueeze(1).expand(-1, _BIAS_COLUMNS).contiguous()
    return grouped_outer(rows, columns, ends)[:, :, 0].contiguous().to(bias.dtype)


@moe_backward.register_fake
def _(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    wants_w13: bool,
    wants_w2: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(topk_idx.shape, dtype=torch.float32),
        w13.new_empty(w13.shape if wants_w13 else (0,)),
        w2.new_empty(w2.shape if wants_w2 else (0,)),
        x.new_empty(0) if w13_bias is None else torch.empty_like(w13_bias),
        x.new_empty(0) if w2_bias is None else torch.empty_like(w2_bias),
    )
