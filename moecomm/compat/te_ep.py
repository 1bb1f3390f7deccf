"""TransformerEngine's expert-parallel interface, `transformer_engine.pytorch.ep` of 2.19 and 2.20, over moecomm.

Rows arrive by expert with their routing weights, and experts apply the weights.  Tokens are bfloat16, float16 or
float32, on GPUs and on CPU ranks; all calls run on the current stream.  With MXFP8BlockScaling, rows travel as MXFP8
with linear scales, and are a GroupedTensor of TransformerEngine where they arrive: values and scales of each expert,
zeros in padding.  What that interface has and this has not raises Unsupported, by name:

| not supported | instead |
| --- | --- |
| `ep_bootstrap(zero_copy=True)`, `symm_mem_alloc`, `is_symm_backed` | nothing |
| `dispatch_fwd_quant_recipe`, `combine_bwd_quant_recipe` of `EpBuffer`, but MXFP8BlockScaling | the dtype of tokens |
| `recv_tokens`, `recv_topk_weights`, `grad_out` without `recv_capacity_per_rank` | tensors that moecomm makes |
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.function import once_differentiable

from moecomm import combine as combining
from moecomm.base.arrays import check_tensor
from moecomm.base.bound import Bound
from moecomm.base.validation import MOST_SIZE, check_alignment, check_flags, check_integer
from moecomm.compat.deep_ep.arguments import check_dimensions, check_experts, described, limit_of, refuse
from moecomm.compat.deep_ep.pool import Pool, counted_by_pool, within_budgets
from moecomm.dispatch import Options, Request, dispatch
from moecomm.dispatch.routed import Handle
from moecomm.dispatch.tables import kept
from moecomm.errors import BadInput, Unsupported
from moecomm.gpu import padding
from moecomm.rounds.state import CollectiveCall

__all__ = [
    "EpBuffer",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "install_as_te_ep",
    "is_ep_bootstrapped",
    "is_symm_backed",
    "release_symm_mem_pool",
    "symm_mem_alloc",
]

_MXFP8_COLUMNS, _MXFP8_ROWS = 128, 128  # in the blocks of a GEMM: what sizes of GroupedTensors are multiples of
_MXFP8_BLOCK = 32  # columns of a scale
_TIMEOUT_S = 600.0  # ranks drift apart by whatever one of them does alone: writing a checkpoint, compiling


_NAMES = {"x": "tokens", "y": "expert_out", "max_rows": "recv_capacity_per_rank"}  # see deep_ep's Calls
_Memory = tuple[torch.Tensor | None, ...]  # of callers, for outputs; in a tuple, so that autograd does not see it


class _Settings(NamedTuple):
    """Settings of ep_bootstrap that all calls share.  `rows`: recv_capacity_per_rank; None: the host waits."""

    num_experts: int
    most: int
    topk: int
    rows: int | None
    num_sms: int
    drops: bool


class _Rows(NamedTuple):
    """Rows that have arrived; MXFP8 rows as bytes, with their scales."""

    x: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def of(cls, x: torch.Tensor, scales: torch.Tensor | None, handle: Handle, zeros: bool) -> _Rows:
        """Take the rows of a dispatch.  `zeros`: zero the padding."""
        rows = cls(x, None) if scales is None else cls(x.view(torch.uint8), scales.view(torch.uint8))
        for tensor in rows if zeros else ():
            if tensor is not None:
                padding.zero(tensor, src=kept(handle, "src"))
        return rows

    def of_length(self, length: int, memory: torch.Tensor | None = None) -> _Rows:
        """Return rows padded with zeros to `length`; in the caller's tensor, values and then scales, if it is given."""
        if self.scales is None:
            return _Rows(_of_length(self.x, length, memory), None)
        if memory is None:
            return _Rows(_of_length(self.x, length), _of_length(self.scales, length))
        parts, begin, memory = [], 0, memory.view(-1).view(torch.uint8)
        for tensor in (self.x, self.scales):
            size = length * tensor.shape[1]
            parts.append(_of_length(tensor, length, memory[begin : begin + size].view(length, -1)))
            begin += size
        return _Rows(*parts)

    def given(self, counts: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Return rows as callers take them; MXFP8 rows as a tensor of `dtype`, grouped by int64 `[E/R]` counts."""
        return self.x if self.scales is None else _grouped(self.x, self.scales, counts, dtype)


class _Group:
    """The ranks, and what was agreed with them."""

    def __init__(self, group: Any, settings: _Settings) -> None:
        self._pool, self.settings = Pool(group, timeout_s=_TIMEOUT_S, names=_NAMES), settings
        ranks = self._pool.ranks.ranks
        check_experts(settings.num_experts, ranks)
        self.local_experts = settings.num_experts // ranks

    def close(self) -> None:
        self._pool.close()

    @counted_by_pool
    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, alignment: int, mxfp8: bool
    ) -> tuple[_Rows, torch.Tensor, torch.Tensor, torch.Tensor, Handle]:
        """Rows, their weights, padded int64 counts of experts, int64 `[1]` of all rows that came, handle."""
        pool, (experts, most, topk, rows, sms, drops) = self._pool, self.settings
        if len(x) > most:
            raise BadInput("tokens", f"{len(x)} tokens", f"at most max_tokens_per_rank = {most}")
        if ids.shape[1] > topk:
            raise BadInput("topk_idx", f"{ids.shape[1]} experts a token", f"at most num_topk = {topk}")
        waits = rows is None
        buffer = pool.elastic(x.device, x.shape[1], experts, ids.shape[1], most, x.dtype, True, waits=waits)
        needed = None
        if rows is not None and drops:
            ids, _, needed = within_budgets(pool, ids, experts, rows, alignment)
        options = Options("expert", alignment, "mxfp8" if mxfp8 else None, num_sms=limit_of(x, sms))
        routed = dispatch(buffer.rounds, Request(options), x, ids, weights, max_rows=rows, sync=waits)
        x, scales, row_weights, counts = routed.plan.expert_tensors(routed, counted=True)
        if mxfp8:
            x, scales = routed.x, routed.scales
        received = _Rows.of(x, scales, routed.handle, zeros=alignment > 1 or not waits)
        total = counts.sum(dim=0, keepdim=True) if needed is None else needed
        return received, row_weights, counts, total, routed.handle


_group: _Group | None = None


def ep_bootstrap(
    ep_group: Any,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int,
    recv_capacity_per_rank: int | None = None,
    max_num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
    max_token_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Agree on the ranks and sizes of this process's calls.  The first dispatch takes the memory, on all ranks.

    Args:
        ep_group: a torch.distributed process group.
        num_experts: of all its ranks; a multiple of their number.
        max_tokens_per_rank: the most tokens that a rank passes.
        hidden_dim: columns of a token; a call may have others.
        num_topk: the most experts a token picks.
        recv_capacity_per_rank: rows that a dispatch returns; None: as many as arrive, for which the host waits.
        max_num_sms: SMs that a round may use; 0: moecomm's choice.
        zero_copy: Unsupported.
        drop_on_overflow: rows behind `recv_capacity_per_rank` are dropped; else they are TooManyRows on every rank.
        max_token_dtype: not read: a window is for the dtype of its tokens.

    Raises:
        BadInput: a second call without ep_finalize(); drop_on_overflow without recv_capacity_per_rank; sizes.
        Unsupported: zero_copy.
    """
    global _group
    if _group is not None:
        raise BadInput("ep_bootstrap", "a second one", "ep_finalize() before it")
    check_flags(zero_copy=zero_copy, drop_on_overflow=drop_on_overflow)
    refuse("te_ep", zero_copy=zero_copy)
    for name, value in (("max_tokens_per_rank", max_tokens_per_rank), ("hidden_dim", hidden_dim)):
        check_integer(name, value, 1, MOST_SIZE)
    check_integer("num_topk", num_topk, 1)
    check_integer("max_num_sms", max_num_sms, 0)
    if recv_capacity_per_rank is not None:
        check_integer("recv_capacity_per_rank", recv_capacity_per_rank, 1, MOST_SIZE)
    elif drop_on_overflow:
        raise BadInput("drop_on_overflow", True, "recv_capacity_per_rank beside it")
    sizes = (num_experts, max_tokens_per_rank, num_topk, recv_capacity_per_rank, max_num_sms, drop_on_overflow)
    _group = _Group(ep_group, _Settings(*sizes))


def is_ep_bootstrapped() -> bool:
    """Return whether ep_bootstrap() has been called, and ep_finalize() not since."""
    return _group is not None


def ep_finalize() -> None:
    """Give the memory back.  Idempotent."""
    global _group
    if _group is not None:
        _group.close()
    _group = None


class EpBuffer(Bound):
    """The state of one dispatch and its combine; its attributes are those of TransformerEngine's.

    Attributes:
        tokens_per_expert: int64 `[E/R]`: rows of each expert, padding included; of the last dispatch.
        total_recv_tokens: int64 `[1]`: rows that came to this rank, padding and dropped rows included.

    Raises:
        BadInput: no ep_bootstrap() before it; sizes that differ from its own, or that MXFP8 can't have.
        Unsupported: another recipe than MXFP8BlockScaling.
    """

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 0,
        payload_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        dispatch_fwd_quant_recipe: Any = None,
        combine_bwd_quant_recipe: Any = None,
    ) -> None:
        self.group = group = _bootstrapped("EpBuffer")
        check_alignment("alignment", alignment or 1)
        self.dispatch_fwd_quant_recipe, self.combine_bwd_quant_recipe = (
            dispatch_fwd_quant_recipe,
            combine_bwd_quant_recipe,
        )
        self.quantizes = _is_mxfp8("dispatch_fwd_quant_recipe", dispatch_fwd_quant_recipe)
        self.quantizes_grads = _is_mxfp8("combine_bwd_quant_recipe", combine_bwd_quant_recipe)
        if self.quantizes or self.quantizes_grads:
            for name, size, unit in (("hidden_dim", hidden_dim, _MXFP8_COLUMNS), ("alignment", alignment, _MXFP8_ROWS)):
                if size < 1 or size % unit:
                    raise BadInput(name, size, f"a multiple of {unit}, beside a recipe")
        for name, got, agreed in (
            ("num_local_experts", num_local_experts, group.local_experts),
            ("recv_capacity_per_rank", recv_capacity_per_rank, group.settings.rows),
        ):
            if got != agreed:
                raise BadInput(name, got, f"{agreed}, as in ep_bootstrap")
        self.top_k, self.alignment, self.max_tokens_per_rank = top_k, alignment, max_tokens_per_rank
        self.recv_capacity_per_rank, self.hidden_dim = recv_capacity_per_rank, hidden_dim
        self.num_local_experts, self.payload_dtype, self.device = num_local_experts, payload_dtype, device
        self.eager, self.zero_copy = recv_capacity_per_rank is None, False
        self.tokens_per_expert: torch.Tensor | None = None
        self.total_recv_tokens: torch.Tensor | None = None
        self.handle: Handle | None = None
        self.graph: torch.Tensor | None = None  # see moecomm.ops.Handle


def ep_dispatch(
    buffer: EpBuffer,
    tokens: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    recv_tokens: torch.Tensor | None = None,
    recv_topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send tokens to their experts.  Collective.  Gradients: tokens, topk_weights.

    Args:
        buffer: of this dispatch.
        tokens: `[T, H]`.
        topk_idx: int64 or int32 `[T, K]`; -1 picks none.
        topk_weights: float32 `[T, K]`.
        recv_tokens, recv_topk_weights: the memory of what is returned, contiguous: `[recv_capacity_per_rank, H]` of the
            dtype of tokens, and float32 `[recv_capacity_per_rank]`.  With a recipe, the first is of any shape and
            dtype, with bytes for values and scales behind them, `H + H / 32` a row.  Takes a copy of the rows.

    Returns:
        Rows by expert `[rows, H]`, their weights float32 `[rows]` (0 of padding), and buffer.tokens_per_expert.  Rows
        are as many as arrive, or recv_capacity_per_rank, with zeros in padding.

    Raises:
        As Buffer.dispatch; Unsupported.
    """
    check_dimensions("tokens", tokens, "tokens", "hidden")
    check_dimensions("topk_idx", topk_idx, "tokens", "topk")
    check_dimensions("topk_weights", topk_weights, "tokens", "topk")
    most = buffer.recv_capacity_per_rank
    _check_memory("recv_tokens", recv_tokens, tokens, (most, tokens.shape[1]), tokens.dtype, buffer.quantizes)
    _check_memory("recv_topk_weights", recv_topk_weights, tokens, (most,), torch.float32, False)
    memory = recv_tokens, recv_topk_weights
    received = _Dispatch.apply(tokens, topk_weights, topk_idx, buffer, memory)  # type: ignore[no-untyped-call]
    rows, weights, buffer.graph = received
    assert buffer.tokens_per_expert is not None
    return rows, weights, buffer.tokens_per_expert


def ep_combine(
    buffer: EpBuffer,
    expert_out: torch.Tensor,
    *,
    num_local_tokens: int | None = None,
    grad_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add up the rows of each token, without weights.  Collective.  Gradient: expert_out.

    Args:
        buffer: of the dispatch.
        expert_out: `[rows, H]`, as many as the dispatch returned.
        num_local_tokens: rows of the result, at least those that were dispatched; more are zeros.  None: the buffer's
            max_tokens_per_rank.
        grad_out: the memory of the gradient, contiguous, of the shape and dtype of expert_out; with a recipe, as
            recv_tokens of ep_dispatch().  Takes a copy of the rows.

    Returns:
        `[num_local_tokens, H]` of the dtype of expert_out.

    Raises:
        As Buffer.combine; BadInput without a dispatch before it; Unsupported.
    """
    check_dimensions("expert_out", expert_out, "rows", "hidden")
    if buffer.handle is None:
        raise BadInput("ep_combine", "no dispatch before it", "ep_dispatch with the same buffer")
    graph = None if expert_out.requires_grad else buffer.graph  # schedules may cut the rows off from the dispatch
    rows = None if buffer.recv_capacity_per_rank is None else len(expert_out)
    shape = rows, expert_out.shape[1]
    _check_memory("grad_out", grad_out, expert_out, shape, expert_out.dtype, buffer.quantizes_grads)
    out: torch.Tensor = _Combine.apply(expert_out, graph, buffer, (grad_out,))  # type: ignore[no-untyped-call]
    most = buffer.max_tokens_per_rank if num_local_tokens is None else num_local_tokens
    if most < len(out):
        raise BadInput("num_local_tokens", most, f"at least {len(out)}, as many as were dispatched")
    return _of_length(out, most)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, topk_idx: torch.Tensor, buffer: EpBuffer, memory: _Memory
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group, alignment = buffer.group, buffer.alignment or 1
        inputs = (tokens.contiguous(), topk_idx.contiguous(), weights.contiguous())
        rows, row_weights, counts, total, handle = group.dispatch(*inputs, alignment, buffer.quantizes)
        buffer.tokens_per_expert, buffer.total_recv_tokens, buffer.handle = counts.long(), total.long(), handle
        ctx.handle, ctx.sms = handle, group.settings.num_sms
        most = buffer.recv_capacity_per_rank
        graph = tokens.new_empty(0)
        if most is not None:
            rows, row_weights = rows.of_length(most, memory[0]), _of_length(row_weights, most, memory[1])
        return rows.given(buffer.tokens_per_expert, tokens.dtype), row_weights, graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        room = ctx.handle.args.max_rows
        grads = grad_weights[:room].float().contiguous() if ctx.needs_input_grad[1] else None
        sums = _combined(ctx.handle, grad_rows[:room], ctx.sms, weight_grads=grads)
        x, weights = (sums, None) if grads is None else sums
        return x, weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, graph: torch.Tensor | None, buffer: EpBuffer, memory: _Memory
    ) -> torch.Tensor:
        handle = buffer.handle
        assert handle is not None
        ctx.handle, ctx.sms, ctx.rows, ctx.dtype = handle, buffer.group.settings.num_sms, len(y), y.dtype
        ctx.mxfp8, ctx.counts, ctx.memory = buffer.quantizes_grads, buffer.tokens_per_expert, memory
        out: torch.Tensor = _combined(handle, y[: handle.args.max_rows], ctx.sms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        handle = ctx.handle
        with CollectiveCall(handle.rounds):
            grad = grad.to(handle.rounds.dtype).contiguous()
            options = Options(quantize="mxfp8" if ctx.mxfp8 else None, num_sms=limit_of(grad, ctx.sms))
            routed = dispatch(handle.rounds, Request(options), grad, handle=handle, sync=False)
        (grad_out,) = ctx.memory
        rows = _Rows.of(routed.x, routed.scales, handle, zeros=True).of_length(ctx.rows, grad_out)
        if ctx.mxfp8:
            return rows.given(ctx.counts, ctx.dtype), None, None, None
        return rows.x.to(ctx.dtype, copy=grad_out is None), None, None, None


def _combined(handle: Handle, rows: torch.Tensor, sms: int, **tensors: Any) -> Any:
    """Combine: add up a token's rows on each rank in float32, and round the sums before they travel."""
    with CollectiveCall(handle.rounds):
        options = combining.Options(False, rows.dtype, limit_of(rows, sms))
        return combining.combine(handle.rounds, combining.Request(options), rows.contiguous(), handle, **tensors)


def _is_mxfp8(name: str, recipe: Any) -> bool:
    """Return whether there is a recipe; Unsupported if it is another one than MXFP8BlockScaling."""
    if recipe is None:
        return False
    known: Any = getattr(sys.modules.get("transformer_engine.common.recipe"), "MXFP8BlockScaling", ())
    if not isinstance(recipe, known):
        raise Unsupported(f"{name}: {type(recipe).__name__}; see moecomm.compat.te_ep for what is not supported")
    return True


def _grouped(
    values: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return TransformerEngine's tensor of MXFP8 rows by expert, which its grouped GEMMs take."""
    assert counts is not None, "a dispatch has set them"
    native: Any = importlib.import_module("transformer_engine_torch")
    tensors = "transformer_engine.pytorch.tensor"
    quantizer = importlib.import_module(f"{tensors}.mxfp8_tensor").MXFP8Quantizer
    grouped: torch.Tensor = importlib.import_module(f"{tensors}.grouped_tensor").GroupedTensor(
        shape=tuple(values.shape),
        dtype=dtype,
        num_tensors=counts.numel(),
        quantizer=quantizer(native.DType.kFloat8E4M3, rowwise=True, columnwise=False),
        data=values.flatten(),
        scale_inv=scales.flatten(),
        first_dims=counts,
        tensor_offsets=native.splits_to_offsets(counts, values.shape[1]),
    )
    return grouped


def _of_length(rows: torch.Tensor, length: int, memory: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows padded with zeros to `length`; in the caller's tensor, if it is given."""
    missing = length - len(rows)
    if memory is None:
        return rows if missing <= 0 else torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])
    with torch.no_grad():
        memory[: len(rows)].copy_(rows)
        memory[len(rows) :].zero_()
    return memory.detach()


def _check_memory(
    name: str, memory: Any, like: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, cast: bool
) -> None:
    """Raise BadInput unless a caller's tensor can hold rows of this shape and dtype, or their values and scales."""
    if memory is None:
        return
    rows, *columns = shape
    if rows is None:
        raise BadInput(name, "a tensor", "None, or recv_capacity_per_rank in ep_bootstrap")
    if not isinstance(memory, torch.Tensor) or memory.layout is not torch.strided or not memory.is_contiguous():
        raise BadInput(name, described(memory), f"a contiguous tensor {list(shape)}")
    if not cast:
        check_tensor(name, memory, device=like.device, dtypes=(dtype,), shape=shape)
        return
    check_tensor(name, memory, device=like.device, dtypes=(memory.dtype,), shape=tuple(memory.shape))
    hidden = int(columns[0] or 0)
    if memory.nbytes < (need := rows * (hidden + hidden // _MXFP8_BLOCK)):
        raise BadInput(name, f"{memory.nbytes} bytes", f"at least {need}, for values and scales")


def _bootstrapped(name: str) -> _Group:
    if _group is None:
        raise BadInput(name, "no ep_bootstrap before it", "ep_bootstrap first")
    return _group


def symm_mem_alloc(*shape: Any, **options: Any) -> NoReturn:
    """Unsupported: memory for zero_copy."""
    raise Unsupported("symm_mem_alloc: there is no zero_copy")


def is_symm_backed(t: torch.Tensor) -> NoReturn:
    """Unsupported: memory for zero_copy."""
    raise Unsupported("is_symm_backed: there is no zero_copy")


def release_symm_mem_pool() -> None:
    """Do nothing: there is no such memory."""


def install_as_te_ep() -> None:
    """Make `transformer_engine.pytorch.ep` this module, in this process: Megatron's `ncclep` then runs over moecomm.

    Call it before Megatron-core is imported.  Idempotent.

    Raises:
        Unsupported: TransformerEngine can't be imported.
    """
    try:
        package = importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        raise Unsupported(f"install_as_te_ep: transformer_engine.pytorch can't be imported ({error})") from error
    module = sys.modules[__name__]
    sys.modules["transformer_engine.pytorch.ep"] = module
    package.ep = module  # type: ignore[attr-defined,unused-ignore]
