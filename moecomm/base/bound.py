"""Objects that belong to this process: they refer to memory that it shares with other ranks, or to a process group.

They are neither copied nor pickled.  A forked child has no part in the rounds of its parent's Buffers: they are closed
there without a word to peers, as Windows are.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, ClassVar, NoReturn, Protocol

from moecomm.base.weak import WeakTable
from moecomm.errors import Unsupported


class Bound:
    """Base of objects that belong to one process, and are neither copied nor pickled.

    Attributes:
        _instead: what to save or to copy in their place.
    """

    __slots__ = ()
    _instead: ClassVar[str] = "the arguments it was opened with, and open another on every rank"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse the copy module and pickle, and with it torch.save.  Raises Unsupported."""
        name = type(self).__name__
        raise Unsupported(f"a copy or pickle of a {name}, which belongs to this process: save {self._instead}")


class _Opened(Protocol):
    def disown(self) -> None: ...


class _Closable(Protocol):
    def close(self) -> None: ...


_opened: WeakTable[int, _Opened] = WeakTable()  # by id


def closer(owner: _Opened, session: _Closable) -> weakref.finalize[..., Any]:
    """Return a finalizer that closes the session: in run(), when `owner` is collected, or when the process ends.

    After a fork the child calls `owner.disown()`.  `session.close()` must be repeatable, as an interrupt may end it.
    """
    _opened.add(id(owner), owner)
    return weakref.finalize(owner, _close_where_opened, os.getpid(), session)


def run(closing: weakref.finalize[..., Any]) -> None:
    """Call a finalizer of closer(); it can be called again if an interrupt ends that."""
    if (found := closing.peek()) is not None:
        _, function, given, _ = found
        function(*given)
        closing.detach()


def _close_where_opened(process: int, session: _Closable) -> None:
    """Close, except in a forked child that Python has not seen: peers would take its parent for gone."""
    if os.getpid() == process:
        session.close()


def _disown_all() -> None:
    for owner in _opened.values():
        owner.disown()


os.register_at_fork(after_in_child=_disown_all)
