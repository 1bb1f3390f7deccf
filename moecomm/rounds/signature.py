"""The list of what all ranks must pass alike in one round, packed into the 64 bits that travel in the round header.

Each field is here once.  An option that is not in this list may differ between ranks.  docs/failures.md has the list
for users, and that of calls that are no rounds.

A combine has one table of fields.  A dispatch has three: of rows in a dtype that kernels know, of rows that are given
as bytes, and of rows that are cast to bytes.  Values that find no room are compared by a digest.  Where two ranks
differ, the error names the first field in which they do, with the values that the callers passed.  Of values that only
a digest tells apart, and that another process has packed, it has those of this rank alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import torch

from moecomm.base.choices import BALANCES, Quantize, ScaleLayout
from moecomm.base.protocol import LAYOUTS, SCALE_FORMATS, TYPES

GROW = "asks for a larger buffer"
GROWTH = "dispatch that needs a larger window"  # ahead of it: moecomm/dispatch/growth.py
LAYERS = (1 << 14) - 1  # numbers of layers, from 1
# The calls of users that rounds belong to.
DISPATCHES = (
    "dispatch",
    "dispatch_begin",
    "dispatch in chunks",
    "moe",
    "moe in chunks",
    "fused moe",
    "fused moe in chunks",
    "backward of combine",
    "backward of moe",
    "backward of moe in chunks",
    "verification",
    "moe in INT8",  # whose rows look like those in FP8
    "moe in INT8 in chunks",
    "moe that measures",  # its forms behind this round, with all ranks
    "moe that measures in INT8",
    GROWTH,
)
COMBINES = ("combine", "moe", "backward of dispatch", "backward of moe")

_Field = tuple[str, int, Sequence[object]]  # name, bits, meaning of each value; none: the number itself
_NO_YES = (False, True)
_DTYPES = tuple(TYPES)
_LAYOUT: _Field = ("layout", 2, LAYOUTS)
_LAYER: _Field = ("layer", LAYERS.bit_length(), ())  # 0: has no number
_GRADIENTS: _Field = ("gradients wanted", 1, _NO_YES)  # of moecomm.ops: all ranks take part in a backward pass
_WEIGHTS: _Field = ("weight_grads given", 1, _NO_YES)  # of a dispatch: by its backward pass
QUANTIZED = (None, *get_args(Quantize))
# Dtypes of payloads.  Another one shares the last value, and a digest tells it apart.
_OTHERS = (
    *("int8", "bool", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("int16", "uint8", "uint16", "int32", "uint32"),
)
_ANOTHER = "another dtype"
_KNOWN = (*_DTYPES, *(getattr(torch, name) for name in _OTHERS))
ROW_DTYPES = (*dict.fromkeys(_KNOWN), _ANOTHER)
_PLAIN_SCALES = (torch.float32, torch.int32, torch.uint8, torch.int16, torch.float8_e8m0fnu)
SCALE_DTYPES = (None, *dict.fromkeys((*_PLAIN_SCALES, *_KNOWN)), _ANOTHER)
_FP32_SCALES = SCALE_DTYPES.index(torch.float32)
_FORM: _Field = ("", 2, ())  # the lowest bits of a dispatch: which table it has
_DISPATCH: tuple[_Field, ...] = (
    _FORM,
    ("call", 4, DISPATCHES),
    _LAYOUT,
    ("handle given", 1, _NO_YES),
    ("topk_idx dtype", 1, ("int32", "int64")),
    ("quantize", 4, QUANTIZED),
    ("scale_layout", 2, get_args(ScaleLayout)),
    _GRADIENTS,
    _WEIGHTS,
    ("balance", 1, (None, *BALANCES)),
    (GROW, 1, _NO_YES),
)
_PLAIN: tuple[_Field, ...] = (
    _FORM,
    _LAYER,
    *_DISPATCH[1:],
    ("dtype", 3, ROW_DTYPES),
    ("scales", 3, SCALE_DTYPES),
    ("scale bytes", 12, ()),
    ("expert_alignment", 12, ()),
)
_DIGEST, _ROW = "payload", "row bytes"
_LONG = ("layer", "scale bytes", "expert_alignment")  # fields of some words, and values of digests
_BYTES_SHIFT = 26  # of 64 bits of a digest
_BYTES: tuple[_Field, ...] = (
    *(field for field in _DISPATCH if field[0] != "quantize"),  # None
    ("dtype", 5, ROW_DTYPES),
    ("scales", 5, SCALE_DTYPES),
    (_DIGEST, 38, ()),
)
# The last 32 bits are a digest, plus by XOR those of the global scale, which a kernel may add.
_SCALE = "x_global_scale"
_CAST: tuple[_Field, ...] = (*_DISPATCH, (_DIGEST, 12, ()), (_SCALE, 32, ()))
_FORMS = (_PLAIN, _BYTES, _CAST)
SCALE_SHIFT = 32  # of the bits of the global scale: compare_scale of csrc/protocol/args.h
_WIRES = (*_DTYPES[:3], "fp8", "int8", "rows")
ROWS_WIRE = _WIRES.index("rows")  # of rows that travel unsummed, whatever their dtype
_COMBINE: tuple[_Field, ...] = (
    _LAYER,
    ("call", 2, COMBINES),
    _LAYOUT,
    ("dtype", 3, _DTYPES),
    ("wire", 3, _WIRES),
    ("weighted", 1, _NO_YES),
    _WEIGHTS,
    ("topk_weights given", 1, _NO_YES),
    _GRADIENTS,
)
_ELSEWHERE = "another, which the error of that rank names"
_ALL, _LOW = (1 << 64) - 1, (1 << SCALE_SHIFT) - 1
_packed: dict[int, _Packed] = {}  # by word, without the bits to which a scale is added


class _Packed(NamedTuple):
    """A word of this process, and the values of which it has a digest."""

    word: int
    others: dict[str, object]


def pack(op: str = "dispatch", /, others: Mapping[str, object] | None = None, **fields: int) -> int:
    """Pack the fields of a call (names with underscores) into one integer.

    Args:
        op: "combine", "dispatch", or "payload": a dispatch of rows that travel as bytes.
        others: of a dispatch: what its table has no field for, by name.  Equal values have equal texts.
        fields: values; those that are not given are 0.
    """
    if op == "combine":
        return _word(_COMBINE, fields)
    if (
        op == "dispatch"
        and not others
        and max(fields.get("scale_bytes", 0), fields.get("expert_alignment", 0)) < 1 << 12
    ):
        return _word(_PLAIN, fields)
    kept: dict[str, object] = {name: fields.get(name.replace(" ", "_"), 0) for name in (*_LONG, _ROW)}
    kept.update(others or {})
    casts = fields.get("quantize", 0) != 0
    digest = _digest(kept, fields.get("dtype", 0), fields.get("scales", 0))
    if casts:
        word = _word(_CAST, {**fields, "": 2, _DIGEST: digest >> 52, _SCALE: digest & _LOW})
    else:
        word = _word(_BYTES, {**fields, "": 1, _DIGEST: digest >> _BYTES_SHIFT})
    _packed[_kind(word)] = _Packed(word, kept)
    return word


def index_of(dtypes: Sequence[object], dtype: object) -> int:
    """Return the index of a dtype in ROW_DTYPES or SCALE_DTYPES."""
    return dtypes.index(dtype) if dtype in dtypes else len(dtypes) - 1


def scale_word(value: float) -> int:
    """Return the bits that a global scale on the host adds to a word by XOR: compare_scale of csrc/protocol/args.h."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0]) << SCALE_SHIFT


def shown(word: int, op: str = "dispatch") -> dict[str, str]:
    """Return the fields of a call in words: its layout and dtype, and the others that are not 0.

    `op`: "combine", or any other for a dispatch.
    """
    found = {}
    for name, (value, meaning) in _fields(word, op).items():
        if name not in (_DIGEST, _SCALE) and (value or name in ("layout", "dtype")):
            found[name] = _text(_meant(value, meaning))
    return found | {name: _text(value) for name, value in _others(word, op).items() if value and name not in found}


def difference(mine: int, theirs: int, op: str = "dispatch") -> tuple[str, object, object]:
    """Return the first field in which two calls differ: name, mine, theirs."""
    ours, others = _fields(mine, op), _fields(theirs, op)
    for name, (value, meaning) in ours.items():
        if name not in (_DIGEST, _SCALE) and name in others and value != others[name][0]:
            return name, _meant(value, meaning), _meant(*others[name])
    packed = None if op == "combine" else _packed.get(_kind(mine))
    if packed is not None and _kind(mine) == _kind(theirs) and _SCALE in ours:
        return _SCALE, _scale(mine & _ALL ^ packed.word), _scale(theirs & _ALL ^ packed.word)
    beside, beside_them = _others(mine, op), _others(theirs, op)
    if beside and beside_them:
        for name in {**beside, **beside_them}:
            pair = beside.get(name), beside_them.get(name)
            if pair[0] != pair[1] and not (name == _ROW and None in pair):
                return name, *pair
    described = ", ".join(
        f"{name} {_text(value)}" for name, value in beside.items() if value and (name, value) != ("expert_alignment", 1)
    )
    return _DIGEST, described or "none", _ELSEWHERE


def _kind(word: int) -> int:
    return word & (_LOW if word & 3 == 2 else _ALL)


def _scale(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits >> SCALE_SHIFT))[0])


def _digest(others: Mapping[str, object], dtype: int, scales: int) -> int:
    text = repr((others, dtype, scales))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _word(table: Sequence[_Field], fields: Mapping[str, int]) -> int:
    word, at = 0, 0
    for name, bits, _ in table:
        value = fields.get(name.replace(" ", "_"), 0)
        assert 0 <= value < 1 << bits, (name, value)
        word |= value << at
        at += bits
    assert at <= 64, "the bits of RoundHeader::call"
    return word


def _fields(word: int, op: str) -> dict[str, tuple[int, Sequence[object]]]:
    """Return the fields of a call that a word has whole, by name: value, and the meaning of each value."""
    table = _COMBINE if op == "combine" else _FORMS[word & 3]
    found: dict[str, tuple[int, Sequence[object]]] = {}
    for name, bits, meaning in table:
        value = word & ((1 << bits) - 1)
        word >>= bits
        if name == "scales" and table is _PLAIN and found["quantize"][0]:
            found["scale_format"] = int(value > _FP32_SCALES), SCALE_FORMATS
        elif name:
            found[name] = value, meaning
    if table is _BYTES:
        found["quantize"] = 0, QUANTIZED
    return found


def _others(word: int, op: str) -> dict[str, object]:
    """Return the values that have no bits of their own in a word, by name.

    {}: they are known by a digest alone, because another process has packed the word.
    """
    if op != "combine" and word & 3 == 0:
        found = _fields(word, op)
        return {name: found[name][0] for name in _LONG}
    packed = None if op == "combine" else _packed.get(_kind(word))
    return {} if packed is None else packed.others


def _text(value: object) -> str:
    return str(value).removeprefix("torch.")


def _meant(value: int, meaning: Sequence[object]) -> object:
    return meaning[value] if value < len(meaning) else value
