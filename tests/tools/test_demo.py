"""The main job: what it finds, that it sees a wrong output, and how it ends when a rank fails or a person gives up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import moecomm
from moecomm.fused.weights import expert_weights
from moecomm.router import router
from moecomm.tools import cli, demo
from moecomm.tools.demo_layer import reference

from ..fresh_python import beside_packages
from ..live import alive, children_of, wait_until


@pytest.mark.long
def test_deepseek_v3_over_four_ranks_equals_the_single_rank() -> None:
    result = demo.demo(ranks=4, tokens=48, intermediate=16, backend="host")
    assert result.ok and result.backend == "host"
    gate = router("deepseek-v3")
    pairs = remote = 0
    for rank in range(4):
        topk_idx, _ = gate(demo.hidden_states(48, 7168, first=48 * rank))
        for token in topk_idx.tolist():
            owners = {expert // 64 for expert in token}
            pairs, remote = pairs + len(owners), remote + len(owners - {rank})
    rows = {layout.layout: layout.rows for layout in result.layouts}
    assert rows == {"flat": pairs, "expert": 4 * 48 * 8, "batched": 4 * 48 * 8}
    for layout in result.layouts:
        assert 0 < layout.of_bound <= 1
        assert layout.dispatched_bytes == remote * 7168 * 2
        assert layout.combined_bytes == remote * 7168 * (2 if layout.layout == "flat" else 4)
        assert 0 < layout.dispatch_s < 10 and 0 < layout.combine_s < 10


def test_the_command_prints_the_table(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "moecomm",
            "demo",
            "--model",
            "mixtral-8x7b",
            "--ranks",
            "3",
            "--tokens",
            "8",
            "--intermediate",
            "8",
            "--backend",
            "host",
        ],
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said, progress = capfd.readouterr()
    assert ended.value.code == 0
    assert "0/6 after 0 s: weights of the experts" in progress
    assert "backend host: asked for" in said
    assert "3 ranks x 8 tokens" in said
    assert [line.split()[:2] for line in said.splitlines() if line.startswith(("expert ", "batched "))] == [
        ["expert", "48"],
        ["batched", "48"],
    ]
    assert "equals the single-rank layer" in said


def test_an_output_beyond_its_bound_is_exit_code_1(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = demo.Case("mixtral-8x7b", 2, 8, 8, "host")
    wrong = demo.Result(case, "host", "asked for", [demo.LayoutResult("flat", 1, 1, 1, 1.0, 1.0, 0.5, 1.01)])
    monkeypatch.setattr(demo, "demo", lambda **_: wrong)
    monkeypatch.setattr(sys, "argv", ["moecomm", "demo"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "differs from the single-rank layer" in capfd.readouterr().out


@pytest.mark.parametrize("wrong", ["a row of another token", "a weight 5% off", "not a number"])
def test_errors_sees_a_wrong_output(wrong: str) -> None:
    case = demo.Case("mixtral-8x7b", 1, 6, 8, "host")
    x = demo.hidden_states(6, 4096)
    topk_idx, weights = router("mixtral-8x7b")(x)
    experts = [expert_weights(expert, 4096, 8) for expert in range(8)]
    right = reference(x, topk_idx, weights, experts).out.to(torch.bfloat16)
    out = right.clone()
    if wrong == "a row of another token":
        out[4] = right[5]
    elif wrong == "a weight 5% off":
        out[4] = (right[4].float() * 1.05).to(torch.bfloat16)
    else:
        out[4, 7] = float("nan")
    steps: list[str] = []
    outputs = {"right": right, "wrong": out}
    errors = demo._errors(case, torch.device("cpu"), x, topk_idx, weights, outputs, steps.append)
    assert steps == ["the same layer on a single rank, expert 0 of 8"]
    assert errors["right"][1] <= 1 < errors["wrong"][1]


def test_hidden_states_follow_the_text() -> None:
    states = demo.hidden_states(3000, 512, first=10).float()
    assert torch.equal(states[5:].to(torch.bfloat16), demo.hidden_states(2995, 512, first=15))
    assert torch.allclose(states.pow(2).mean(dim=1), torch.ones(3000), atol=0.02)
    text = b"".join(path.read_bytes() for path in sorted(Path(moecomm.__file__).parent.glob("*/*.py")))
    contexts = [text[10 + t - demo.CONTEXT + 1 : 11 + t] for t in range(3000)]
    first = {}
    for token, context in enumerate(contexts):
        if (same := first.setdefault(context, token)) != token and len(context) == demo.CONTEXT:
            assert torch.equal(states[same], states[token])  # equal contexts, equal states
            break
    else:
        pytest.fail("no context came twice")
    unlike = next(t for t in range(1, 3000) if contexts[t][-1] != contexts[0][-1])
    assert torch.cosine_similarity(states[0], states[unlike], dim=0) < 0.6


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("ranks", {"ranks": 65}),
        ("ranks", {"ranks": 0}),
        ("ranks", {"model": "mixtral-8x7b", "ranks": 9}),
        ("model", {"model": "gpt-5"}),
        ("tokens, intermediate", {"tokens": 0}),
    ],
)
def test_bad_input_names_the_argument(argument: str, given: dict) -> None:
    with pytest.raises(moecomm.BadInput) as caught:
        demo.demo(backend="host", **given)
    assert caught.value.argument == argument


def test_a_table_fits_eighty_columns() -> None:
    case = demo.Case("deepseek-v3", 4, 4096, 64, "host")
    layouts = [
        demo.LayoutResult(name, 131072, 5_630_000_000, 11_260_000_000, 0.99, 0.99, 0.096, 0.87) for name in demo.LAYOUTS
    ]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    cli.show_demo(demo.Result(case, "host", "no GPU backend can run here", layouts), console)
    assert "…" not in console.export_text()


def start_demo(directory: Path) -> tuple[subprocess.Popen[str], set[int]]:
    """The command, with its temporary files in `directory`; and its ranks, once all have been started."""
    code = (
        # A shell has it ignored in a job.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "sys.argv = ['moecomm', 'demo', '--backend', 'host']; from moecomm.tools.cli import main; main()"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code],
        **beside_packages(directory, TMPDIR=str(directory)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: command.poll() is not None or len(children_of(command.pid)) == 4)
    assert command.poll() is None, command.communicate()[1]
    return command, children_of(command.pid)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
@pytest.mark.long
def test_no_rank_outlives_the_command(number: int, code: int, tmp_path: Path) -> None:
    """Ctrl-C is exit code 130 without a traceback; and even SIGKILL leaves neither a process nor a file."""
    shared = set(Path("/dev/shm").iterdir())
    command, ranks = start_demo(tmp_path)
    command.send_signal(number)
    _, said = command.communicate(timeout=30)
    assert command.returncode == code
    assert "Traceback" not in said
    wait_until(lambda: not any(map(alive, ranks)))
    assert list(tmp_path.iterdir()) == []
    # Others on this machine have files there for a moment.
    wait_until(lambda: set(Path("/dev/shm").iterdir()) <= shared)


@pytest.mark.long
def test_a_killed_rank_surfaces_with_its_name(tmp_path: Path) -> None:
    command, ranks = start_demo(tmp_path)
    os.kill(max(ranks), signal.SIGKILL)
    said, error = command.communicate(timeout=60)
    assert command.returncode == 1 and said == ""
    assert "ProcessEnded: the process was killed by SIGKILL" in error
