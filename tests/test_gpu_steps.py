"""tests/gpu/run: it has every test for GPUs, says which step failed, and leaves no process behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moecomm_bench import result_file

from .conftest import GPU_MARKS
from .device import test_kernels_of_gpu_tests
from .gpu import __main__ as runner
from .gpu import compile as compile_rounds
from .gpu import compile_overlap, passed, steps, test_nvlink
from .gpu.steps import PARTS, Step
from .live import alive, wait_until

ROOT = Path(__file__).parent.parent
TESTS = [step for part in PARTS.values() for step in part if step.pytest]
ALL_MARKS = set(GPU_MARKS)
ORIGIN = passed._origin


# One process for all: most of the time goes into what tests import.  From where this one has it: "python -m" would look
# for moecomm here, where it may not have been built.
COLLECT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import pytest

class Count:
    items = -1
    def pytest_collection_finish(self, session):
        self.items = len(session.items)

for words in json.loads(sys.argv[2]):
    count = Count()
    status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *words], plugins=[count])
    print("COLLECTED", int(status), count.items)
"""


def collected(*chosen: tuple[str, ...]) -> list[int]:
    """How many tests pytest finds, each time; it fails for a name that it does not find."""
    command = [sys.executable, "-c", COLLECT, json.dumps(sys.path), json.dumps(chosen)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("COLLECTED")]
    assert [status for status, _ in found] == ["0"] * len(chosen), (done.stdout + done.stderr)[-2000:]
    return [int(items) for _, items in found]


def test_kernels_of_overlapped_operators_are_found_without_a_gpu() -> None:
    assert len(set(compile_overlap.kernels(2))) > 20


def test_kernels_of_random_cases_are_asked_for_in_words_that_are_known() -> None:
    """The steps that compile parse, and a machine of one GPU has no domains of ranks of their own."""
    asked = [step.words for step in PARTS["compile"] if "tests.gpu.compile" in step.words]
    numbers = {steps.GPUS: "1", steps.RANKS: "2"}
    given = [compile_rounds.parsed([numbers.get(word, word) for word in words[3:]]) for words in asked]
    assert {one.domains for one in given} == {False, True}
    assert all(of["ranks"] > 1 for of, _ in test_kernels_of_gpu_tests.rounds_of_domains(1, ranks=1))


@pytest.mark.long
def test_every_test_that_is_named_exists() -> None:
    """Fused layers and others are all layers, on one GPU, on two, on four and on eight."""
    words = {word for step in TESTS for word in step.pytest if word.startswith("tests/")}
    named = tuple(sorted({word.replace(steps.RANKS, str(count)) for word in words for count in steps.COUNTS}))
    assert len(named) > 30
    by_words = sorted({step.pytest for step in TESTS if "-k" in step.pytest})
    all_named, layers, *found = collected(named, (steps.MOE,), *by_words)
    assert all_named > 100 and min(found) > 1
    of_layers = [count for words, count in zip(by_words, found, strict=True) if words[0] == steps.MOE]
    assert len(of_layers) == 8 and sum(of_layers) == layers


def test_every_test_that_wants_gpus_is_in_a_step() -> None:
    """By file and mark.  A step that names single tests of a file counts for all of its marks."""
    named: dict[str, set[str]] = {}
    for step in TESTS:
        marks = {step.pytest[at + 1] for at, word in enumerate(step.pytest) if word == "-m"} or ALL_MARKS
        for word in step.pytest:
            if word.startswith("tests/"):
                named.setdefault(word.partition("::")[0], set()).update(marks)
    missing = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        wanted = set(re.findall(r"pytest\.mark\.(gpu\d)\b", text))
        wanted |= {"gpu2", "gpu4", "gpu8"} if re.search(r"\bGPU_COUNTS\b", text) else set()
        if left := wanted - named.get(name, set()):
            missing[name] = sorted(left)
    assert missing == {} and len(named) > 35


def test_every_kind_of_backend_is_run_with_as_many_ranks_as_have_a_gpu() -> None:
    assert [steps.most_ranks(gpus) for gpus in (1, 2, 3, 4, 7, 8, 16)] == [2, 2, 2, 4, 4, 8, 8]
    words = {word for step in TESTS for word in step.pytest}
    cases = f"{steps.NVLINK}_random_cases_match_the_reference"
    wanted = {kind: f"{cases}[{kind}-{steps.RANKS}]" for kind in test_nvlink.KINDS}
    assert [kind for kind, test in wanted.items() if test not in words] == []


def program(name: str, text: str, *, gpus: int = 4, seconds: int = 60) -> Step:
    return Step(name, seconds, gpus=gpus, command=(sys.executable, "-c", text))


SAY = "import os; print('on', os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['NCCL_NVLS_ENABLE'])"


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runner, "LOGS", tmp_path / "logs")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(passed, "_origin", lambda: {"machine": {"gpus": []}, "date": "2026-01-02", "commit": ""})
    return tmp_path / "logs"


def test_a_step_that_fails_or_is_not_there_fails_the_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, logs: Path
) -> None:
    gone = Step("gone", 60, command=("no-such-program",))
    parts = {"a": [program("good", SAY), program("bad", "print('told'); raise SystemExit(3)")], "b": [gone]}
    monkeypatch.setattr(runner, "PARTS", parts)
    assert runner.main(["a", "b"]) == 1
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [(line[0], line[1], line[4:]) for line in lines[:2]] == [
        ("good", "ok", ["on", "None", "0"]),
        ("bad", "FAILED", ["told"]),
    ]
    assert lines[2][:2] == ["gone", "FAILED"] and lines[3] == ["logs:", str(logs)]
    assert (logs / "bad.log").read_text() == "told\n"
    monkeypatch.setattr(runner, "PARTS", {"a": parts["a"][:1]})
    assert runner.main([]) == 0
    with pytest.raises(SystemExit):
        runner.main(["a", "--beside", "c"])
    assert "c: the parts are a" in capfd.readouterr().err


def test_a_run_notes_what_passed_and_keeps_what_was_noted(
    monkeypatch: pytest.MonkeyPatch, logs: Path, tmp_path: Path
) -> None:
    """The last row of each outcome of a step on a machine; a step whose tests were all skipped has not passed."""
    kept = tmp_path / "kept.json"
    old = {"step": "a", "on": "4 x H200", "outcome": "passed", "tests": 3, "date": "2026-01-02", "commit": "0123abcd"}
    kept.write_text(json.dumps({"rows": [old, old | {"on": "no GPU"}, old | {"on": "no GPU", "outcome": "failed"}]}))
    monkeypatch.setattr(passed, "KEPT", kept)
    monkeypatch.setattr(passed, "_origin", ORIGIN)
    logs.mkdir()
    for step, fine, tests, line in (
        ("a", True, True, "2 passed, 1 skipped in 3.1s"),
        ("b", True, True, "12 skipped in 0.1s"),
        ("b", False, True, "1 failed, 2 passed in 0.1s"),
        ("c", True, False, "done"),
    ):
        passed.note(logs, step, fine, tests, line, 3.2)
    rows = json.loads((logs / passed.NAME).read_text())["rows"]
    assert [(row["step"], row["on"], row["outcome"], row["tests"]) for row in rows] == [
        ("a", "4 x H200", "passed", 3),
        ("a", "no GPU", "failed", 3),
        ("a", "no GPU", "passed", 2),
        ("b", "no GPU", "skipped", 0),
        ("b", "no GPU", "failed", 2),
        ("c", "no GPU", "passed", 0),
    ]
    result_file.read(logs / passed.NAME)
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import checks

    monkeypatch.setattr(checks, "load", lambda name: {"rows": rows})
    shown = checks.gpu_tests()
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in shown.splitlines()]
    today, commit = rows[-1]["date"], f"`{rows[-1]['commit']}`"
    assert cells[2:] == [
        ["`a`", "4 x H200", "2026-01-02", "`0123abcd`", "3", ""],
        ["`a`", "no GPU", today, commit, "2", ""],
        ["`b`", "no GPU", "", "", "", f"failed, {today}, {commit}"],
        ["`c`", "no GPU", today, commit, "", ""],
    ]


def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    """Processes that outlive the run keep the GPUs, and slow what is measured there next."""
    pids, text = [tmp_path / "one", tmp_path / "two"], "import os, time; open({!r}, 'w').write(str(os.getpid())); {}"
    child = text.format(str(pids[1]), "time.sleep(60)")
    parent = text.format(str(pids[0]), f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    run = f"""
import sys; sys.path[:] = {sys.path!r}
from pathlib import Path; from tests.gpu import __main__ as runner
runner.processes.end_with_children(); runner.LOGS = Path({str(tmp_path / "logs")!r})
step = runner.Step("endless", 60, gpus=1, command=(sys.executable, "-c", {parent!r}))
runner.PARTS = {{"a": [step]}}; runner.main(["--beside", "a"])
"""
    with subprocess.Popen([sys.executable, "-c", run], cwd=ROOT) as process:
        try:
            wait_until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
        finally:
            process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not any(alive(int(pid.read_text())) for pid in pids))
