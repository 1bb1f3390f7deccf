"""Files of named tensors in the layout of safetensors: a bounded parser, and a writer.

8 bytes with the length of the header (little-endian), the header in JSON, then the tensors, which cover the rest
without gaps. Nothing in such a file is code. https://huggingface.co/docs/safetensors has the format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from moecomm.base.documents import opened
from moecomm.errors import BadInput

Arrays = dict[str, npt.NDArray[Any]]

_TYPES: dict[str, np.dtype[Any]] = {"I16": np.dtype("<i2"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_METADATA = "__metadata__"
_LENGTH = 8  # bytes in front of the header
_MOST_HEADER = 16 << 20  # bytes
_MOST_DIMENSIONS = 2
_MOST_BYTES = 1 << 36  # of a file


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
    """Return metadata and tensors of a file.  Raises BadInput that says what is wrong with it.

    The size that the header states is compared with the file's before the tensors are read.
    """
    try:
        with opened(path, _MOST_BYTES) as file:
            size = os.fstat(file.fileno()).st_size
            metadata, tensors, begin = _header(path, file.read(min(size, _LENGTH + _MOST_HEADER)), size)
            file.seek(begin)
            return metadata, _arrays(tensors, memoryview(file.read(size - begin)))
    except (OSError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        refuse(path, str(error))  # ValueError: a null byte in the name


def _header(path: Path, data: bytes, size: int) -> tuple[dict[str, str], list[_Tensor], int]:
    """Return the metadata of a file of so many bytes, its tensors, and where the first of them begins."""
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
    tensors = sorted(_tensor(path, name, about) for name, about in header.items())
    begin = _LENGTH + length
    end = 0
    for tensor in tensors:
        if tensor.begin != end or tensor.end > size - begin:
            where = f"bytes {tensor.begin} to {tensor.end} of {size - begin}"
            refuse(path, f"tensor {tensor.name!r} lies at {where}, and {end} is next")
        end = tensor.end
    if end != size - begin:
        refuse(path, f"{size - begin - end} bytes behind the last tensor")
    return metadata, tensors, begin


def refuse(path: Path, why: str) -> NoReturn:
    """Raise BadInput for a file that cannot be read."""
    raise BadInput("routing", f"{str(path)!r}: {why}", "a file that moecomm.routing has written") from None


class _Tensor(NamedTuple):
    """Place of a tensor behind the header, and its name, dtype and shape."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: list[int]


def _arrays(tensors: Iterable[_Tensor], data: memoryview) -> Arrays:
    return {one.name: np.frombuffer(data[one.begin : one.end], _TYPES[one.dtype]).reshape(one.shape) for one in tensors}


def _tensor(path: Path, name: str, about: Any) -> _Tensor:
    if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"tensor {name!r} does not have dtype, shape and data_offsets")
    kind, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(kind, str) or kind not in _TYPES:
        refuse(path, f"tensor {name!r} is neither of {', '.join(_TYPES)}")
    if not (_are_sizes(shape) and len(shape) <= _MOST_DIMENSIONS and _are_sizes(offsets) and len(offsets) == 2):
        refuse(path, f"shape or data_offsets of tensor {name!r} are no sizes")
    if offsets[1] - offsets[0] != math.prod(shape) * _TYPES[kind].itemsize:
        refuse(path, f"tensor {name!r} of shape {shape} has {offsets[1] - offsets[0]} bytes")
    return _Tensor(offsets[0], offsets[1], name, kind, shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
