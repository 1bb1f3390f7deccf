"""Windows with room for a token of each rank, so that rows of small tests have none, and windows of a fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from moecomm import _native
from moecomm.backends.host import HostSession
from moecomm.backends.windows import extensions
from moecomm.backends.windows.extensions import Extensions
from moecomm.dispatch import chunks
from moecomm.ranks.collective import NoRoom
from moecomm.ranks.session import Heap, Session
from moecomm.ranks.settings import Settings


@contextmanager
def fixed_windows(session: type[Session] = HostSession) -> Iterator[None]:
    """Let windows keep the size that they open with, as those of NCCL and NVSHMEM do."""
    with patch.object(session, "extend", lambda session, nbytes, heap: None), patch.object(session, "agrees", False):
        yield


@contextmanager
def late_windows() -> Iterator[None]:
    """Let CPU ranks use memory in the third call that asks for it, as GPUs whose peers map it later."""
    extend, offered = HostSession.extend, {}

    def late(session: HostSession, nbytes: int, heap: Heap) -> tuple[int, int] | None:
        found, asked = offered.get(id(session)) or (extend(session, nbytes, heap), 0)
        offered[id(session)] = (found, asked + 1) if asked < 2 else None
        return found if asked == 2 else None

    def extending(session: HostSession) -> bool:
        return offered.get(id(session)) is not None

    with patch.object(HostSession, "extend", late), patch.object(HostSession, "extending", property(extending)):
        yield


class _HostWindow:
    """An ExtensibleWindow (moecomm.backends.windows) of a CPU rank, whose peers map what its words say."""

    def __init__(self, session: HostSession, take: Callable[..., Any], words: list[int]) -> None:
        self._session, self._take, self._words = session, take, words
        self._end = session._taken

    def extend(self, nbytes: int, kept: ExitStack) -> tuple[int, int, None]:
        self._session._taken = self._session._last = self._end
        if (found := self._take(self._session, nbytes, None)) is None:
            raise NoRoom("the window has no more addresses")
        return *found, None

    def take(self, end: int) -> None:
        self._end = end

    def extent(self, rank: int) -> int:
        if rank == self._session.context.rank:
            return self._end
        return _native.read_word(self._words[rank] + extensions._EXTENTS + 4 * rank) * 4096


@contextmanager
def agreeing_windows() -> Iterator[None]:
    """Let CPU ranks use memory when their peers have mapped it, and agree ahead of larger rounds, as GPUs do."""
    made, take, close = HostSession.__init__, HostSession.extend, HostSession._close
    assert not hasattr(HostSession, "extensions"), "processes that are forked have the windows of the test"

    def make(session: Any, ranks: Any, shape: Any, timeout_s: float) -> None:
        made(session, ranks, shape, timeout_s)
        words: list[int] = []
        session.extensions = Extensions(_HostWindow(session, take, words), ranks, None, timeout_s, lambda: None)  # type: ignore[arg-type]
        words += session.extensions._words

    def ended(session: Any) -> None:
        close(session)
        if session.extensions is not None:
            session.extensions.close()
            session.extensions = None

    late: dict[str, Any] = {
        "__init__": make,
        "_close": ended,
        "extensions": None,
        "agrees": property(lambda session: session.context.shape.ranks > 1),
        "offers": property(lambda session: None if session.extensions is None else session.extensions.offers),
        "extending": property(lambda session: session.extensions.pending),
        "extend": lambda session, *how: session.extensions.extend(*how),
        "admit": lambda session: session.extensions.admit(),
        "grow": lambda session, *how: session.extensions.grow(*how),
    }

    def two_rounds(settings: Settings) -> int:
        return sum(settings._largest_round) + settings._default_reserve

    with ExitStack() as patches:
        patches.enter_context(patch.object(Settings, "default_heap", two_rounds))
        for name, value in late.items():
            patches.enter_context(patch.object(HostSession, name, value, create=True))
        yield


@contextmanager
def little_room() -> Iterator[list[Any]]:
    """Expect a token of each rank, in Buffers whose caller gives no capacity factor.  Lists dispatches in chunks."""
    counted, whole = [], chunks.dispatch

    def dispatch(*given: Any) -> Any:
        counted.append(given)
        return whole(*given)

    with patch.object(Settings, "capacity_rows", _a_token_of_each_rank), patch.object(chunks, "dispatch", dispatch):
        yield counted


def _a_token_of_each_rank(settings: Settings, layout: str, alignment: int = 1, *, rank: int = 0) -> int:
    one = replace(settings, max_tokens=1) if settings.capacity_factor is None else settings
    return one.worst_rows(layout, alignment, rank=rank)
