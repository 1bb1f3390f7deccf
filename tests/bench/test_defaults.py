"""Defaults of commands: smaller ones on CPU ranks, so that each command ends soon on a laptop."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from moecomm_bench import decode, dispatch_combine, latency, moe, ranks, training
from moecomm_bench.cli import app


class Asked(Exception):
    """A command has come to its measurement, with this case."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a command would measure."""

    def stop(*case: Any, **more: Any) -> Any:
        raise Asked(*case)

    for module in (decode, dispatch_combine, moe, training):
        monkeypatch.setattr(module, "run", stop)
    monkeypatch.setattr(ranks, "on_ranks", stop)

    def ask(*words: str) -> tuple[Any, ...]:
        result = CliRunner().invoke(app, [*words, "--backend", "host"])
        assert isinstance(result.exception, Asked), result.output
        return result.exception.args

    return ask


def test_defaults_of_cpu_ranks_are_small(asked: Any) -> None:
    [case] = asked("dispatch-combine")
    assert (case.tokens, case.replays, case.singles) == ([16, 128], 5, 0)
    [case] = asked("sweep")
    assert (max(case.tokens), case.replays) == (256, 5)
    [case] = asked("moe")
    assert (case.tokens, case.replays, case.singles) == ([16, 128], 3, 0)
    assert {model.intermediate for model in case.models} == {16} and case.models[0].name == "deepseek-v3 (I = 16)"
    [step] = asked("decode")
    assert (step.layers, step.steps) == (4, 10)
    [step] = asked("training")
    assert (step.case.tokens, step.layers, step.intermediate) == ([128], 2, 16)
    _, job, _ = asked("latency")
    assert max(job["sizes"]) == 1 << 20 < max(latency.SIZES)


def test_defaults_of_gpus_are_those_of_the_kept_results(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "plan", lambda backend, count: ("lsa", 4))
    [case] = asked("dispatch-combine")
    assert (case.tokens, case.replays, case.singles) == ([128, 4096], 30, 200)
    [case] = asked("moe")
    assert max(case.tokens) == 8192 and case.models[0].name == "deepseek-v3" and case.models[0].intermediate == 2048
