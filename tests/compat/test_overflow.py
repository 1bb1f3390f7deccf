"""deep_ep's calls that wait for the host, with windows for less than arrives: every field is as with room for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moecomm.compat.deep_ep import ElasticBuffer, EPBuffer

from ..few import few
from ..little_room import little_room
from . import test_elastic, test_hybrid, test_normal

CASES: dict[str, Callable[[int], Any]] = {
    "normal": test_normal.test_every_field,
    "elastic": lambda seed: test_elastic.test_without_expanding("ep" if seed % 2 else "elastic", seed, True),
    "expanding": lambda seed: test_elastic.test_expanding("ep" if seed % 2 else "elastic", seed, True),
    "hybrid": lambda seed: test_hybrid.test_every_field(seed, True, seed % 2 == 0),
    "scales by row": lambda seed: test_elastic.test_scales_travel_in_rows_or_columns(
        seed % 2 == 0, False, "e4m3", EPBuffer
    ),
    "scales by column": lambda seed: test_elastic.test_scales_travel_in_rows_or_columns(
        seed % 2 == 0, True, "bytes", ElasticBuffer
    ),
    "hybrid, scales": lambda seed: test_hybrid.test_scales_travel(),
}


@pytest.mark.parametrize("seed", few([4, 6, 12, 18, 21, 27, 33], 6, 27))  # of which each case has enough tokens
@pytest.mark.parametrize("name", CASES)
def test_rounds_in_chunks(name: str, seed: int) -> None:
    with little_room() as counted:
        CASES[name](seed)
    assert counted
