"""Windows with room for a token of each rank, so that rows of small tests have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from moecomm.dispatch import chunks
from moecomm.ranks.settings import Settings


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
