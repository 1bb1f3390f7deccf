"""tests/gpu/run figures: each piece runs, as a miniature on CPU ranks, and one that fails leaves no result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moecomm_bench import sources
from moecomm_bench.cli import app

from .gpu import figures
from .gpu import processes as gpu_processes
from .gpu.pieces import MINIATURES, PIECES, Piece, has_miniature

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "bench"))
PRINTS = """
import json, sys
json.dump({'commit': %r, 'command': '', 'rows': [1]}, open(sys.argv[-1], 'w'))
print('printed')
"""


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Programs in the place of measurements: two that work, one that fails."""
    monkeypatch.setattr(figures, "BENCH", (sys.executable, "-c", PRINTS % sources.commit()))
    small = dict.fromkeys(("a", "b", "c"), "")
    monkeypatch.setattr(figures, "MINIATURES", small)
    monkeypatch.setattr(figures, "has_miniature", lambda piece: piece.words in small)
    monkeypatch.setattr(figures, "PIECES", (Piece("first", 50, "a"), Piece("second", 70, "b"), Piece("third", 20, "c")))
    return tmp_path / "out"


def test_pieces_are_named_once_and_measured_by_commands_that_exist() -> None:
    names = [piece.name for piece in PIECES]
    assert len(set(names)) == len(names)
    commands = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}
    programs = {piece.words.split()[0] for piece in PIECES}
    assert {name for name in programs if not name.endswith(".py")} <= commands | {"tune"}
    assert all((ROOT / "bench" / name).is_file() for name in programs if name.endswith(".py"))
    assert set(MINIATURES) <= programs
    assert max(piece.seconds for piece in PIECES) < 600


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


def of_each_kind() -> list[str]:
    """Names of pieces: one for each command with other options, for a miniature has the values of its command alone."""
    kinds: dict[tuple[str, ...], str] = {}
    for piece in filter(has_miniature, PIECES):
        command, *words = piece.words.split()
        kinds.setdefault((command, *sorted(word for word in words if word.startswith("--"))), piece.name)
    return list(kinds.values())


SMALL = of_each_kind()


@pytest.mark.parametrize(
    "name", ["decode", *(pytest.param(name, marks=pytest.mark.long) for name in SMALL if name != "decode")]
)
def test_a_miniature_of_each_kind_runs_on_cpu_ranks(name: str, tmp_path: Path) -> None:
    assert figures.main([name, "--miniature", "--out", str(tmp_path)]) == 0, (tmp_path / f"{name}.log").read_text()
    (result,) = tmp_path.glob(f"{name}-cpu*.json")
    found = json.loads(result.read_text())
    assert found["rows"] and figures.is_done(result)
    assert f" --json bench/results/{result.name}" in found["command"]
    assert not any(str(folder) in found["command"] for folder in (tmp_path, ROOT))
    assert found["conditions"]["started"] and found["conditions"]["gpus"] == []
