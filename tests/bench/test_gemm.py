"""moecomm bench gemm on the CPU: its JSON against numbers of our own."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from moecomm.fused import FP8_SCHEDULES, MXFP4_SCHEDULES, PACKED_SCHEDULES, SCHEDULES
from moecomm_bench import gemm
from moecomm_bench.cli import app

OF_DTYPES: dict[str, dict[str, Any]] = {
    "bf16": SCHEDULES,
    "fp8": FP8_SCHEDULES,
    "mxfp4": MXFP4_SCHEDULES,
    "packed-mxfp4": PACKED_SCHEDULES,
}
SIZES = ["--hidden", "64", "--intermediate", "64", "--topk", "3", "--experts", "8"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU where there is one")
def test_the_command_measures_every_gemm_and_says_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecomm_bench.ranks.need_gpu", lambda *about: None)  # and times the reference
    out = tmp_path / "found.json"
    words = ["--ranks", "2", "--tokens", "5,24", "--replays", "2", "--every-schedule", "--json", str(out)]
    words += ["--dtype", ",".join(OF_DTYPES)]
    told = CliRunner().invoke(app, ["gemm", "--model", "mixtral-8x7b", *SIZES, *words], catch_exceptions=False)
    assert told.exit_code == 0 and "of torch" in told.stdout
    found = json.loads(out.read_text())
    assert found["benchmark"] == "gemm" and found["device"] == "cpu" and found["versions"]["torch"] == torch.__version__
    about = [(row["gemm"], row["activation"], row["tokens"], row["columns"], row["depth"]) for row in found["rows"]]
    assert [row["dtype"] for row in found["rows"]] == [dtype for dtype in OF_DTYPES for _ in range(6)]
    assert about == 4 * [
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
        ours = OF_DTYPES[row["dtype"]]
        others = {"torch"} if row["dtype"] == "bf16" else set()
        assert set(row["us"]) == {*ours, *(("apart",) if row["activation"] else ()), *others}
        assert min(row["us"].values()) > 0 and row["chosen"] in ours
        if others:
            assert row["of_torch"] == pytest.approx(row["us"]["torch"] / row["us"][row["chosen"]], abs=1e-3)
        else:
            assert row["of_torch"] is None


def test_figures_count_what_the_gemm_needs() -> None:
    case = gemm.Gemm("", 1, 1, "swiglu", 2, experts=4, columns=2000, depth=3000)
    counts = torch.tensor([100, 0, 399, 1])  # weights of an expert without rows are not read
    work, nbytes = 2 * 500 * 2000 * 3000, 2 * (3 * 2000 * 3000 + 500 * 3000 + 500 * 1000)
    found = case.figures(counts, 10.0)
    assert found == {"tflops": round(work / 1e7, 1), "tbs": round(nbytes / 1e7, 3)}
    nbytes //= 2  # and so is what is cast
    found = dataclasses.replace(case, dtype="fp8").figures(counts, 10.0)
    assert found == {"tflops": round(work / 1e7, 1), "tbs": round(nbytes / 1e7, 3)}
    nbytes -= 3 * 2000 * 3000 // 2  # weights alone are smaller
    found = dataclasses.replace(case, dtype="packed-mxfp4").figures(counts, 10.0)
    assert found == {"tflops": round(work / 1e7, 1), "tbs": round(nbytes / 1e7, 3)}
    nbytes = 3 * 2000 * 3000 // 2 + 2 * (500 * 3000 + 500 * 1000)
    found = dataclasses.replace(case, dtype="mxfp4").figures(counts, 10.0)
    assert found == {"tflops": round(work / 1e7, 1), "tbs": round(nbytes / 1e7, 3)}


class DeepGemm:
    """Stands in for deep_gemm 2.x: its contiguous and masked GEMMs, by torch."""

    def m_grouped_fp8_gemm_nt_contiguous(self, x: Any, w: Any, out: torch.Tensor, group: torch.Tensor) -> None:
        wide, of_group = widen(x, 1), widen(w, 128)
        for i, expert in enumerate(group.tolist()):
            out[i] = of_group[expert] @ wide[i]

    def fp8_m_grouped_gemm_nt_masked(self, x: Any, w: Any, out: torch.Tensor, counts: torch.Tensor, most: int) -> None:
        raise RuntimeError("Assertion error: expected_m [sm90]")

    def m_grouped_bf16_gemm_nt_contiguous(self, x: Any, w: Any, out: torch.Tensor, group: torch.Tensor) -> None:
        for i, expert in enumerate(group.tolist()):
            out[i] = w[expert] @ x[i]

    def m_grouped_bf16_gemm_nt_masked(self, x: Any, w: Any, out: torch.Tensor, counts: torch.Tensor, most: int) -> None:
        flat, rows_of_x = out.view(-1, out.shape[2]), x.view(-1, x.shape[2])
        for expert, rows in reversed(list(enumerate(counts.tolist()))):  # tiles are stored whole, in any order
            tiles = slice(expert * out.shape[1], expert * out.shape[1] + -(-rows // 64) * 64)
            flat[tiles] = rows_of_x[tiles] @ w[expert].T


def widen(pair: Any, rows: int) -> torch.Tensor:
    data = pair[0].float()
    scales = pair[1].repeat_interleave(128, -1).repeat_interleave(rows, -2)
    return data * scales[..., : data.shape[-2], : data.shape[-1]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU where there is one")
def test_other_libraries_are_measured_and_compared_with_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moecomm_bench.ranks.need_gpu", lambda *about: None)
    monkeypatch.setitem(sys.modules, "deep_gemm", cast("ModuleType", DeepGemm()))
    out = tmp_path / "found.json"
    words = ["--ranks", "2", "--tokens", "5", "--replays", "1", "--json", str(out), "--dtype", "bf16,fp8"]
    told = CliRunner().invoke(
        app, ["gemm", "--model", "mixtral-8x7b", *SIZES, *words, "--others", "deep_gemm"], catch_exceptions=False
    )
    assert told.exit_code == 0
    for row in json.loads(out.read_text())["rows"]:
        form = {"deep_gemm masked"} if row["dtype"] == "bf16" else set()
        theirs = {"deep_gemm", *form} | ({"torch"} if row["dtype"] == "bf16" else set())
        assert theirs <= set(row["us"]) and theirs <= set(row["host_us"] or row["us"])
        ours = {row["chosen"]} if row["activation"] is None else set()
        assert set(row["error"]) == theirs | ours and 0 < max(row["error"].values()) < 0.005
        assert row.get("why", {}).get("deep_gemm masked", "").startswith("RuntimeError") == (row["dtype"] == "fp8")
