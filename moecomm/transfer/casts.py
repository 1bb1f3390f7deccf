"""Casts of one expert's weights, by moecomm.fused and moecomm.formats, and the tensors that arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from moecomm import _native
from moecomm.base import formats
from moecomm.base.arrays import check_memory, has_memory
from moecomm.base.protocol import DTYPES, TYPES
from moecomm.base.validation import check_dtype, check_name, check_same_device, check_shape
from moecomm.dispatch.reference import GROUP
from moecomm.errors import BadInput
from moecomm.fused.fp8 import quantize_weights
from moecomm.gpu.quantize_rows import cast
from moecomm.weights.exchange import shown

CASTS = ("fp8", "fp8_token", "int8_token", "int8_group", "mxfp8", "nvfp4", "mxfp4")
_FLOATS = (*DTYPES, torch.float64)
_DTYPES = (
    *_FLOATS,
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)
_LEAST_AMAX = 1e-30  # keeps the factor of NVFP4 weights, and its reciprocal, normal numbers
_NVFP4_RANGE = 2688.0  # the largest value, 6, times the largest scale, 448

Cast = str | torch.dtype | None
Part = tuple[tuple[int, ...], torch.dtype]


class Kind(NamedTuple):
    """One tensor of an expert, and its cast.

    Attributes:
        shape, dtype: of the tensor at its source.
        cast: name of a format, a dtype, or None.
        parts: shape and dtype of each tensor that arrives: values; for a format also scales; for NVFP4 also a factor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    cast: Cast
    parts: tuple[Part, ...]

    def apply(self, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cast the tensor of one expert to its parts."""
        name = self.cast
        if name is None or isinstance(name, torch.dtype):
            return (weights.to(self.parts[0][1]),)
        if name == "fp8":
            return tuple(quantize_weights(weights))
        rows = weights.reshape(-1, weights.shape[-1])
        if name != "nvfp4":
            return _quantized(rows, name)
        low, high = torch.aminmax(rows)  # one pass; abs().amax() takes three
        amax = torch.maximum(-low, high).float().clamp(_LEAST_AMAX, torch.finfo(torch.float32).max)
        scale = (torch.full_like(amax, _NVFP4_RANGE) / amax).reshape(1)
        return *_quantized(rows, name, global_scale=scale), scale.reciprocal()


def _quantized(
    rows: torch.Tensor, name: str, *, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast rows, as formats.quantize() does."""
    if rows.device.type != "cpu":
        found, of_found = cast(rows, name, global_scale=global_scale)
        assert of_found is not None
        return found, of_found
    rows, fmt = rows.contiguous(), formats.FORMATS[name]
    (count, columns), (values, scales) = rows.shape, (fmt.value_columns, fmt.scale_columns)
    to = torch.empty(count, values(columns), dtype=fmt.values)
    of_to = torch.empty(count, scales(columns), dtype=fmt.scales)
    given = 1.0 if global_scale is None else float(global_scale)
    addresses = to.data_ptr(), of_to.data_ptr(), rows.data_ptr()
    _native.cast_rows(name, *addresses, TYPES[rows.dtype], count, columns, given)
    return to, of_to


def kinds_of(shapes: Any, dtype: Any, cast: Any) -> dict[str, Kind]:
    """Check the arguments of WeightTransfer, and return the tensors of an expert by name.

    Raises:
        BadInput: names the argument.
    """
    if not isinstance(shapes, Mapping) or not shapes or not all(isinstance(name, str) for name in shapes):
        raise BadInput("shapes", repr(shapes), "shapes by name")
    for argument, given in (("dtype", dtype), ("cast", cast)):
        if isinstance(given, Mapping) and (unknown := set(given).difference(shapes)):
            raise BadInput(argument, f"a tensor {min(map(repr, unknown))}", " or ".join(map(repr, shapes)))
    found = {}
    for name, shape in shapes.items():
        kind: Any = dtype.get(name) if isinstance(dtype, Mapping) else dtype
        to: Any = cast.get(name) if isinstance(cast, Mapping) else cast
        check_dtype("dtype", kind, _DTYPES)
        sizes = check_shape("shapes", shape)
        found[name] = Kind(sizes, kind, to, _parts(sizes, kind, to))
    return found


def _parts(shape: tuple[int, ...], dtype: torch.dtype, cast: Any) -> tuple[Part, ...]:
    if cast is None:
        return ((shape, dtype),)
    if isinstance(cast, torch.dtype):
        check_dtype("cast", cast, _FLOATS)
        check_dtype("dtype", dtype, _FLOATS)
        return ((shape, cast),)
    check_name("cast", cast, CASTS)
    check_dtype("dtype", dtype, DTYPES)
    if len(shape) < 2 or 0 in shape:
        raise BadInput("shapes", shape, f"[..., N, K] with cast={cast!r}")
    (*more, rows, columns), fmt = shape, formats.FORMATS[cast]
    if columns * fmt.bits % 8:
        raise BadInput("shapes", shape, f"an even number of columns with cast={cast!r}")
    values = ((*more, rows, fmt.value_columns(columns)), fmt.values)
    if cast == "fp8":
        return values, ((*more, -(-rows // GROUP), -(-columns // GROUP)), torch.float32)
    assert fmt.scales is not None
    if fmt.group == "row":
        return values, ((*more, rows), fmt.scales)
    scales = ((*more, rows, fmt.scale_columns(columns)), fmt.scales)
    return (values, scales, ((), torch.float32)) if cast == "nvfp4" else (values, scales)


def described(kinds: Mapping[str, Kind]) -> dict[str, str]:
    """Return by argument, as text, what all ranks must pass alike."""
    same = shown({name: (kind.shape, kind.dtype) for name, kind in kinds.items()})
    return {**same, "cast": ", ".join(f"{name} {kind.cast}" for name, kind in kinds.items())}


def checked(
    argument: str,
    given: Any,
    wanted: Mapping[str, Sequence[Part]],
    rows: int,
    device: torch.device,
    *,
    written: bool = False,
) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of a rank, each `[rows or more, *shape]`, as lists of the parts of each name.

    Args:
        argument: its name.
        given: what the caller passed.
        wanted: shapes and dtypes of an expert's parts, by name.
        rows: the least rows of each tensor.
        device: of all tensors.
        written: the tensors will be written, so each element needs memory of its own.

    Raises:
        BadInput: names, shapes, dtypes or a device that are not wanted.
        Unsupported: a tensor of torch.func.
    """
    if not isinstance(given, Mapping) or set(given) != set(wanted):
        got = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise BadInput(argument, got, f"tensors by name: {', '.join(wanted)}")
    found: dict[str, list[torch.Tensor]] = {}
    for name, parts in wanted.items():
        tensors = given[name] if isinstance(given[name], tuple) else (given[name],)
        if len(tensors) != len(parts):
            raise BadInput(argument, f"{name}: {len(tensors)} tensors", f"a tuple of {len(parts)}")
        found[name] = []
        for tensor, (shape, dtype) in zip(tensors, parts, strict=True):
            want = f"{name}: {dtype} {[rows, *shape]}, or more rows, on {device}"
            if not isinstance(tensor, torch.Tensor):
                raise BadInput(argument, f"{name}: {type(tensor).__name__}", want)
            check_same_device(**{argument: tensor})
            if dtype is torch.float8_e8m0fnu and tensor.dtype is torch.uint8:
                tensor = tensor.view(dtype)  # as engines hold them
            fits = tensor.ndim > 0 and len(tensor) >= rows and tensor.shape[1:] == shape
            if not fits or tensor.dtype is not dtype or tensor.device != device:
                raise BadInput(argument, f"{name}: {tensor.dtype} {list(tensor.shape)} on {tensor.device}", want)
            shares = any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            if not has_memory(tensor) or (written and shares):
                raise BadInput(argument, f"{name}: elements without memory of their own", want)
            check_memory(argument, tensor)
            found[name].append(tensor.detach())
    return found
