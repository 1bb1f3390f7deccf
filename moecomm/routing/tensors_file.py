"""Files of named tensors in the layout of safetensors: a bounded parser, and a writer.

8 bytes with the length of the header (little-endian), the header in JSON, then the tensors, which cover the rest
without gaps. Nothing in such a file is code. https://huggingface.co/docs/safetensors has the format.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from moecomm.errors import BadInput

Arrays = dict[str, npt.NDArray[Any]]

_TYPES: dict[str, np.dtype[Any]] = {"I16": np.dtype("<i2"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_METADATA = "__metadata__"
_LENGTH = 8  # bytes in front of the header
_MOST_HEADER = 16 << 20  # bytes
_MOST_DIMENSIONS = 2
# Non-blocking: a FIFO of that name must not stop the caller.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def write(path: Path, metadata: dict[str, str], arrays: Arrays) -> None:
    """Write a file.  Readers see the previous file or this one, complete.  Raises OSError."""
    header: dict[str, Any] = {_METADATA: metadata}
    begin = 0
    for name, array in arrays.items():
        end = begin + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(_LENGTH, "little") + text)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, str], Arrays]:
    """Return metadata and tensors of a file.  Raises BadInput that says what is wrong with it."""
    try:
        descriptor = os.open(path, _READ_FLAGS)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                refuse(path, "not a regular file")
            data = file.read()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        refuse(path, str(error))
    return parse(path, data)


def parse(path: Path, data: bytes) -> tuple[dict[str, str], Arrays]:
    """Return metadata and tensors of the bytes of a file."""
    length = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH or length > min(len(data) - _LENGTH, _MOST_HEADER):
        refuse(path, f"{len(data)} bytes do not hold the header")
    try:
        header = json.loads(data[_LENGTH : _LENGTH + length], object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        refuse(path, f"the header is no JSON ({error})")
    if not isinstance(header, dict):
        refuse(path, "the header is no JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse(path, f"{_METADATA} is no map of strings")
    return metadata, _arrays(path, header, memoryview(data)[_LENGTH + length :])


def refuse(path: Path, why: str) -> NoReturn:
    """Raise BadInput for a file that cannot be read."""
    raise BadInput("routing", f"{str(path)!r}: {why}", "a file that moecomm.routing has written") from None


def _arrays(path: Path, header: dict[str, Any], data: memoryview) -> Arrays:
    entries = [(*_entry(path, name, about), name) for name, about in header.items()]
    found, end = {}, 0
    for first, last, dtype, shape, name in sorted(entries, key=lambda entry: entry[:2]):
        if first != end or last > len(data):
            refuse(path, f"tensor {name!r} lies at bytes {first} to {last} of {len(data)}, and {end} is next")
        found[name] = np.frombuffer(data[first:last], dtype).reshape(shape)
        end = last
    if end != len(data):
        refuse(path, f"{len(data) - end} bytes behind the last tensor")
    return found


def _entry(path: Path, name: str, about: Any) -> tuple[int, int, np.dtype[Any], tuple[int, ...]]:
    """Return where a tensor begins and ends, its dtype and its shape."""
    if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"tensor {name!r} does not have dtype, shape and data_offsets")
    kind, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(kind, str) or kind not in _TYPES:
        refuse(path, f"tensor {name!r} is neither of {', '.join(_TYPES)}")
    if not (_are_sizes(shape) and len(shape) <= _MOST_DIMENSIONS and _are_sizes(offsets) and len(offsets) == 2):
        refuse(path, f"shape or data_offsets of tensor {name!r} are no sizes")
    if offsets[1] - offsets[0] != math.prod(shape) * _TYPES[kind].itemsize:
        refuse(path, f"tensor {name!r} of shape {shape} has {offsets[1] - offsets[0]} bytes")
    return offsets[0], offsets[1], _TYPES[kind], tuple(shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
