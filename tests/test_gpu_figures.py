"""tests/gpu/run figures: which pieces it runs and when, and what it adds to their results; miniatures on CPU ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moecomm.bench import sources
from moecomm.bench.cli import app

from .gpu import figures
from .gpu import processes as gpu_processes
from .gpu.figures import PIECES, Piece

PRINTS = "import json, sys; json.dump({'commit': %r, 'rows': [1]}, open(sys.argv[-1], 'w')); print('printed')"


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Programs in the place of measurements: two that work, one that fails."""
    monkeypatch.setattr(figures, "BENCH", (sys.executable, "-c", PRINTS % sources.commit()))
    monkeypatch.setattr(figures, "MINIATURES", dict.fromkeys(("a", "b", "c"), ""))
    monkeypatch.setattr(figures, "PIECES", (Piece("first", 50, "a"), Piece("second", 70, "b"), Piece("third", 20, "c")))
    return tmp_path / "out"


def test_pieces_are_named_once_and_measured_by_commands_that_exist() -> None:
    names = [piece.name for piece in PIECES]
    assert len(set(names)) == len(names)
    commands = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}
    assert {piece.words.split()[0] for piece in PIECES} <= commands
    assert {piece.words.split()[0] for piece in PIECES} == set(figures.MINIATURES)
    assert max(piece.seconds for piece in PIECES) < 600


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still but for 12.34 s of each command."""
    now, run = [1000.0], figures._run

    def timed(*given: Any, **more: Any) -> bool:
        now[0] += 12.34
        return run(*given, **more)

    monkeypatch.setattr(figures, "_run", timed)
    monkeypatch.setattr(figures, "time", SimpleNamespace(monotonic=lambda: now[0]))


def test_what_has_no_time_left_waits_and_what_is_done_is_skipped(
    pieces: Path, passing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main(["--miniature", "--out", str(pieces), "--minutes", "1"]) == 0
    said = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert said[:3] == [["first", "ok"], ["second", "later"], ["third", "ok"]]
    found = json.loads((pieces / "first-cpu-2.json").read_text())
    assert found["rows"] == [1] and found["what"] == "first-cpu-2" and found["conditions"]["seconds"] == 12.3
    (pieces / "third-cpu-2.json").write_text(json.dumps({**found, "commit": "another"}))
    assert figures.main(["--miniature", "--out", str(pieces)]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert said[0] == ["first", "done", "before"]
    assert [line[:2] for line in said[1:3]] == [["second", "ok"], ["third", "ok"]]
    assert figures.main(["third", "--miniature", "--again", "--out", str(pieces)]) == 0
    assert capsys.readouterr().out.split()[:2] == ["third", "ok"]
    with pytest.raises(SystemExit):
        figures.main(["fourth", "--out", str(pieces)])
    assert "the pieces are first, second, third" in capsys.readouterr().err


def test_one_that_fails_or_hangs_leaves_no_result_and_the_others_have_theirs(
    pieces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import sys, time; name = sys.argv[1]; time.sleep(60 if name == 'b' else 0)\n"
        "if name == 'a': raise SystemExit('no luck')\n" + PRINTS % sources.commit()
    )
    monkeypatch.setattr(figures, "BENCH", (sys.executable, "-c", program))
    monkeypatch.setattr(gpu_processes, "GRACE_S", 1)
    short = tuple(Piece(piece.name, 2 if piece.words == "b" else 50, piece.words) for piece in figures.PIECES)
    monkeypatch.setattr(figures, "PIECES", short)
    assert figures.main(["--miniature", "--out", str(pieces)]) == 1
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in said[:3]] == [["first", "FAILED"], ["second", "FAILED"], ["third", "ok"]]
    assert said[0][-2:] == ["no", "luck"]
    assert [path.name for path in pieces.glob("*.json")] == ["third-cpu-2.json"]


def test_clocks_are_those_of_busy_gpus() -> None:
    lines = ["0, 1980, 650.5, 60, 100, 1980, 700.00", "1, 345, 70.1, 35, 0, 1980, 700.00", "[N/A]"]
    lines += ["0, 1200, 699.5, 64, 98, 1980, 700.00", "0, 345, 80, 50, 0, 1980, 700", "1, 340, 70, 34, 0, 1980, 700"]
    limits = {"most_sm_mhz": 1980, "power_limit_w": 700, "samples": 2}
    busy = {"sm_mhz": [1200, 1590, 1980], "power_w": [650.5, 675, 699.5], "temperature_c": 64}
    idle: dict[str, Any] = {"sm_mhz": [340, 342.5, 345], "power_w": [70, pytest.approx(70.05), 70.1]}
    assert figures.summary("\n".join(lines)) == [
        {"gpu": 0, **busy, **limits},
        {"gpu": 1, **idle, "temperature_c": 35, **limits},
    ]
    assert figures.summary("nvidia-smi has failed because it could not communicate with the driver") == []


@pytest.mark.parametrize(
    "name", ["decode", *(pytest.param(p.name, marks=pytest.mark.long) for p in PIECES if p.name != "decode")]
)
def test_a_miniature_of_each_piece_runs_on_cpu_ranks(name: str, tmp_path: Path) -> None:
    assert figures.main([name, "--miniature", "--out", str(tmp_path)]) == 0, (tmp_path / f"{name}.log").read_text()
    found = json.loads((tmp_path / f"{name}-cpu-2.json").read_text())
    assert found["rows"] and found["command"] and figures.is_done(tmp_path / f"{name}-cpu-2.json")
