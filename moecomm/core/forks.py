"""A forked child has its parent's Buffers, and no part in their rounds: they are closed there, unheard by peers."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from moecomm.core import names

if TYPE_CHECKING:
    from moecomm.core.session import Session
    from moecomm.core.state import BufferState


def closer(buffer: BufferState, session: Session) -> weakref.finalize[..., BufferState]:
    """Closes the session: when it is called, or when the Buffer is gone, or its process ends."""
    return weakref.finalize(buffer, _close_where_opened, os.getpid(), session)


def _close_where_opened(process: int, session: Session) -> None:
    """Not in a child of a fork that Python has not seen: peers must not hear from it that its parent left."""
    if os.getpid() == process:
        session.close()


def _disown() -> None:
    for buffer in names.every():
        buffer.disown()


os.register_at_fork(after_in_child=_disown)
