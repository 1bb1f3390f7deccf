"""The formats of weights, and how they are told apart."""

from __future__ import annotations

from typing import Any

from moecomm.base.arrays import as_tensor
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
        packed = NVFP4.kind(*(as_tensor(argument, tensor)[0] for tensor in given))
        if packed.data.dtype is NVFP4.values:
            return packed
    operand = as_operand(argument, given)
    if isinstance(operand, Fp8) and operand.data.dtype is CHANNELS.values:
        return CHANNELS.kind(*operand)
    return as_packed(operand)


def as_packed(w: Any) -> Any:
    """Return a tuple of tensors as weights of four bits if its length and the dtype of its values say so."""
    if type(w) in (tuple, Fp8) and len(w) > 1:
        for of in (MXFP4, NVFP4, PACKED_MXFP4):
            if len(w) == len(of.kind._fields) and getattr(w[0], "dtype", None) is of.values:
                return of.kind(*w)
    return w


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
