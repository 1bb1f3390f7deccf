"""One line each about the objects that users hold, for repr().  Reads the host's copy of sizes, never the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moecomm import _native

if TYPE_CHECKING:
    from moecomm.buffer import Buffer
    from moecomm.dispatch.plan import Plan
    from moecomm.routed import Handle, Routed


def of_buffer(buffer: Buffer) -> str:
    """Backend, ranks, sizes, memory, and the state of a Buffer."""
    if "name" not in vars(buffer):  # the last thing that its constructor sets
        return "<moecomm.Buffer, not open yet>"
    state = "closed" if buffer.closed else "failed" if buffer.failed else "open"
    return (
        f"<moecomm.Buffer {state}, backend={buffer.backend!r}, rank {buffer.rank} of {buffer.num_ranks}, "
        f"hidden={buffer.hidden}, num_experts={buffer.num_experts}, topk={buffer.topk}, "
        f"max_tokens={buffer.max_tokens}, {buffer.dtype}, {buffer.device}, {buffer.nbytes / 2**20:.1f} MiB>"
    )


def of_handle(handle: Handle) -> str:
    """Layout, tokens, and the rows of a dispatch."""
    return (
        f"<moecomm.Handle layout={handle.layout!r}, {handle.num_tokens} tokens, y {list(handle.y_shape)}, "
        f"{_rank(handle.buffer)}{_half(handle.ended)}>"
    )


def of_routed(routed: Routed[Any, Any, Any, Any]) -> str:
    """Layout, shape and dtype of the rows that arrived.  Makes no tensor of them."""
    plan, args = routed.plan, routed.args
    scales = "" if plan.scales_dtype is None else f", scales {plan.scales_dtype}"
    return (
        f"<moecomm.Routed layout={plan.layout!r}, x {_shape(plan, args)} {plan.x_dtype}{scales}, {plan.device}, "
        f"{_rank(routed.handle.buffer)}{_half(routed.ended)}>"
    )


def of_tensors(name: str, values: dict[str, Any]) -> str:
    """A tuple of tensors and plain values.  Of tensors shape, dtype and device: printing numbers waits for a GPU."""
    return f"<{name} {', '.join(f'{key}={_value(value)}' for key, value in values.items() if value is not None)}>"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype} {value.device}"
    return repr(value)


def _shape(plan: Plan, args: _native.DispatchArgs) -> list[int]:
    return [*plan.rows_shape(args), args.hidden]


def _rank(buffer: Buffer) -> str:
    return f"rank {buffer.rank} of {buffer.num_ranks}, Buffer {'closed' if buffer.closed else 'open'}"


def _half(ended: bool) -> str:
    return "" if ended else ", begun and not ended"
