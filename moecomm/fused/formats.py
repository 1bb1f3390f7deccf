"""The formats of weights, and how they are told apart."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.base.arrays import as_tensor
from moecomm.errors import BadInput
from moecomm.fused.channels import CHANNELS
from moecomm.fused.fp4 import MXFP4, NVFP4
from moecomm.fused.fp8 import BLOCKS, Fp8, as_operand
from moecomm.fused.packed_mxfp4 import PACKED_MXFP4
from moecomm.fused.weight_format import PLAIN, WeightFormat

# Where w13 and w2 differ in format, that of the smaller number checks both, and says what is wrong.
_ORDER: dict[WeightFormat, int] = {CHANNELS: 0, MXFP4: 1, NVFP4: 1, PACKED_MXFP4: 1, BLOCKS: 2, PLAIN: 3}
_KINDS: dict[type, WeightFormat] = {of.kind: of for of in _ORDER if of.kind is not None}


def as_weights(argument: str, given: Any) -> Any:
    """Convert an array to a torch tensor, or a tuple of arrays to the class that its length and dtype say.

    Raises BadInput.
    """
    if isinstance(given, tuple) and len(given) == len(NVFP4.kind._fields):
        tensors = tuple(as_tensor(argument, tensor)[0] for tensor in given)
        if tensors[0].dtype is NVFP4.values:
            return as_packed(argument, tensors)
    operand = as_operand(argument, given)
    if isinstance(operand, Fp8) and operand.data.dtype is CHANNELS.values:
        if operand.scales.dim() > 2:
            _refuse(argument, *operand)
        return CHANNELS.kind(*operand)
    return as_packed(argument, operand)


def as_packed(argument: str, w: Any) -> Any:
    """Return a tuple of tensors as weights of four bits if its length and the dtype of its values say so.

    Raises BadInput for values of a format of four bits with scales of another one.
    """
    if type(w) in (tuple, Fp8) and len(w) > 1:
        for of in (MXFP4, NVFP4, PACKED_MXFP4):
            if len(w) == len(of.kind._fields) and getattr(w[0], "dtype", None) is of.values:
                if getattr(w[1], "dtype", None) not in of.of_scales:
                    _refuse(argument, w[0], w[1])
                return of.kind(*w)
    return w


def _refuse(argument: str, values: torch.Tensor, scales: Any) -> None:
    of_scales = f"{getattr(scales, 'dtype', type(scales).__name__)} {tuple(getattr(scales, 'shape', ()))}"
    raise BadInput(
        argument,
        f"{values.dtype} values with scales of {of_scales}",
        "a format that is taken: INT8 has float32 scales [E] or [E, N], MXFP4 exponents, and NVFP4 e4m3 scales and "
        "factors; INT4, and INT8 with scales of groups of columns, are not",
    )


def format_of(w: Any) -> WeightFormat:
    """Return the format of weights.  A plain pair, or an Fp8, is CHANNELS where scales have fewer than 3 dimensions."""
    if type(w) is not Fp8 and type(w) in _KINDS:
        return _KINDS[type(w)]
    if not isinstance(w, tuple):
        return PLAIN
    return CHANNELS if len(w) == 2 and getattr(w[1], "ndim", 3) < 3 else BLOCKS


def format_of_both(w13: Any, w2: Any) -> WeightFormat:
    """Return the format of w13 and w2; where they differ, the one that _ORDER has first."""
    return min(format_of(w2), format_of(w13), key=_ORDER.__getitem__)
