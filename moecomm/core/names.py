"""A name for every Buffer of the process: what stands for it where only tensors, numbers and strings can go."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from moecomm.errors import BadInput, Closed

if TYPE_CHECKING:
    from moecomm.buffer import Buffer

_PREFIX = "moecomm_buffer_"
_numbers = itertools.count()
_buffers: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()


def give(buffer: Buffer) -> str:
    """A name that no other Buffer of this process has, had or will have."""
    name = f"{_PREFIX}{next(_numbers)}"
    _buffers[name] = buffer
    return name


def find(name: str) -> Buffer:
    """The Buffer of that name.

    Raises:
        Closed: it has been closed, or is gone.
        BadInput: no Buffer's name.
    """
    buffer = get(name)
    if buffer is None:
        if not name.startswith(_PREFIX):
            raise BadInput("buffer", repr(name), "the .name of a Buffer of this process")
        raise Closed()
    if buffer.closed:
        buffer.require_open()  # says so
    return buffer


def get(name: str) -> Buffer | None:
    """The Buffer of that name, open or closed, if it is there."""
    return _buffers.get(name)


def every() -> list[Buffer]:
    """All there are, closed ones among them."""
    return list(_buffers.values())
