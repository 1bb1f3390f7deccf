"""The examples of Windows: on CPU ranks against a reference, and compiled for GPUs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ..conftest import Ranks

sys.path.append(str(Path(__file__).parents[2] / "examples"))
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="wants g++")


def _ring(rank: int, group: Any) -> list[float]:
    import window_ring as example

    return example.main(group)[:, -1].tolist()


@compiles
@pytest.mark.parametrize("count", [1, 3])
def test_the_ring_gathers_the_rows_of_all_ranks(ranks: Ranks, count: int) -> None:
    assert ranks.run(count, _ring) == [[rank + 10.0 for rank in range(count)]] * count


def heated(rank: int, cells: int) -> torch.Tensor:
    return torch.rand(cells, generator=torch.Generator().manual_seed(rank))


def reference(ranks: int, cells: int, steps: int) -> torch.Tensor:
    now = torch.cat([heated(rank, cells) for rank in range(ranks)])
    for _ in range(steps):
        now = 0.25 * now.roll(1) + 0.5 * now + 0.25 * now.roll(-1)
    return now.view(ranks, cells)


def _halo(rank: int, group: Any, cells: int, steps: int) -> list[float]:
    import window_halo as example

    return example.spread(group, heated(rank, cells), steps).tolist()


@compiles
@pytest.mark.parametrize(("count", "cells", "steps"), [(1, 7, 3), (2, 64, 50), (3, 33, 101)])
def test_heat_spreads_as_on_one_rank(ranks: Ranks, count: int, cells: int, steps: int) -> None:
    found = torch.tensor(ranks.run(count, _halo, cells, steps))
    torch.testing.assert_close(found, reference(count, cells, steps))


@pytest.mark.parametrize("name", ["window_ring", "window_halo"])
def test_the_kernels_compile_without_a_gpu(name: str) -> None:
    pytest.importorskip("cuda.core")
    import importlib

    import window_source

    assert len(window_source.cubin(importlib.import_module(name).SOURCE).code) > 1000
