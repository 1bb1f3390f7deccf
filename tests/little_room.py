"""Windows with room for a token of each rank, so that rows of small tests have none, and windows of a fixed size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from moecomm.backends.host import HostSession
from moecomm.dispatch import chunks
from moecomm.ranks.settings import Settings


@contextmanager
def fixed_windows() -> Iterator[None]:
    """Let windows of CPU ranks keep the size that they open with, as those of NCCL and NVSHMEM do."""
    with patch.object(HostSession, "extend", lambda session, nbytes: None):
        yield


@contextmanager
def late_windows() -> Iterator[None]:
    """Let CPU ranks use memory in the third call that asks for it, as GPUs whose peers map it later."""
    extend, offered = HostSession.extend, {}

    def late(session: HostSession, nbytes: int) -> tuple[int, int] | None:
        found, asked = offered.get(id(session)) or (extend(session, nbytes), 0)
        offered[id(session)] = (found, asked + 1) if asked < 2 else None
        return found if asked == 2 else None

    def extending(session: HostSession) -> bool:
        return offered.get(id(session)) is not None

    with patch.object(HostSession, "extend", late), patch.object(HostSession, "extending", property(extending)):
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
