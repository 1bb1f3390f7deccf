"""moecomm bench all-gather-study without a GPU: its rows, what it refuses, and the study's page."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import moecomm
from moecomm_bench.gather_study import VARIANTS, Study

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))


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
