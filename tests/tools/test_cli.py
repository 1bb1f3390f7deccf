"""The command line: what there is, and that starting it is quick."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from moecomm.tools import cli
from moecomm_bench.simulate import cli as simulate

from ..fresh_python import run_python


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        ([], ["demo", "doctor", "launch", "explain", "tune", "bench", "simulate", "trace", "record"]),
        ([], ["routing", "top"]),
        (["bench"], ["dispatch-combine", "sweep", "latency", "all-to-all", "plot"]),
        (["simulate"], ["check", "fit"]),
        (["routing"], ["show", "join", "synthesize"]),
    ],
)
def test_help_names_every_command(
    words: list[str], commands: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["moecomm", *words, "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capfd.readouterr().out
    assert ended.value.code == 0
    assert [command for command in commands if f" {command} " not in said] == []


def test_the_version_is_that_of_the_package(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["moecomm", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert capfd.readouterr().out == f"moecomm {importlib.metadata.version('moecomm')}\n"


@pytest.mark.long
def test_the_results_to_check_do_not_depend_on_the_current_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "bad.json").write_text("no JSON")
    # The moecomm that is tested may be installed without its repository.
    monkeypatch.setattr(simulate, "__file__", str(checkout / "moecomm" / "simulate" / "cli.py"))
    monkeypatch.setattr(sys, "argv", ["moecomm", "simulate", "check", "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0, capfd.readouterr().err
    kept = json.loads((checkout / "bench" / "results" / "simulate-check.json").read_text())
    assert json.loads((tmp_path / "out.json").read_text())["measured"] == kept["measured"]


@pytest.mark.parametrize(("name", "value"), [("MOECOMM_BACKEND", "pigeon"), ("MOECOMM_BACKENDS", "host")])
def test_a_misspelt_setting_is_named(
    name: str, value: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["moecomm", "demo"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"BadInput: {name}: got '{value}'; want ")


def test_a_plot_without_matplotlib_says_how_to_get_it_before_it_reads_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "found.json").write_text("no JSON")
    monkeypatch.setattr(sys, "argv", ["moecomm", "bench", "plot", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    told = capfd.readouterr().err
    assert told.startswith("Unsupported: plots need matplotlib")
    assert "moecomm[bench]" in told


def test_the_command_line_brings_no_plots_and_nothing_of_gpus() -> None:
    told = run_python(
        "-c",
        "import sys, torch; before = set(sys.modules); import moecomm.tools.cli;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})",
    )
    assert told.returncode == 0, told.stderr
    assert not {"matplotlib", "cuda", "cupy", "nccl", "nvshmem", "deep_ep"} & set(told.stdout.split())
