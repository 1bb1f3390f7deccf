"""tests/gpu/run figures: each piece runs, as a miniature on CPU ranks, and one that fails leaves no result."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from moecomm_bench import sources
from moecomm_bench.cli import app
from moecomm_bench.tune import cli as tune

from .gpu import compile, eight, figures, passed, steps  # noqa: A004
from .gpu import processes as gpu_processes
from .gpu.pieces import MINIATURES, PIECES, Piece, has_miniature
from .gpu.steps import Step

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
    assert set(MINIATURES) <= {piece.words.split()[0] for piece in PIECES}
    assert max(piece.seconds for piece in PIECES) <= eight.LONGEST_S
    page = (ROOT / "docs" / "maintainers" / "testing.md").read_text()
    assert f"all pieces add up to {sum(piece.seconds for piece in PIECES) / 60:.0f} minutes" in page


class Parsed(Exception):
    """The words of a program have been read; it measures nothing."""


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_words_of_every_piece_are_those_of_its_program(
    gpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the program's own parser, with the numbers of so many GPUs."""

    def parse(parser: argparse.ArgumentParser) -> None:
        given, unknown = parser.parse_known_args()
        assert not unknown, unknown
        raise Parsed(given)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    fill, parsed = figures.filled_in(gpus, tmp_path), 0
    for piece in (piece for piece in PIECES if 1 < piece.gpus <= gpus):
        name, *words = figures._filled(piece.words, fill).split()
        words += ["--json", str(tmp_path / f"{piece.name}.json")]
        if name.endswith(".py") or name.startswith("tests."):
            monkeypatch.setattr(sys, "argv", [name, *words])
            with pytest.raises(Parsed):
                importlib.import_module(name.removesuffix(".py")).main()
        else:
            command: Any = get_command(tune.app if name == "tune" else app)
            name, *words = words if name == "tune" else (name, *words)
            command.commands[name].make_context(name, words)
        parsed += 1
    assert parsed > 40


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_order_has_every_piece_for_several_gpus_and_nothing_takes_longer_than_it_may(gpus: int) -> None:
    order = [one for one in eight.order(gpus) if one.gpus <= gpus]
    names = [one.name for one in order]
    assert len(set(names)) == len(names)
    assert {piece.name for piece in PIECES if 1 < piece.gpus <= gpus} <= set(names)
    assert {name.replace(steps.RANKS, str(gpus)) for name in eight.ORDER} - set(names) <= FOUR
    assert gpus == 8 or FOUR.isdisjoint(names) == (gpus < 4)
    for one in order:
        assert (one.seconds if isinstance(one, Piece) else one.limit_s) <= eight.LONGEST_S, one.name


FOUR = {piece.name for piece in PIECES if piece.gpus == 4}


def test_what_is_compiled_ahead_has_every_model_and_way_of_the_pieces(tmp_path: Path) -> None:
    """Models and transports of rounds and layers, random cases of so many processes; nothing for put + signal."""
    found = {words[0]: words[1:] for words in figures.compiling(eight.order(8), 8)}
    assert set(found) == {f"tests.gpu.compile{more}" for more in ("", "_rounds", "_models", "_overlap")}
    rounds = found["tests.gpu.compile_rounds"]
    assert rounds[:3] == ["8", "deepseek-v3", "qwen3-235b"] and rounds[-4:] == ["--through", "lsa", "puts", "nic"]
    assert {*found["tests.gpu.compile_models"]} >= {"8", "deepseek-v3", "qwen3-235b", "mixtral-8x7b"}
    assert found["tests.gpu.compile_overlap"] == ["8"]
    asked = compile.parsed(found["tests.gpu.compile"])
    assert (asked.ranks, asked.domains, asked.processes) == (8, True, True)
    assert {of["ranks"] for of, *_ in compile.cases(asked)} == {8}
    few = [piece for piece in PIECES if piece.name in ("all-to-all", "latency-backends")]
    assert figures.compiling(few, 8) == []


def test_what_has_been_compiled_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Until the commit is another, and only if all was compiled."""
    ran, commit, works = list[str](), "0123abcd", False

    def run(command: Sequence[str], log: Path, limit_s: float) -> bool:
        ran.append(command[2])
        return works

    monkeypatch.setattr(figures, "_run", run)
    monkeypatch.setattr(sources, "commit", lambda: commit)
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path))
    rounds = [piece for piece in PIECES if piece.name == "peers"]
    for works, commit, runs in ((False, "a", 1), (True, "a", 2), (True, "a", 2), (True, "b", 3)):  # noqa: B007
        assert figures.compiled(rounds, 8, tmp_path, 60.0) == works
        assert ran == ["tests.gpu.compile_rounds"] * runs


def test_a_step_that_has_passed_at_this_commit_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has failed runs again, after what has not begun."""
    about = {"machine": {"gpus": []}, "date": "2026-01-02", "commit": "0123abcd"}
    monkeypatch.setattr(passed, "_origin", lambda: about)
    monkeypatch.setattr(figures, "all_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(figures, "compiled", lambda *_: True)
    order = [
        Step(name, 50, gpus=2, command=(sys.executable, "-c", f"raise SystemExit({status})"))
        for name, status in (("bad", 3), ("good", 0))
    ]
    late = Step("late", 50, gpus=2, command=(sys.executable, "-c", ""))
    for expected in (["bad FAILED", "good ok"], ["good done", "late ok", "bad FAILED"]):
        assert figures.main(["--out", str(tmp_path)], lambda gpus: order) == 1
        said = [" ".join(line.split()[:2]) for line in capsys.readouterr().out.splitlines()]
        assert said[:-1] == expected
        order.append(late)
    about["commit"] = "another"
    assert not passed.has_passed(tmp_path, "good")


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
