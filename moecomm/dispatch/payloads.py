"""Payloads: rows of any type and width, and tensors that travel beside them.

A row on the wire is a multiple of 16 bytes, and beside it there is one row of bytes.  pack() gives the tensors of a
dispatch this form, and a Payload reads them again where they arrive.  An executor that casts rows on the way gives them
the form itself: then pack() leaves them as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moecomm.base import formats
from moecomm.base.arrays import as_tensor, check_tensor, refuse_gradients
from moecomm.base.choices import ScaleLayout
from moecomm.dispatch import reference
from moecomm.dispatch.options import Options, check_options
from moecomm.dispatch.routed import Routed
from moecomm.errors import BadInput
from moecomm.gpu import quantize_rows
from moecomm.rounds.rounds import Rounds

RAW = torch.uint8  # the dtype of rows that travel as bytes; no others have it
ROW_ALIGNMENT = 16  # bytes
_WORD = 4  # bytes: packets carry whole words of scales
_SIZES = (1, 2, 4)  # bytes of an element of rows and scales
_MOST_BYTES = 1 << 20  # of a row, and of what travels beside it


class Part(NamedTuple):
    """A tensor of a payload: where its bytes are in a row of bytes."""

    begin: int
    shape: tuple[int, ...]  # without the rows
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of this part in a row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Return the offset of the byte behind this part."""
        return self.begin + self.nbytes

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the part of rows of bytes `[..., n]`: `[..., *shape]`."""
        found = rows[..., self.begin : self.end].view(self.dtype)
        return found.view(*found.shape[:-1], *self.shape)


class Payload(NamedTuple):
    """Layout of a row of bytes that arrives: its values, its scales and the extras beside them."""

    x: Part
    scales: Part | None
    extras: tuple[Part, ...]
    scale_layout: ScaleLayout

    @property
    def compared(self) -> tuple[Part, Part | None, str]:
        """Return what all ranks must pass alike: rows, scales, and extras in words."""
        extras = (f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}" for part in self.extras)
        return self.x, self.scales, ", ".join(extras)

    def tensor(self, name: str, routed: Routed[Any, Any, Any, Any]) -> Any:
        """Return a tensor of Routed, by its name there; of "extras" a tuple."""
        if name == "x":
            return self.x.read(routed.plan.tensor("x", routed).view(RAW))  # type: ignore[union-attr]
        if name == "extras":
            beside = routed.plan.tensor("scales", routed)
            return tuple(part.read(beside) for part in self.extras) if beside is not None else ()
        if name == "scales" and self.scales is not None:
            return self._laid_out(self.scales.read(routed.plan.tensor("scales", routed)))  # type: ignore[arg-type]
        return None if name == "scales" else routed.plan.tensor(name, routed)

    def _laid_out(self, scales: torch.Tensor) -> torch.Tensor:
        if self.scale_layout == "row":
            return scales
        return reference.by_column(scales) if self.scale_layout == "column" else formats.swizzle(scales)


class Packed(NamedTuple):
    """Tensors of a dispatch as the executor takes them.

    Attributes:
        x: rows.
        scales: of rows that the executor casts, the global scale: see arguments.Tensors.
        payload: how they are read; None: as they arrive.
        global_scale: by which rows have been cast, for ranks to compare; None where the executor has it, or none is.
    """

    x: Any
    scales: Any
    payload: Payload | None
    global_scale: float | torch.Tensor | None


def pack(
    rounds: Rounds,
    options: Options,
    x: Any,
    scales: Any,
    extras: Sequence[Any],
    global_scale: Any,
) -> Packed:
    """Give tensors the form in which they travel.

    Args:
        rounds, options, x, scales, extras: of the dispatch.
        global_scale: `x_global_scale`.

    Raises:
        BadInput: a tensor that can't travel.
    """
    if not isinstance(extras, (tuple, list)):
        raise BadInput("extras", type(extras).__name__, "a tuple or list of tensors")
    if global_scale is not None and options.quantize is None:
        raise BadInput("x_global_scale", "a scale", "None, or quantize= of a format that takes one")
    name: object = options.quantize
    layout: object = options.scale_layout
    casts = isinstance(name, str) and (name != "fp8" or rounds.hidden % ROW_ALIGNMENT != 0)
    swizzles = isinstance(layout, str) and layout == "swizzled"
    rows = as_tensor("x", x)[0]
    if scales is None and name is None:
        _check_columns(rounds, rows)
    if not (casts or extras or swizzles or _differs(rounds, rows)):
        if global_scale is not None:
            raise BadInput("x_global_scale", "a scale", f"None with quantize={options.quantize!r}")
        return Packed(x, scales, None, None)
    check_options(options)
    refuse_gradients(x=rows, extras=tuple(extras))
    beside = None if scales is None else as_tensor("scales", scales)[0]
    if isinstance(name, str) and not extras and _casts_on_the_way(rounds, name):
        return _left_to_cast(rounds, options, rows, beside, global_scale)
    given: float | torch.Tensor | None = None
    if options.quantize is not None:
        given = _checked_scale(rounds, options, rows, beside, global_scale)
        how: dict[str, Any] = {"scale_format": options.scale_format, "global_scale": given}
        rows, beside = quantize_rows.cast(rows.detach(), options.quantize, **how)
    if isinstance(given, torch.Tensor) and given.device.type == "cpu":
        given = given.item()
    return Packed(*_packed(rounds, options, rows, beside, extras), given)


def _check_columns(rounds: Rounds, x: torch.Tensor) -> None:
    """Raise BadInput for rows that look like those of the Buffer and are not: combine could not return them."""
    if x.dtype is rounds.dtype and x.ndim == 2 and x.shape[1] != rounds.hidden:
        want = f"hidden = {rounds.hidden}; x.view(torch.uint8) sends other rows"
        raise BadInput("x", f"{x.shape[1]} columns of {rounds.dtype}", want)


def _differs(rounds: Rounds, x: torch.Tensor) -> bool:
    """Return whether rows are of another type or width than those that kernels know."""
    known = x.dtype is rounds.dtype or x.dtype is torch.float8_e4m3fn
    return x.ndim == 2 and (not known or x.shape[1] != rounds.hidden) and x.element_size() in _SIZES


def _checked_scale(
    rounds: Rounds, options: Options, x: torch.Tensor, scales: torch.Tensor | None, global_scale: Any
) -> float | torch.Tensor | None:
    """Check rows that are cast, and return the global scale that formats.check() has."""
    if scales is not None:
        raise BadInput("quantize", "scales beside it", f"{rounds.dtype} rows alone")
    check_tensor("x", x, device=rounds.device, dtypes=(rounds.dtype,), shape=(None, rounds.hidden))
    try:
        given = formats.check(x, options.quantize, options.scale_format, global_scale)[1]
    except BadInput as error:
        if error.argument != "global_scale":
            raise
        raise BadInput("x_global_scale", error.got, error.want) from None
    return given


def _casts_on_the_way(rounds: Rounds, name: str) -> bool:
    """Return whether the executor casts rows to this format.  Ranks of a Buffer agree: packets depend on it."""
    fmt = formats.FORMATS.get(name)
    return name != "fp8" and fmt is not None and rounds.session.casts_formats and fmt.fits_warps(rounds.hidden)


def _left_to_cast(
    rounds: Rounds, options: Options, x: torch.Tensor, scales: torch.Tensor | None, global_scale: Any
) -> Packed:
    """Pack rows that the executor casts; see pack()."""
    given = _checked_scale(rounds, options, x, scales, global_scale)
    scale = _on_host(given) if isinstance(given, float) else given
    x = x.detach()
    if not _are_rows(x, ROW_ALIGNMENT):
        x = x.clone(memory_format=torch.contiguous_format)
    payload = _cast_payload(str(options.quantize), rounds.hidden, options.scale_layout)
    _check_layout(payload)
    return Packed(x, None if scale is None else scale.view(1, 1), payload, None)


@functools.lru_cache(maxsize=64)
def _cast_payload(name: str, hidden: int, layout: ScaleLayout) -> Payload:
    fmt = formats.FORMATS[name]
    scales = None if fmt.scales is None else Part(0, (fmt.scale_columns(hidden),), fmt.scales)
    return Payload(Part(0, (fmt.value_columns(hidden),), fmt.values), scales, (), layout)


@functools.lru_cache(maxsize=64)
def _on_host(value: float) -> torch.Tensor:
    """Return a tensor that nobody writes: the executor reads it when the call is made."""
    return torch.full((1, 1), value, dtype=torch.float32, device="cpu")


def as_they_travel(
    options: Options, x: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows and scales as bytes, as an executor sends them that casts rows on the way."""
    name, hidden = str(options.quantize), x.shape[1]
    on_host = global_scale is not None and global_scale.device.type == "cpu"
    given = global_scale.item() if global_scale is not None and on_host else global_scale
    rows, scales = quantize_rows.cast(x, name, global_scale=given)
    part = _cast_payload(name, hidden, "row").scales
    if scales is None or part is None:
        return rows.view(RAW), None
    return rows.view(RAW), _side_by_side([scales], [part], formats.FORMATS[name].scale_bytes(hidden), 1)


def _packed(
    rounds: Rounds, options: Options, x: torch.Tensor, scales: torch.Tensor | None, extras: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor | None, Payload]:
    _check("x", rounds, x, None, 2, _SIZES)
    tensors = []
    if scales is not None:
        _check("scales", rounds, scales, x.shape[0], 2, _SIZES)
        tensors.append(scales)
    for at, extra in enumerate(extras):
        tensors.append(tensor := as_tensor(f"extras[{at}]", extra)[0])
        _check(f"extras[{at}]", rounds, tensor, x.shape[0], None, (1, 2, 4, 8))
    most = rounds.hidden * rounds.dtype.itemsize
    if (width := x.shape[1] * x.element_size()) > most or width == 0:
        got, own = f"{x.shape[1]} columns of {x.dtype}", f"{rounds.hidden} of {rounds.dtype}, those of the Buffer"
        raise BadInput("x", f"{got}, {width} bytes", f"{own}, or a payload of 1 to {most} bytes a row")
    parts, at, unit = [], 0, ROW_ALIGNMENT if len(tensors) > 1 else _WORD
    for tensor in tensors:
        parts.append(part := Part(at, tuple(tensor.shape[1:]), tensor.dtype))
        at = -(-part.end // unit) * unit
    if at >= _MOST_BYTES:
        raise BadInput("extras" if extras else "scales", f"{at} bytes of a token", f"less than {_MOST_BYTES}")
    payload = Payload(
        Part(0, (x.shape[1],), x.dtype),
        parts[0] if scales is not None else None,
        tuple(parts[1:] if scales is not None else parts),
        options.scale_layout,
    )
    _check_layout(payload)
    beside = _side_by_side(tensors, parts, at, 1) if tensors else None
    wide = -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return _side_by_side([x], [payload.x], wide, ROW_ALIGNMENT), beside, payload


def _check_layout(payload: Payload) -> None:
    if payload.scale_layout != "row" and payload.scales is None:
        raise BadInput("scale_layout", repr(payload.scale_layout), "scales: given, or those of quantize=")
    if payload.scale_layout == "swizzled" and payload.scales is not None and payload.scales.dtype.itemsize != 1:
        raise BadInput("scale_layout", f"'swizzled' of {payload.scales.dtype}", "scales of 1 byte")


def _side_by_side(tensors: Sequence[torch.Tensor], parts: Sequence[Part], nbytes: int, alignment: int) -> torch.Tensor:
    """Return tensors `[T, ...]` as rows of bytes, zeros between them; without a copy where one fills aligned rows."""
    first = tensors[0]
    if len(tensors) == 1 and parts[0].end == nbytes and first.ndim == 2 and _are_rows(first, alignment):
        return first.detach().view(RAW)
    rows = torch.zeros(len(first), nbytes, dtype=RAW, device=first.device)
    for tensor, part in zip(tensors, parts, strict=True):
        part.read(rows).copy_(tensor.detach())
    return rows


def _are_rows(rows: torch.Tensor, alignment: int) -> bool:
    pitch = rows.stride(0) * rows.element_size()
    return rows.stride(1) == 1 and rows.data_ptr() % alignment == 0 and pitch % alignment == 0


def _check(
    name: str, rounds: Rounds, tensor: torch.Tensor, tokens: int | None, ndim: int | None, sizes: tuple[int, ...]
) -> None:
    shape = (tokens, *[None] * ((max(1, tensor.ndim) if ndim is None else ndim) - 1))
    check_tensor(name, tensor, device=rounds.device, dtypes=(tensor.dtype,), shape=shape)
    if tensor.is_complex() or tensor.is_quantized or tensor.element_size() not in sizes:
        raise BadInput(name, str(tensor.dtype), f"elements of {', '.join(map(str, sizes))} bytes")
    if tensor.numel() == 0 and tensor.shape[0]:
        raise BadInput(name, f"shape {tuple(tensor.shape)}", "at least one element a token")
