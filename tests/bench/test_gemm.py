"""moecomm bench gemm on the CPU: its JSON against numbers of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moecomm.bench import gemm
from moecomm.bench.cli import app
from moecomm.errors import BadInput
from moecomm.fused import SCHEDULES
from moecomm.router import MODELS

SIZES = ["--hidden", "64", "--intermediate", "48", "--topk", "3", "--experts", "8"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU where there is one")
def test_the_command_measures_every_gemm_and_says_what(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--ranks", "2", "--tokens", "5,24", "--replays", "2", "--every-schedule", "--json", str(out)]
    told = CliRunner().invoke(app, ["gemm", "--model", "mixtral-8x7b", *SIZES, *words], catch_exceptions=False)
    assert told.exit_code == 0 and "of torch" in told.stdout
    found = json.loads(out.read_text())
    assert found["benchmark"] == "gemm" and found["device"] == "cpu" and found["versions"]["torch"] == torch.__version__
    about = [(row["gemm"], row["activation"], row["tokens"], row["columns"], row["depth"]) for row in found["rows"]]
    assert about == [
        (1, "swiglu", 5, 96, 64),
        (1, "swiglu", 24, 96, 64),
        (1, None, 5, 96, 64),
        (1, None, 24, 96, 64),
        (2, None, 5, 64, 48),
        (2, None, 24, 64, 48),
    ]
    for row in found["rows"]:
        assert row["model"] == "" and row["experts"] == 4 and row["ranks"] == 2 and row["topk"] == 3
        assert 0 < row["rows"] < 2 * 3 * row["tokens"]
        assert (
            set(row["us"]) == {*SCHEDULES, *(("apart",) if row["activation"] else ()), "torch"}
            and min(row["us"].values()) > 0
        )
        assert row["of_torch"] == pytest.approx(row["us"]["torch"] / row["us"][row["chosen"]], abs=1e-3)


def test_figures_count_what_the_gemm_needs() -> None:
    case = gemm.Gemm("", 1, 1, "swiglu", 2, experts=4, columns=2000, depth=3000)
    work, nbytes = 2 * 500 * 2000 * 3000, 2 * (4 * 2000 * 3000 + 500 * 3000 + 500 * 1000)
    found = case.figures(500, 10.0)
    assert found == {"tflops": round(work / 1e7, 1), "tbs": round(nbytes / 1e7, 3)}


def test_counts_are_those_of_one_rank_and_the_same_each_time() -> None:
    (case,) = gemm.gemms([MODELS["qwen3-235b"]], [4])[:1]
    assert (case.experts, case.columns, case.depth) == (32, 3072, 4096)
    counts = case.counts(64)
    assert counts.dtype == torch.int32 and counts.shape == (32,) and torch.equal(counts, case.counts(64))
    assert 0.8 < float(counts.sum()) / (64 * 8) < 1.2


def test_what_can_not_be_measured_is_named() -> None:
    with pytest.raises(BadInput, match="model"):
        gemm.sizes(["gpt-5"])
    with pytest.raises(BadInput, match="hidden"):
        gemm.sizes(["mixtral-8x7b"], hidden=0)
    with pytest.raises(BadInput, match="ranks"):
        gemm.gemms([MODELS["mixtral-8x7b"]], [3])
    with pytest.raises(BadInput, match="tokens"):
        gemm.run([MODELS["mixtral-8x7b"]], [4], [], every_schedule=False, replays=1)
