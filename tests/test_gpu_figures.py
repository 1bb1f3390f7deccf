"""tests/gpu/run figures: which pieces it runs and when, and what it adds to their results; miniatures on CPU ranks."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moecomm_bench import sources
from moecomm_bench.cli import app

from .gpu import figures
from .gpu import processes as gpu_processes
from .gpu.pieces import LEFT_OUT, MINIATURES, PIECES, Piece, has_miniature

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


def test_the_documents_say_how_long_all_pieces_take_at_most() -> None:
    page = (ROOT / "docs" / "maintainers" / "testing.md").read_text()
    said = re.search(r"limits of all pieces add up to (\d+) minutes", page)
    assert said and int(said[1]) == math.ceil(sum(piece.seconds for piece in PIECES) / 60)


def kept() -> dict[str, list[dict[str, Any]]]:
    """Results of GPUs in bench/results, by their names without GPU and number."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        if name := re.fullmatch(r"(.*?)-h[12]00(-\d+)?", path.stem):
            found.setdefault(name[1], []).append(json.loads(path.read_text()) | {"path": path.stem})
    return found


def test_every_result_of_gpus_has_a_piece_or_a_reason() -> None:
    """A piece has the benchmark and the name of its results, so that a page finds what it shows."""
    pieces, results = {piece.name: piece for piece in PIECES}, kept()
    assert set(results) <= set(pieces) | set(LEFT_OUT) and not set(pieces) & set(LEFT_OUT)
    assert set(LEFT_OUT) <= set(results), "a reason for nothing"
    for name, of_name in results.items():
        for found in of_name if name in pieces else ():
            piece, words = pieces[name], found["command"].split()
            program = piece.words.split()[0]
            if program.endswith(".py"):
                assert f"bench/{program}" in words, found["path"]
            else:
                assert program in words, found["path"]
            assert (piece.gpus > 1) == bool(re.search(r"-\d$", found["path"])), found["path"]


def test_pieces_measure_the_sizes_that_the_pages_show() -> None:
    import topics

    tokens = {piece.name: piece.words.partition("--tokens ")[2].split()[:1] for piece in PIECES}
    assert len(topics.LAYER_SIZES) == 5
    for name, sizes in topics.LAYER_SIZES.items():
        (measured,) = tokens[re.sub(r"-h\d00-4$", "", name)]
        assert set(map(str, sizes)) <= set(measured.split(",")), name


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
    ("words", "program"),
    [
        ("moe --fp8", [sys.executable, "-m", "moecomm_bench", "moe", "--fp8"]),
        ("tune gemms --rows 8", [sys.executable, "-m", "moecomm", "tune", "gemms", "--rows", "8"]),
        ("passes.py", [sys.executable, str(ROOT / "bench" / "passes.py")]),
    ],
)
def test_a_piece_may_be_a_command_or_a_program(words: str, program: list[str]) -> None:
    assert figures.program(words.split()) == program


def test_results_of_one_gpu_do_not_depend_on_how_many_there_are() -> None:
    one, several = Piece("a", 1, "gemm", gpus=1), Piece("b", 1, "moe")
    assert figures._result(Path("f"), one, "h100-4") == Path("f/a-h100.json")
    assert figures._result(Path("f"), several, "h100-4") == Path("f/b-h100-4.json")


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
