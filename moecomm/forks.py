"""A forked child has its parent's Buffers, and no part in their rounds: they are closed there, unheard by peers."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moecomm.backends import Session
    from moecomm.buffer import Buffer

_closers: weakref.WeakKeyDictionary[Buffer, weakref.finalize[..., Buffer]] = weakref.WeakKeyDictionary()
_of_parent: weakref.WeakSet[Buffer] = weakref.WeakSet()


def closer(buffer: Buffer, session: Session) -> weakref.finalize[..., Buffer]:
    """Closes the session: when it is called, or when the Buffer is gone, or its process ends."""
    made = _closers[buffer] = weakref.finalize(buffer, _close_where_opened, os.getpid(), session)
    return made


def what_is_closed(buffer: Any) -> str:
    """For Closed: what a closed Buffer is called."""
    return "Buffer, opened before this process was forked," if buffer in _of_parent else "Buffer"


def _close_where_opened(process: int, session: Session) -> None:
    """Not in a child of a fork that Python has not seen: peers must not hear from it that its parent left."""
    if os.getpid() == process:
        session.close()


def _disown() -> None:
    """In a child: what its parent has open is closed, and stays open there."""
    for buffer, made in list(_closers.items()):
        if made.detach() is not None:
            _of_parent.add(buffer)


os.register_at_fork(after_in_child=_disown)
