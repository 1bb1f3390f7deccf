"""The all-gather study on GPUs: its variants by virtual ranks of one GPU, by processes, and its figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm_bench import gather_study
from moecomm_bench.gather_study import VARIANTS, Study
from moecomm_bench.operators import tried

from ..conftest import Ranks
from .test_overlap import load, warm_allocator
from .test_windows import load_kernels, windows

SIZE = 512
NBYTES = 2 * SIZE * SIZE + (64 << 20)
TURNS = 3


@pytest.mark.gpu1
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_virtual_ranks_compute_the_product(ranks: int) -> None:
    with windows(1, NBYTES, signals=2 * SIZE) as (alone, each):  # loads the kernels of the study
        study = Study(alone[0], SIZE)
        each(lambda _: [make()() for make in study.calls(None).values()], waiting=False)
    with windows(ranks, NBYTES, signals=2 * SIZE) as (opened, each):
        studies = [Study(window, SIZE) for window in opened]
        for study in studies:
            study.own.blocks //= ranks  # blocks of all ranks are resident at once
            study.executor._units //= ranks
        load(studies[0].executor, lambda _: studies[0].fused())
        each(lambda window: (warm_allocator(), torch.mm(studies[window.rank].w, studies[window.rank].w)), waiting=False)
        for turn in range(TURNS):
            for number in studies[0].calls(None):
                wanted = [study.fill_exactly(turn) for study in studies]
                torch.cuda.synchronize()
                found = each(lambda window, number=number: studies[window.rank].calls(None)[number]()())
                for window, result in zip(opened, found, strict=True):
                    window.check()
                    assert torch.equal(result, wanted[window.rank]), (number, turn, window.rank)


def _processes(rank: int, group: Any) -> str:
    """Each variant eagerly, and replayed in a graph with new values."""
    load_kernels()
    with moecomm.Window(group, NBYTES, backend="lsa", timeout_s=20.0, signals=2 * SIZE) as window:
        study = Study(window, SIZE)
        for number, make in study.calls(None).items():
            wanted = study.fill_exactly()
            call = tried(make, window)
            assert call is not None and torch.equal(call(), wanted), (number, "eager")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = [call() for _ in range(2)]
            for turn in range(1, TURNS + 1):
                wanted = study.fill_exactly(turn)
                graph.replay()
                window.check()
                assert all(torch.equal(result, wanted) for result in results), (number, turn)
    return "done"


@pytest.mark.gpu2
@pytest.mark.timeout(120)
def test_processes_compute_the_product(gpu_ranks: Ranks) -> None:
    count = 2 if torch.cuda.device_count() < 4 else 4
    gpu_ranks.start(count, _processes)
    assert gpu_ranks.results(count, timeout_s=100) == dict.fromkeys(range(count), "done")


@pytest.mark.gpu2
@pytest.mark.timeout(120)
def test_every_variant_that_is_not_off_has_figures() -> None:
    rows = gather_study.run(2, "lsa", 2, 100.0)
    assert rows is not None and [row["variant"] for row in rows] == list(VARIANTS)
    for row in rows:
        if VARIANTS[row["variant"]].off:
            assert row["why"] == gather_study.OFF
        else:
            assert "why" not in row and row["tflops"] > 0 and row["of_first"] > 0, row
