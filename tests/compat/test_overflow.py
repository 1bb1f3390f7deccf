"""deep_ep's calls that wait for the host, with windows for less than arrives: every field is as with room for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moecomm.core.settings import Settings
from moecomm.dispatch import chunks

from ..few import few
from . import test_elastic, test_hybrid, test_normal

CASES: dict[str, Callable[[int], Any]] = {
    "normal": test_normal.test_every_field,
    "elastic": lambda seed: test_elastic.test_without_expanding(seed, True),
    "expanding": lambda seed: test_elastic.test_expanding(seed, True),
    "hybrid": lambda seed: test_hybrid.test_every_field(seed, True, seed % 2 == 0),
    "scales by row": lambda seed: test_elastic.test_scales_travel_in_rows_or_columns(seed % 2 == 0, False, "e4m3"),
    "scales by column": lambda seed: test_elastic.test_scales_travel_in_rows_or_columns(seed % 2 == 0, True, "bytes"),
    "hybrid, scales": lambda seed: test_hybrid.test_scales_travel(),
}


def a_token_of_each_rank(settings: Settings, layout: str, alignment: int = 1, *, rank: int = 0) -> int:
    factor = settings.capacity_factor
    one = replace(settings, max_tokens=1) if factor is None else settings
    return one.worst_rows(layout, alignment, rank=rank)


@pytest.mark.parametrize("seed", few([4, 6, 12, 18, 21, 27, 33], 6, 27))
@pytest.mark.parametrize("name", CASES)  # seeds of which each case has enough tokens
def test_rounds_in_chunks(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, whole = [], chunks.dispatch

    def dispatch(*given: Any) -> Any:
        counted.append(given)
        return whole(*given)

    monkeypatch.setattr(chunks, "dispatch", dispatch)
    with monkeypatch.context() as context:
        context.setattr(Settings, "capacity_rows", a_token_of_each_rank)
        CASES[name](seed)
    found = len(counted)
    CASES[name](seed)
    assert found > 0 and len(counted) == found
