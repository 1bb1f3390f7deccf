"""tests/gpu/run: every test that it names is there; and how it runs steps, with programs in their place."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import GPU_MARKS
from .gpu import __main__ as steps
from .gpu import test_nvlink
from .gpu.__main__ import PARTS, Step
from .live import alive, wait_until

ROOT = Path(__file__).parent.parent
TESTS = [step for part in PARTS.values() for step in part if step.pytest]
ALL_MARKS = set(GPU_MARKS)


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


@pytest.mark.long
def test_every_test_that_is_named_exists() -> None:
    """Fused layers and others are all layers, on one GPU, on two and on four."""
    named = tuple(sorted({word for step in TESTS for word in step.pytest if word.startswith("tests/")}))
    assert len(named) > 30
    by_words = sorted({step.pytest for step in TESTS if "-k" in step.pytest})
    all_named, layers, *found = collected(named, (steps.MOE,), *by_words)
    assert all_named > 100 and min(found) > 1
    of_layers = [count for words, count in zip(by_words, found, strict=True) if words[0] == steps.MOE]
    assert len(of_layers) == 6 and sum(of_layers) == layers


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
        wanted |= {"gpu2", "gpu4"} if re.search(r"\bGPU_COUNTS\b", text) else set()
        if left := wanted - named.get(name, set()):
            missing[name] = sorted(left)
    assert missing == {} and len(named) > 35


def test_the_page_has_every_part() -> None:
    table = (
        (ROOT / "docs" / "maintainers" / "testing.md").read_text().partition("| part | runs |")[2].partition("\n\n")[0]
    )
    listed = [part for row in table.splitlines()[2:] for part in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(PARTS)


def test_steps_have_names_of_their_own_and_limits_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [step.name for part in PARTS.values() for step in part]
    assert len(set(names)) == len(names)
    monkeypatch.setattr(steps, "CASES", 10_000)
    assert {step.name: step.limit_s for step in TESTS}["gin2.cases"] == 150 + 970
    assert {step.name: step.limit_s for step in TESTS}["gin2.lost"] == 90
    words = dataclasses.replace(PARTS["gin"][1], cases=10_000).words
    assert words[words.index("--gpu-cases") + 1] == "10000" and "tests/gpu/test_nvlink.py" in words[-1]


def test_every_kind_of_backend_is_run_with_four_ranks() -> None:
    words = {word for step in TESTS for word in step.pytest}
    wanted = {kind: f"{steps.NVLINK}_random_cases_match_the_reference[{kind}-4]" for kind in test_nvlink.KINDS}
    assert [kind for kind, test in wanted.items() if test not in words] == []


def test_kernels_of_layers_of_models_are_known_without_a_gpu() -> None:
    pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")
    from .gpu import compile_models as models

    for model in map(models.MODELS.__getitem__, steps.MODELS):
        headers = [kernel.header for kernel in set(models.of_layers(model, 4, 128))]
        assert set(headers) == {"gemm/gemm", *(f"fused/{name}" for name in ("publish", "expert_layer", "reduce"))}
        rounds = [spec for spec in models.of_rounds(model, 4, 128) if isinstance(spec, models.jit.KernelSpec)]
        assert len(rounds) == 4 and all(spec.packets != spec.descriptors for spec in rounds)
        assert sum(spec.descriptors for spec in rounds) == 1
        assert sorted(spec.op for spec in rounds) == ["combine", *["dispatch"] * 3]


@pytest.mark.long
def test_kernels_of_verified_rounds_are_known_without_a_gpu() -> None:
    pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")
    from .gpu import compile_verified

    found = compile_verified.launched()
    assert {spec.transport for spec in found} == {"lsa", "puts"}
    combines = [spec for spec in found if spec.op == "combine"]
    assert 0 < len(combines) < len(found) and all(spec.verifies and not spec.packets for spec in combines)


def program(name: str, text: str, *, gpus: int = 4, seconds: int = 60) -> Step:
    return Step(name, seconds, gpus=gpus, command=(sys.executable, "-c", text))


SAY = "import os; print('on', os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['NCCL_NVLS_ENABLE'])"


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(steps, "LOGS", tmp_path / "logs")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "logs"


def test_a_step_that_fails_or_is_not_there_fails_the_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, logs: Path
) -> None:
    gone = Step("gone", 60, command=("no-such-program",))
    parts = {"a": [program("good", SAY), program("bad", "print('told'); raise SystemExit(3)")], "b": [gone]}
    monkeypatch.setattr(steps, "PARTS", parts)
    assert steps.main(["a", "b"]) == 1
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [(line[0], line[1], line[4:]) for line in lines[:2]] == [
        ("good", "ok", ["on", "None", "0"]),
        ("bad", "FAILED", ["told"]),
    ]
    assert lines[2][:2] == ["gone", "FAILED"] and lines[3] == ["logs:", str(logs)]
    assert (logs / "bad.log").read_text() == "told\n"
    monkeypatch.setattr(steps, "PARTS", {"a": parts["a"][:1]})
    assert steps.main([]) == 0
    with pytest.raises(SystemExit):
        steps.main(["a", "--beside", "c"])
    assert "c: the parts are a" in capfd.readouterr().err


def test_a_line_is_written_at_once(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    """Concurrent steps write to one stream: another step could write into a line that takes two writes."""
    written: list[str] = []
    logs.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(sys.stdout, "write", written.append)
        steps.run(program("said", SAY))
    assert len(written) == 1 and written[0].startswith("said ") and written[0].endswith("\n")


@pytest.mark.long
def test_a_step_that_hangs_is_ended_with_what_it_has_started(
    monkeypatch: pytest.MonkeyPatch, logs: Path, tmp_path: Path
) -> None:
    child = f"import time; print('up'); time.sleep(4); open({str(tmp_path / 'alive')!r}, 'w')"
    hang = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    monkeypatch.setattr(steps, "PARTS", {"a": [program("hang", hang, seconds=2)]})
    begin = time.monotonic()
    assert steps.main(["a"]) == 1
    assert 2 <= time.monotonic() - begin < 30
    assert "subprocess.py" in (logs / "hang.log").read_text(), "where its threads were"
    time.sleep(max(0.0, begin + 7 - time.monotonic()))
    assert not (tmp_path / "alive").exists()


def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    """Processes that outlive the run keep the GPUs, and slow what is measured there next."""
    pids, text = [tmp_path / "one", tmp_path / "two"], "import os, time; open({!r}, 'w').write(str(os.getpid())); {}"
    child = text.format(str(pids[1]), "time.sleep(60)")
    parent = text.format(str(pids[0]), f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    run = f"""
import sys; sys.path[:] = {sys.path!r}
from pathlib import Path; from tests.gpu import __main__ as steps
steps.processes.end_with_children(); steps.LOGS = Path({str(tmp_path / "logs")!r})
step = steps.Step("endless", 60, gpus=1, command=(sys.executable, "-c", {parent!r}))
steps.PARTS = {{"a": [step]}}; steps.main(["--beside", "a"])
"""
    with subprocess.Popen([sys.executable, "-c", run], cwd=ROOT) as process:
        try:
            wait_until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
        finally:
            process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not any(alive(int(pid.read_text())) for pid in pids))


def test_parts_side_by_side_have_a_gpu_each_and_the_rest_comes_after(
    monkeypatch: pytest.MonkeyPatch, logs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two that wait for each other end; a third takes the GPU of whoever is through."""
    logs.mkdir()
    meet = "import os, time; open('{0}', 'w'); [time.sleep(0.01) for _ in iter(lambda: os.path.exists('{1}'), True)]; "
    a, b = logs / "a.here", logs / "b.here"
    parts = {
        "first": [program("first", SAY)],
        "a": [program("a", meet.format(a, b) + SAY, gpus=1), program("a4", SAY)],
        "b": [program("b", meet.format(b, a) + SAY, gpus=1), program("b.more", SAY, gpus=1)],
        "c": [program("c", SAY, gpus=1)],
    }
    monkeypatch.setattr(steps, "PARTS", parts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert steps.main(["first", "--beside", "a", "b", "c"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()[:-1]]
    names = {"first", "a", "a4", "b", "b.more", "c"}  # other threads of this process may print as well
    said = {words[0]: words[-2] for words in lines if words and words[0] in names}
    assert next(iter(said)) == "first" and list(said)[-1] == "a4" and said["first"] == said["a4"] == "5,7"
    assert {said["a"], said["b"]} == {"5", "7"} and said["b.more"] == said["b"] and said["c"] in ("5", "7")
