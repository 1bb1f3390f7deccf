"""Rules of security and of waiting that a program can check in the source, and where results come from."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

import moecomm

from .fresh_python import run_python
from .size import BUDGET, sizes

ROOT = Path(__file__).parent.parent
PACKAGES = ("moecomm", "moecomm_bench")
PYTHON = sorted(path for folder in (*PACKAGES, "bench", "examples", "tests") for path in (ROOT / folder).rglob("*.py"))
PACKAGE = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in PACKAGES]
NATIVE = sorted(
    path
    for folder in ("csrc", "rma_plugin")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".h", ".cpp", ".cuh", ".cu")
)
TEXT = [
    *PYTHON,
    *NATIVE,
    ROOT / "README.md",
    ROOT / "pyproject.toml",
    ROOT / "package_page.py",
    ROOT / "setup.py",
    ROOT / "signatures.py",
    *sorted((ROOT / "csrc").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MOST_LINES = 700


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def those_with(pattern: str, paths: list[Path]) -> list[str]:
    """file:line of every match."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_files_are_short() -> None:
    assert [
        n
        for n, p in zip(names(PACKAGE + NATIVE), PACKAGE + NATIVE, strict=True)
        if p.read_text().count("\n") > MOST_LINES
    ] == []


def test_no_room_is_larger_than_its_budget() -> None:
    """A change pays for what it adds by what it takes away: `python -m tests.size lower` after a cut."""
    budget = json.loads(BUDGET.read_text())
    assert {name: size for name, size in sizes().items() if size > budget.get(name, 0)} == {}


def test_only_config_reads_the_environment() -> None:
    # The RMA plugin is a library of its own, for programs that have no moecomm in them.
    settings = ROOT / "rma_plugin" / "src" / "settings.cpp"
    others = [path for path in PACKAGE if path != ROOT / "moecomm" / "config.py"]
    native = [path for path in NATIVE if path != settings]
    # NCCL takes one setting that its API lacks from the environment only: that is writing, for another library.
    assert those_with(r"^(?!.*NCCL_NVLS_ENABLE).*(os\.environ|\bgetenv\b)", others + native) == []


def test_nothing_is_unpickled_or_evaluated_and_no_shell_is_asked() -> None:
    """Not even through torch: object collectives pickle.  Tests of checkpoints load tensors alone."""
    mine = [path for path in PYTHON if path != Path(__file__)]
    unpickles = r"^\s*(import|from) (pickle|marshal|shelve|dill|cloudpickle)\b|_object(_list)?\("
    assert those_with(unpickles, mine) == []
    assert those_with(r"torch\.load\((?!.*weights_only=True)", mine) == []
    assert those_with(r"shell=True|os\.system\(|os\.popen\(", mine) == []
    assert (
        those_with(r"(?<![\w.])(eval|exec)\(", [path for path in mine if not path.is_relative_to(ROOT / "tests")]) == []
    )
    assert those_with(r"\b(system|popen|exec[lv]p?e?|posix_spawnp?)\(", NATIVE) == []


def test_nothing_is_put_where_others_can_reach_it() -> None:
    """No named shared memory, no files in directories that all users share."""
    assert (
        those_with(
            r"\bshm_open\b|shared_memory|share_memory_\(|/dev/shm|/tmp\b|tempfile|mkstemp|tmpnam", PACKAGE + NATIVE
        )
        == []
    )


def test_kernels_do_not_trap_and_do_not_multicast() -> None:
    assert (
        those_with(
            # .multicast::cluster stays inside a GPU: from memory to the shared memory of several blocks.
            r"\b__trap\b|\btrap;|\bassert\(|multimem|multicast(?!::cluster)",
            [p for p in NATIVE if p.suffix in (".cuh", ".cu")],
        )
        == []
    )


def test_only_one_header_spins() -> None:
    """Every wait of the protocol has the deadline of protocol/deadline.h."""
    others = [path for path in NATIVE if path.name != "deadline.h"]
    assert those_with(r"while \((true|1)\) *;|while \([^)]*(load|acquire)[^;{]*\) *;", others) == []
    kernels = [
        path
        for path in others
        if path.suffix == ".cuh" and path.parent.name in ("device", "dispatch", "combine", "fused")
    ]
    found = [f"{path.name}: {loop}" for path in kernels for loop in unbounded_loops(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("while (load_acquire(word) < 3) {\n}", True),
        ("while (there(load_shared(word)) < tile.row) ;", True),
        ("for (;;) { if (load_fresh(word) != 0) break; }", True),
        ("for (i32 tries = 0;; ++tries) { seen = look(load_relaxed(word)); if (seen) break; }", True),
        ("while (!ready()) {\n}", True),
        ("for (Polls polls(d);;) { if (load_fresh(word) != 0 || polls.pause() != Waited::ok) break; }", False),
        ("for (Place at;; at.step()) { copy_wait(&full[at.slot], at.phase); if (load_relaxed(last)) return; }", False),
        ("while (left > 0) { left -= load_relaxed(word); }", False),
        ("for (i32 i = 0; i < n; ++i) load_acquire(words + i);", False),
    ],
)
def test_a_loop_that_polls_without_a_deadline_is_found(text: str, found: bool) -> None:
    assert bool(unbounded_loops(text)) == found


def unbounded_loops(text: str) -> list[str]:
    """Heads of loops that look at memory until it changes: in their condition, or endlessly in their body, unless that
    has a wait with a deadline or one for a copy.  Loops with neither an end of their own nor a body are such, too.
    """
    found, code = [], re.sub(r"//[^\n]*", "", text)
    for loop in re.finditer(r"(?<!\} )\b(while|for) \(", code):
        end = closing(code, loop.end(), "()")
        head, rest = code[loop.end() : end - 1], code[end:].lstrip()
        body = rest[: closing(rest, 1, "{}")] if rest.startswith("{") else rest[: rest.index(";") + 1]
        condition = head if loop[1] == "while" else [*head.split(";"), ""][1]
        endless = not condition.strip() if loop[1] == "for" else condition in ("true", "1")
        looks = condition + body if endless else condition
        empty = loop[1] == "while" and body.strip("{}; \n") == ""
        waits = re.search(r"\bpause\(|\bcopy_wait\(|\bwait_\w+\(", body)
        if (empty or re.search(r"\bload_\w+\(", looks)) and not waits:
            found.append(f"{loop[1]} ({head})")
    return found


def closing(text: str, at: int, pair: str) -> int:
    """Behind what closes the bracket that is open before `at`."""
    depth = 1
    while depth:
        depth += {pair[0]: 1, pair[1]: -1}.get(text[at], 0)
        at += 1
    return at


def test_text_speaks_of_moecomm_alone() -> None:
    mine = [path for path in TEXT if path != Path(__file__)]
    assert those_with(r"/root/|/home/\w|\bTODO\b|\bFIXME\b|\bXXX\b", mine) == []
    results = sorted((ROOT / "bench" / "results").glob("*.json"))
    # No path of one machine: below the root only what every Linux has.
    assert those_with(r"(?<![\w./<>*-])/(?!(proc|dev|sys|usr|lib)/)[a-z]+/[a-z]", [*mine, *results]) == []


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda p: p.name)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    found = json.loads(path.read_text())
    assert found["what"] == path.stem
    if found.get("benchmark") == "peers-alone":  # none of moecomm was measured: no commit, kernels or command of ours
        assert found["machine"]["gpus"] and found["versions"] and found["note"] and found["date"] == "2026-11-20"
        return
    assert found["machine"]["cores"] >= 1 and found["machine"]["cpu"]
    assert {"python", "torch", "moecomm"} <= set(found["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert re.fullmatch(r"[0-9a-f]{8,}", found["commit"]), "write in the commit of the tree that was measured"
    assert found["kernels"], "write it with moecomm_bench.results"
    words = found["command"].split()
    if "-m" in words:  # python -m moecomm_bench, torchrun ... -m moecomm_bench
        named = words[words.index("-m") + 1]
        module = {"moecomm.bench": "moecomm_bench"}.get(named, named)  # its name in the first results
        spec = importlib.util.find_spec(module)
        is_package = spec is not None and spec.submodule_search_locations is not None
        assert spec and (not is_package or importlib.util.find_spec(f"{module}.__main__")), f"{module} can't be run"
    else:
        program = words[1] if len(words) > 1 else words[0]
        finished = f"`{Path(program).name}`" in (ROOT / "bench" / "README.md").read_text()
        assert (ROOT / program).is_file() or finished, f"{program} does not exist, and bench/README.md does not say so"


def test_ci_runs_what_a_plain_run_leaves_out() -> None:
    """Each marker that a plain run excludes is declared and has a command in CONTRIBUTING and in CI."""
    settings = (ROOT / "pyproject.toml").read_text()
    markers = re.search(r"^markers = \[(.*?)^\]", settings, re.DOTALL | re.MULTILINE)
    excluded = re.search(r'^addopts = .*"-m", "(.*?)"', settings, re.MULTILINE)
    assert markers and excluded
    names = ["slow", *(words.removeprefix("not ") for words in excluded[1].split(" and "))]
    declared = re.findall(r'^    "(\w+)', markers[1], re.MULTILINE)
    assert names == [name for name in declared if name not in ("cpu", "compiled") and not name.startswith("gpu")]
    ci, contributing = (ROOT / ".ci" / "run").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"^ *(?:nice )?pytest -m (\w+)", ci, re.MULTILINE)) == set(names)
    assert re.findall(r"^\| `pytest -m (\w+)`", contributing, re.MULTILINE) == names


def test_what_is_offered_is_documented() -> None:
    """All that `import moecomm` offers, and the methods of its classes.  Properties may speak for themselves."""
    offered = {name: getattr(moecomm, name) for name in moecomm.__all__}
    for name, kind in list(offered.items()):
        if isinstance(kind, type):
            own = {f"{name}.{method}": of for method, of in vars(kind).items() if not method.startswith("_")}
            offered |= {method: of for method, of in own.items() if inspect.isfunction(of)}
    assert [name for name, of in offered.items() if callable(of) and not inspect.getdoc(of)] == []


def test_importing_is_quick() -> None:
    """Under a second of work beyond torch's own import, and without anything a GPU would need."""
    code = (  # seconds of the process, not those in which a busy machine does something else
        "import sys, time, torch; before = set(sys.modules); begin = time.process_time(); import moecomm;"
        "print(time.process_time() - begin, *{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    told = run_python("-c", code)
    assert told.returncode == 0, told.stderr
    seconds, *modules = told.stdout.split()
    assert float(seconds) < 1
    assert not {"cuda", "cupy", "nccl", "nvshmem"} & set(modules)
