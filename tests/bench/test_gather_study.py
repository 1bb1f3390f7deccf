"""moecomm bench all-gather-study without a GPU: its rows, what it refuses, and the study's page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm_bench import gather_study
from moecomm_bench.gather_study import OFF, VARIANTS, Study

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))
US = {1: 30.0, 3: 1000.0, 4: 600.0, 6: 24.0, 8: 15.0}  # of the slower rank


def by_rank(missing: int = 0) -> list[list[dict[str, Any]]]:
    """As run_rank returns it on two ranks, of which the second is slower."""
    found: list[list[dict[str, Any]]] = []
    for share in (0.5, 1.0):
        rows: list[dict[str, Any]] = []
        for number, variant in VARIANTS.items():
            row = {"variant": number, "name": variant.name, "kind": variant.kind}
            if number in US and number != missing:
                rows.append({**row, "us": [share * US[number]]})
            else:
                rows.append({**row, "why": OFF if variant.off else "NCCL [lost]"})
        found.append(rows)
    return found


def result(missing: int = 0) -> dict[str, Any]:
    about = {"benchmark": "all-gather-study", "backend": "lsa", "ranks": 2, "replays": 1, "size": 1024, "dtype": "fp16"}
    return json.loads(json.dumps({**about, "rows": gather_study.merge(by_rank(missing))}))


def test_variants_are_those_of_the_source_and_ours() -> None:
    """Published times and speeds belong together; without multicast all variants are measured."""
    assert list(VARIANTS) == list(range(1, 9)) and [n for n, v in VARIANTS.items() if not v.source] == [8]
    for number, variant in VARIANTS.items():
        assert variant.off == (number in (2, 5, 7))
        if variant.ms and variant.tflops:
            assert 2 * 1024**3 / variant.ms / 1e9 == pytest.approx(variant.tflops, rel=0.01)
    published = VARIANTS[6].published()
    assert published is not None and published["of_first"] == 50.3 / 41.4 and VARIANTS[8].published() is None


def test_rows_are_of_the_slower_rank_and_compared_with_the_first_variant() -> None:
    rows = {row["variant"]: row for row in result()["rows"]}
    assert list(rows) == list(VARIANTS) and {number for number, row in rows.items() if "us" in row} == set(US)
    for number, us in US.items():
        assert rows[number]["us"]["p50"] == us
        assert rows[number]["tflops"] == round(2 * 1024**3 / us / 1e6, 2)
        assert rows[number]["of_first"] == pytest.approx(US[1] / us, rel=1e-2)
    assert rows[3]["source"] == {"name": "naiveRemoteRead", "ms": 0.808, "tflops": 2.66, "of_first": 2.66 / 41.4}
    assert rows[8]["source"] is None
    assert all(row["of_first"] is None for row in result(missing=1)["rows"] if "us" in row)


def test_all_variants_get_the_same_values() -> None:
    size = 64
    with moecomm.Window("self", 2 * size * size + (16 << 20), backend="host", signals=2 * size) as window:
        study = Study(window, size)
        for turn in range(2):
            wanted = study.fill_exactly(turn)
            assert torch.equal((study.x.double() @ study.w.double().mT).half(), wanted)
            assert torch.equal(torch.mm(study.own.a.double(), study.own.b.double()).half(), wanted)
            assert wanted.double().abs().max() < 2048, "whole numbers that float16 has"
        assert study.own.a.data_ptr() == window.local.data_ptr() and min(study.executor.staging) >= study.w.nbytes
        assert set(study.calls(None)) | {1} == {number for number, variant in VARIANTS.items() if not variant.off}
        x, w = study.case.inputs(window.device, 0)
        study.fill(x, w)
        assert torch.equal(study.own.a, x) and torch.equal(study.own.b, w.T) and study.case.flops == 2 * size**3


def test_the_page_has_the_figures_of_the_source_and_ours_once_they_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import launches
    import readme
    import study
    import tables

    page = study.PAGE.read_text()
    assert readme.filled(page, study.figures()) == page, "run: python bench/readme.py"
    assert all(f"`{variant.source}`" in page for variant in VARIANTS.values() if variant.source)
    for kind in ("fp16", "fp8"):
        assert f"| {kind} | 1024 |" in page, "what the fused operator took at this size, and NCCL"
    of_today = {"date": "2026-01-02", "commit": "0123abcd", "kernels": tables.digests()}
    load, named = tables.load, tables.names()
    monkeypatch.setattr(study, "names", lambda: [*named, study.RESULT])
    found = {**result(), **of_today, "machine": {"gpus": ["NVIDIA H100 80GB HBM3"] * 2}}
    for module in (study, tables):
        monkeypatch.setattr(module, "load", lambda name: found if name == study.RESULT else load(name))
    monkeypatch.setattr(launches, "noted", lambda commit: launches.today())
    filled = study.figures()
    assert "TFLOP/s | of 1 | 2 H100s, ours: ms | TFLOP/s | of 1 |" in filled
    assert "(`threadloadGatherThenCutlass`) | two kernels | 0.043 | 50.3 | x1.21 | 0.024 | 89.5 | x1.25 |" in filled
    assert "| 8 | moecomm.overlap, tensor cores | one kernel | - | - | - | 0.015 | 143.2 | x2.00 |" in filled
    assert f"[`{study.RESULT}.json`](../../bench/results/{study.RESULT}.json) (2026-01-02, 0123abcd)" in filled
