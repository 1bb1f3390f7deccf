"""Rounds that are prepared and not run, from the arguments of the calls of a Buffer."""

from __future__ import annotations

from typing import Any

from moecomm import combine, dispatch
from moecomm.buffer import Buffer
from moecomm.dispatch.payloads import pack
from moecomm.dispatch.routed import Handle, Routed
from moecomm.fused import layer
from moecomm.fused import options as layer_options
from moecomm.fused.pipeline import Pipeline


def prepare_dispatch(buffer: Buffer, x: Any, *tensors: Any, **call: Any) -> Routed:
    """A dispatch with the arguments of Buffer.dispatch, and fields of dispatch.Request."""
    request = _request(dispatch.Request, dispatch.Options, call)
    payload = call.pop("scales", None), call.pop("extras", ()), call.pop("x_global_scale", None)
    x, scales, form, scale = pack(buffer.rounds, request.options, x, *payload)
    call.update(scales=scales, payload=form, global_scale=scale)
    routed = dispatch.prepare(buffer.rounds, request, x, *tensors, **call)
    if form is not None:
        routed.inputs = routed.inputs, x, scales, scale  # which nobody else may keep
    return routed


def prepare_combine(buffer: Buffer, y: Any, handle: Handle, **call: Any) -> combine.Combining:
    """A combine with the arguments of Buffer.combine, and fields of combine.Request."""
    return combine.prepare(buffer.rounds, _request(combine.Request, combine.Options, call), y, handle, **call)


def prepare_moe(buffer: Buffer, *tensors: Any, **call: Any) -> Pipeline:
    """A layer with the arguments of Buffer.moe."""
    request = _request(layer_options.Request, layer_options.Options, call)
    return layer.prepare(buffer.rounds, request, *tensors, **call)[0]


def _request(kind: Any, options: Any, call: dict[str, Any]) -> Any:
    """Move the fields of a request and of its options out of the arguments."""
    moved = [{name: call.pop(name) for name in of._fields if name in call} for of in (options, kind)]
    return kind(options(**moved[0]), **moved[1])
