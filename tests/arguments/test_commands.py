"""Every command x options that make no sense: exit code 2 and a line that says what is wrong, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from moecomm.errors import MoecommError
from moecomm.tools import cli, demo
from moecomm_bench import gemm, ranks

HUGE = ("2147483648", "1180591620717411303424")
WORDS = ("", "x")
SIZES = ("0", "-1", "1.5", *HUGE, "x")  # whole and 1 or more, lists of them too
REALS = ("-1", "nan", *WORDS)
NAMES = ("", "x")
FILES = ("{plain}/x.json", "{folder}")
ROUTING = ("", "{folder}", "{plain}", "{json}", "/none")

COUNTS = ("--hidden", "--topk", "--experts", "--ranks", "--replays")
TABLE: dict[str, dict[tuple[str, ...], tuple[str, ...]]] = {
    "demo": {("--ranks", "--tokens", "--intermediate"): SIZES, ("--model", "--backend"): NAMES},
    "tune": {
        ("--tokens", "--sms", "--chunks", "--replays", "--ranks"): SIZES,
        ("--model", "--layout", "--payload", "--backend"): NAMES,
        ("--json", "--out"): FILES,
    },
    "tune gemms": {
        ("--rows", "--ranks", "--replays"): SIZES,
        ("--model", "--dtype"): NAMES,
        ("--json", "--out"): FILES,
    },
    "tune layers": {
        ("--tokens", "--ranks", "--replays"): SIZES,
        ("--model", "--backend"): NAMES,
        ("--json", "--out"): FILES,
    },
    "bench dispatch-combine": {
        ("--tokens", *COUNTS): SIZES,
        ("--sms", "--chain", "--singles", "--domain-ranks"): SIZES[1:],
        ("--nic",): ("x", "0", "-1", "nan", "50,3,0", "50,3,10,1", "50,3,10"),
        ("--model", "--layout", "--payload", "--mode", "--backend"): NAMES,
        ("--others",): ("x", "deep_ep,"),
        ("--limit",): ("0", *REALS),
        ("--routing",): ROUTING,
        ("--json",): FILES,
    },
    "bench sweep": {
        ("--tokens", *COUNTS): SIZES,
        ("--model", "--layout", "--payload", "--mode", "--backend"): NAMES,
        ("--json",): FILES,
    },
    "bench deep-ep-layer": {("--tokens", *COUNTS): SIZES, ("--model", "--backend"): NAMES, ("--json",): FILES},
    "bench latency": {
        ("--least-bytes", "--replays"): SIZES,
        ("--most-bytes",): ("0", "-1", "1.5", *HUGE[1:], *WORDS),
        ("--backend",): NAMES,
        ("--limit",): ("0", *REALS),
        ("--json",): FILES,
    },
    "bench all-to-all": {
        ("--part-bytes",): ("-1", "1.5", *HUGE[1:], *WORDS),
        ("--ranks",): SIZES,
        ("--backend",): NAMES,
        ("--json",): FILES,
    },
    "bench gemm": {
        ("--tokens", "--intermediate", *COUNTS): SIZES,
        ("--model", "--dtype"): NAMES,
        ("--json",): FILES,
    },
    "bench moe": {
        ("--tokens", "--intermediate", *COUNTS): SIZES,
        ("--room", "--singles"): SIZES[1:],
        ("--sustained",): ("61", *REALS),
        ("--routing",): ROUTING,
        ("--model", "--mode", "--backend"): NAMES,
        ("--json",): FILES,
    },
    "bench transfer": {
        ("--intermediate", "--hidden", "--experts", "--ranks", "--replays"): SIZES,
        ("--model", "--sets", "--cast", "--backend"): NAMES,
        ("--json",): FILES,
    },
    "bench decode": {
        ("--tokens", "--layers", "--steps", "--intermediate", "--hidden", "--topk", "--experts", "--ranks"): SIZES,
        ("--expert-us", "--delay-us"): ("2000000", *REALS),
        ("--routing",): ROUTING,
        ("--model", "--layout", "--payload", "--backend"): NAMES,
        ("--json",): FILES,
    },
    "bench training": {
        ("--tokens", "--layers", "--intermediate", *COUNTS): SIZES,
        ("--routing",): ROUTING,
        ("--model", "--backend"): NAMES,
        ("--json",): FILES,
    },
    "bench all-gather-study": {
        ("--ranks", "--replays"): SIZES,
        ("--backend",): NAMES,
        ("--limit",): ("0", *REALS),
        ("--json",): FILES,
    },
    "bench plot {plain}": {("--out",): FILES},
    "simulate": {
        ("--domains", "--ranks", "--topk", "--experts", "--hidden", "--intermediate"): SIZES,
        ("--chunk-tokens", "--parts"): SIZES,
        ("--num-sms",): SIZES[1:],
        ("--nic-efficiency",): ("1.5", *REALS),
        ("--tokens",): SIZES[1:],
        ("--model", "--layout", "--payload", "--wire", "--algorithm"): NAMES,
        ("--skew", "--nic-gbs", "--nic-latency-us", "--nic-mega-messages", "--nvlink-gbs"): REALS,
        ("--gemm-us", "--gemm-tflops", "--hbm-gbs"): REALS,
        ("--parameters",): ("{folder}", "{plain}", "/none"),
        ("--routing",): ROUTING,
        ("--json", "--plot"): FILES,
    },
    "simulate check {json}": {
        ("--nic-gbs", "--nic-latency-us", "--nic-mega-messages"): REALS,
        ("--parameters",): ("{folder}", "{plain}", "/none"),
        ("--json",): FILES,
    },
    "plan --memory 80": {
        ("--memory",): ("0", *REALS),
        ("--tokens", "--topk", "--experts", "--hidden", "--intermediate", "--layers"): SIZES,
        ("--ranks", "--domain-ranks"): ("3.5", *SIZES),
        ("--us", "--nic-gbs"): REALS,
        ("--model", "--format", "--layout"): NAMES,
        ("--routing",): ROUTING,
        ("--json", "--plot"): FILES,
    },
    "record": {
        ("--layers",): SIZES,
        ("--max-tokens",): ("0", "-1", "1.5", HUGE[1], *WORDS),
        ("--out",): FILES,
    },
    "routing synthesize {new}": {
        ("--tokens",): SIZES,
        ("--zipf",): ("9", *REALS),
        ("--seed",): ("-1", "1.5", *WORDS),
        ("--model",): NAMES,
    },
    "trace merge {folder}": {("--out",): (*FILES, "{new}")},
    "routing join {plain}": {("--out",): (*FILES, "{new}")},
}
ARGUMENTS = (
    "tune --model deepseek-v3 gemms",
    "tune --replays 3 layers",
    "simulate check {folder}",
    "simulate check {plain}",
    "simulate fit {folder} --out {new}",
    "bench plot {folder}",
    "bench show {folder}",
    "bench show {plain}",
    "bench show {json}",
    "record {new}",
    "record -m there.is.none",
    "routing show {folder}",
    "routing show {plain}",
    "routing show {json}",
    "routing show {new}",
    "routing synthesize {folder}",
    "trace merge {folder}",
    "trace merge {plain}",
    "trace merge {new}",
)


COMMANDS: Any = typer.main.get_command(cli.app)  # made once: what each call of a Typer makes takes longer than the rest


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A folder, a file that is no JSON, one that is, and none; and nothing is started."""
    there = {name: tmp_path / name for name in ("folder", "plain", "json", "new")}
    there["folder"].mkdir()
    there["plain"].write_text("no JSON")
    there["json"].write_text("{}")

    def started(*job: Any, **more: Any) -> Any:
        raise MoecommError("started")

    for module, name in ((ranks, "launch"), (demo, "launch"), (gemm, "_weights")):
        monkeypatch.setattr(module, name, started)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path / "cache"))
    return there


def ends(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *, shown: bool = False
) -> tuple[int, str]:
    """Exit code, and what was said on standard error, or shown on standard output."""
    monkeypatch.setattr("sys.argv", ["moecomm", *words])
    with pytest.raises(SystemExit) as ended:
        cli.run(COMMANDS)
    said = capfd.readouterr()
    return int(ended.value.code or 0), said.out if shown else said.err


@pytest.mark.parametrize("command", TABLE)
def test_options_that_make_no_sense(
    command: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for options, values in TABLE[command].items():
        for option in options:
            for value in values:
                words = [word.format(**places) for word in [*command.split(), option, value]]
                code, said = ends(words, monkeypatch, capfd)
                if code != 2 or not said.strip():
                    wrong.append((words, code, said))
    assert wrong == []


@pytest.mark.parametrize("line", ARGUMENTS)
def test_files_that_are_none(
    line: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = ends([word.format(**places) for word in line.split()], monkeypatch, capfd)
    assert code == 2 and said.strip()


@pytest.mark.parametrize("line", ["tune", "tune --backend host", "tune gemms", "tune layers", "bench gemm"])
def test_a_command_that_needs_gpus_refuses_at_once_and_names_its_own_options(
    line: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, said = ends(line.split(), monkeypatch, capfd)
    name, _, text = said.partition(": ")
    assert (code, name) in ((1, "Unsupported"), (2, "BadInput")) and "GPU" in text
    argument, got, _ = text.partition(": got ")
    assert not got or f"--{argument}" in ends([*line.split(), "--help"], monkeypatch, capfd, shown=True)[1]


def test_a_result_has_a_folder_before_it_is_measured(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = places["folder"] / "below" / "x.json"
    assert ends(["bench", "all-to-all", "--json", str(path)], monkeypatch, capfd)[0] == 1
    assert path.parent.is_dir()
