"""moecomm bench gemm on the CPU: its JSON against numbers of our own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moecomm.fused import FP8_SCHEDULES, SCHEDULES
from moecomm.router import MODELS
from moecomm_bench import gemm, other_gemms
from moecomm_bench.cli import app

SIZES = ["--hidden", "64", "--intermediate", "64", "--topk", "3", "--experts", "8"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU where there is one")
def test_the_command_measures_every_gemm_and_says_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecomm_bench.ranks.need_gpu", lambda *about: None)  # and times the reference
    out = tmp_path / "found.json"
    words = ["--ranks", "2", "--tokens", "5,24", "--replays", "2", "--every-schedule", "--json", str(out)]
    words += ["--dtype", "bf16,fp8"]
    told = CliRunner().invoke(app, ["gemm", "--model", "mixtral-8x7b", *SIZES, *words], catch_exceptions=False)
    assert told.exit_code == 0 and "of torch" in told.stdout
    found = json.loads(out.read_text())
    assert found["benchmark"] == "gemm" and found["device"] == "cpu" and found["versions"]["torch"] == torch.__version__
    about = [(row["gemm"], row["activation"], row["tokens"], row["columns"], row["depth"]) for row in found["rows"]]
    assert [row["dtype"] for row in found["rows"]] == ["bf16"] * 6 + ["fp8"] * 6
    assert about == 2 * [
        (1, "swiglu", 5, 128, 64),
        (1, "swiglu", 24, 128, 64),
        (1, None, 5, 128, 64),
        (1, None, 24, 128, 64),
        (2, None, 5, 64, 64),
        (2, None, 24, 64, 64),
    ]
    for row in found["rows"]:
        assert row["model"] == "" and row["experts"] == 4 and row["ranks"] == 2 and row["topk"] == 3
        assert 0 < row["rows"] < 2 * 3 * row["tokens"]
        ours = SCHEDULES if row["dtype"] == "bf16" else FP8_SCHEDULES
        others = {"torch"} if row["dtype"] == "bf16" else set()
        assert set(row["us"]) == {*ours, *(("apart",) if row["activation"] else ()), *others}
        assert min(row["us"].values()) > 0 and row["chosen"] in ours
        if others:
            assert row["of_torch"] == pytest.approx(row["us"]["torch"] / row["us"][row["chosen"]], abs=1e-3)
        else:
            assert row["of_torch"] is None


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_all_schedules_are_measured_and_nothing_else(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_alternating", lambda calls, copies, replays: gemm._on_cpu(calls, replays))
    case = gemm.Gemm("", 2, 1, "swiglu", 3, experts=4, columns=128, depth=64, dtype=dtype)
    found = gemm.schedules_of(case, [5, 24], torch.device("cpu"), 1)
    assert [row["tokens"] for row in found] == [5, 24]
    for row in found:
        assert (row["dtype"], row["columns"], row["depth"], row["experts"]) == (dtype, 128, 64, 4)
        assert row["rows"] == int(case.counts(row["tokens"]).sum())
        assert set(row["us"]) == set(SCHEDULES if dtype == "bf16" else FP8_SCHEDULES)
        assert min(row["us"].values()) > 0


def test_figures_count_what_the_gemm_needs() -> None:
    case = gemm.Gemm("", 1, 1, "swiglu", 2, experts=4, columns=2000, depth=3000)
    counts = torch.tensor([100, 0, 399, 1])  # weights of an expert without rows are not read
    work, nbytes = 2 * 500 * 2000 * 3000, 2 * (3 * 2000 * 3000 + 500 * 3000 + 500 * 1000)
    found = case.figures(counts, 10.0)
    assert found == {"tflops": round(work / 1e7, 1), "tbs": round(nbytes / 1e7, 3)}
    nbytes //= 2  # and so is what is cast
    found = dataclasses.replace(case, dtype="fp8").figures(counts, 10.0)
    assert found == {"tflops": round(work / 1e7, 1), "tbs": round(nbytes / 1e7, 3)}


def test_groups_of_deep_gemm_begin_at_multiples_of_128() -> None:
    place, group = other_gemms.padded_rows(torch.tensor([3, 0, 130, 1], dtype=torch.int32))
    assert place.tolist() == [0, 1, 2, *range(128, 258), 384]
    assert group.tolist() == [0] * 128 + [2] * 256 + [3] * 128


def test_counts_are_those_of_one_rank_and_the_same_each_time() -> None:
    (case,) = gemm.gemms([MODELS["qwen3-235b"]], [4])[:1]
    assert (case.experts, case.columns, case.depth) == (32, 3072, 4096)
    counts = case.counts(64)
    assert counts.dtype == torch.int32 and counts.shape == (32,) and torch.equal(counts, case.counts(64))
    assert 0.8 < float(counts.sum()) / (64 * 8) < 1.2
