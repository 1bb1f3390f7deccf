"""moecomm record and moecomm routing, as they are typed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moecomm.routing import Recorded, RoutingRecorder, loads
from moecomm.tools.cli import app

from ..fresh_python import run_python

PROGRAM = """
import sys, torch, moecomm, helper
assert __name__ == "__main__" and helper.VALUE == 3
print(sys.argv[1:])
with moecomm.Buffer("self", hidden=16, num_experts=8, topk=2, max_tokens=4, backend="host") as buffer:
    for step in range(4):
        buffer.dispatch(torch.ones(2, 16, dtype=torch.bfloat16), torch.tensor([[step, -1], [7, 0]]), torch.rand(2, 2))
"""
IDS = [row for step in range(4) for row in ([step, -1], [7, 0])]


def run(*words: str) -> str:
    told = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert told.exit_code == 0, told.output
    return told.output


def record(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "moecomm", "record", *words, cwd=folder)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(PROGRAM)
    (tmp_path / "package" / "helper.py").write_text("VALUE = 3")
    return tmp_path


def test_a_program_runs_with_its_own_options_and_is_recorded(program: Path) -> None:
    words = ["--out", "runs/x.routing", "--model", "mine", "--layers", "2", "--weights", "package/program.py"]
    done = record(program, *words, "--out", "y", "-m", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--out', 'y', '-m', '3']\n" and done.stderr == "routing: runs/x.routing\n"
    found = Recorded.load(program / "runs" / "x.routing")
    assert (found.model, found.experts, found.topk, found.layers) == ("mine", 8, 2, ("buffer0.0", "buffer0.1"))
    assert found.topk_idx.tolist() == IDS and found.topk_weights is not None
    assert found.records.tolist() == [[0, 0, 2], [1, 0, 2], [0, 1, 2], [1, 1, 2]]


def test_a_module_is_recorded_and_a_failure_keeps_what_there_was(program: Path) -> None:
    text = PROGRAM.replace(", helper", "").replace(" and helper.VALUE == 3", "") + "sys.exit(7)\n"
    (program / "package" / "main.py").write_text(text)
    done = record(program, "-m", "package.main", "x")
    assert done.returncode == 7, done.stderr
    assert done.stdout == "['x']\n" and done.stderr == "routing: moecomm.routing\n"
    assert Recorded.load(program / "moecomm.routing").topk_idx.tolist() == IDS


def test_a_program_without_dispatches_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('x')")
    done = record(tmp_path, "program.py")
    assert done.returncode == 0 and done.stdout == "x\n"
    assert "no routing was recorded" in done.stderr and not (tmp_path / "moecomm.routing").exists()


def test_what_is_drawn_is_shown_and_joined(tmp_path: Path) -> None:
    file, other = str(tmp_path / "a.routing"), str(tmp_path / "b.routing")
    said = run(
        "routing", "synthesize", file, "--model", "qwen3-30b-a3b", "--tokens", "500", "--zipf", "1", "--seed", "2"
    )
    assert said == run("routing", "show", file)
    found = Recorded.load(file)
    assert "qwen3-30b-a3b: top-8 of 128 experts; 500 tokens" in said
    assert "synthetic, rank 0 of 1, zipf 1, seed 2" in said
    (load,) = loads(found)
    for figure in (load.busiest_expert, *load.busiest_rank.values()):
        assert f"x{figure:.2f}" in said
    assert f"{load.entropy:.2f} bits" in said
    run("routing", "join", file, file, "--out", other, "--layer", "synthetic")
    assert Recorded.load(other).topk_idx.tolist() == found.topk_idx.tolist() * 2


def test_names_of_layers_are_shown_as_they_are(tmp_path: Path) -> None:
    with RoutingRecorder(tmp_path / "x", experts=4, watch=(), model="[red]m") as recorder:
        for layer in ("[bold]a", "b"):
            recorder.add(layer, torch.zeros(2, 1, dtype=torch.int64))
    said = run("routing", "show", str(tmp_path / "x"))
    assert "[bold]a" in said and "[red]m" in said and "\nall" in said and "of 8 ranks" not in said
