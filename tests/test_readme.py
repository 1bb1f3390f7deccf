"""The README says what is so: commands are those of CI, links lead somewhere, its example runs, figures have JSON."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import moecomm

from .conftest import Ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FIGURE = r"\d+(?:\.\d+)? ?(?:[mnuµ]s|GB/s|TFLOP/s|times|x as fast)\b"
sys.path.append(str(ROOT / "bench"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_page_is_short_and_begins_with_commands_that_install_run_and_test() -> None:
    assert README.count("\n") <= 123 and README[: README.index("&& pytest")].count("\n") < 30
    setup_and_run, test = blocks("bash")
    assert setup_and_run.splitlines()[-1] == "pip install . && moecomm demo"
    assert test == 'pip install ".[test]" && pytest\n'


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if not link.startswith("http")]
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_names_of_ours_on_the_pages_exist() -> None:
    """Modules are found without what they are for: Megatron-core and vLLM need not be installed."""
    for page in (ROOT / "docs").rglob("*.md"):
        for name in set(re.findall(r"(?<!/)\b(moecomm(?:\.[a-z_0-9]+)+)", page.read_text())):
            path, rest = ROOT, name.split(".")
            while rest and (path / rest[0]).is_dir():
                path, rest = path / rest[0], rest[1:]
            text = (path / "__init__.py").read_text()
            found = not rest or rest[0] == "_native" or any(path.glob(f"{rest[0]}.py*"))  # the build makes that one
            assert found or re.search(rf"\b{rest[0]}\b", text), name


def run_example() -> dict[str, Any]:
    """Names that the example leaves behind, run as it stands in a process of the default process group."""
    names: dict[str, Any] = {}
    (program,) = blocks("python")
    exec(compile(program, "README.md", "exec"), names)
    return names


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """init_process_group() makes a group of one rank, without a launcher."""
    init = partial(dist.init_process_group, store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def check_example(names: dict[str, Any]) -> None:
    """`out` is the sum of topk_weights * y, where y is (number of the expert + 1) x."""
    scale = (names["topk_weights"] * (names["topk_idx"] + 1)).sum(dim=1, keepdim=True).double()
    expected = names["x"].double() * scale
    # Two roundings to bfloat16, of every y and of the result, and one of the sum of each rank.
    assert ((names["out"].double() - expected).abs() <= 3.1 * 2**-8 * expected.abs()).all()
    assert names["buffer"].closed


def test_the_example_runs_and_computes_what_it_says(one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 18
    check_example(run_example())
    assert not dist.is_initialized()
    said = re.fullmatch(r"rank 0: \d+ rows of all ranks came, the result is right to (.*)%\n", capsys.readouterr().out)
    assert said and float(said[1]) < 1


def _example_on_a_rank(rank: int, group: Any) -> int:
    dist.init_process_group = lambda backend: None  # done, as torchrun has the ranks do it
    names = run_example()
    check_example(names)
    return int(names["buffer"].num_ranks)


def test_the_example_runs_over_all_processes(ranks: Ranks) -> None:
    assert ranks.run(2, _example_on_a_rank) == [2, 2]


def test_figures_are_what_the_results_say() -> None:
    import aims
    from pages import pages
    from readme import BEGIN, END, blocks, filled

    for page, figures in blocks().items():
        assert filled(page.read_text(), figures()) == page.read_text(), f"{page.name}: run: python bench/readme.py"
    assert {path: path.read_text() for path in pages()} == pages(), "run: python bench/readme.py"
    assert aims.marked(aims.PAGE.read_text()) == aims.PAGE.read_text(), "run: python bench/readme.py"
    measured = README.split(BEGIN)[1].split(END)[0]
    assert re.search(r"\d us", measured), "no result is shown"
    # Nowhere else.
    rest = README.replace(measured, "")
    assert re.findall(FIGURE, rest) == []


def test_the_table_of_the_readme_is_short() -> None:
    measured = README.split("<!-- figures")[1].split("<!-- end")[0]
    assert measured.count("\n|") <= 2 + 6 + 2 + 12 and measured.count("![") == 1


def test_plots_are_drawn_from_the_results() -> None:
    """Each picture says of what: the digest of its results."""
    from readme import PICTURES, drawn

    from moecomm_bench.plot import digest

    page = (ROOT / "docs" / "measurements.md").read_text()
    for picture, results in drawn().items():
        assert f"(../{picture.relative_to(ROOT)})" in page
        assert digest(results) in picture.read_text(), "run: python bench/readme.py"
    shown = {picture.stem for picture in drawn()}
    assert set(PICTURES) < shown
    assert {path.stem for path in (ROOT / "bench" / "results").glob("*.svg")} == shown, "a picture that no page has"


def test_every_result_is_on_the_page_or_cited_and_nothing_cites_one_that_is_gone() -> None:
    """Code and documents name results by file; readers of many name them by pattern."""
    import checks
    import ratios
    import times
    import topics

    folder = ROOT / "bench" / "results"
    there = {path.stem for path in folder.glob("*.json")}
    shown = {name for topic in (*times.topics(), *topics.TOPICS, *checks.TOPICS) for name in topic.names}
    assert there == shown | {*ratios.transfer_results(), *ratios.unsummed_results()}
    texts = [path for pattern in ("*.py", "*.md", "*.cuh", "*.h", "*.cpp") for path in ROOT.rglob(pattern)]
    named = re.compile(r"\bresults/([a-z][\w-]*)\.json|\b([a-z][a-z0-9-]*-h200-\d)\b|\b(gemm[a-z0-9-]*-h200)\b")
    gone = {
        (str(path.relative_to(ROOT)), "".join(name))
        for path in texts
        if not path.is_relative_to(ROOT / "tests")
        for name in named.findall(path.read_text())
        if "".join(name) not in there
    }
    assert gone == set()


@pytest.fixture
def launched_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result is of a commit at which the host launched what it launches today."""
    import launches

    monkeypatch.setattr(launches, "noted", lambda commit: launches.today())


def test_a_figure_that_is_older_than_its_kernels_is_marked(
    launched_today: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tables

    from moecomm_bench import sources

    now = tables.digests()
    assert set(now) == set(sources.PARTS), "the source of a part is missing"
    found = {"kernels": now}
    assert tables.line(found, tables.ROUNDS, "4", "5 us") == "| 4 | 5 us |"
    for part in tables.MANY:
        monkeypatch.setattr(tables, "digests", lambda part=part: now | {part: "other"})
        assert tables.line(found, tables.ROUNDS, "4", "5 us") == "| 4 † | 5 us |"
        assert tables.line(found, ("GEMM",), "4", "5 us") == "| 4 | 5 us |", "of another part"
    monkeypatch.setattr(tables, "digests", lambda: now)
    assert tables.older({"kernels": {}}, ("host",)), "a part that was not there then"
    monkeypatch.setattr(tables, "digests", lambda: now)
    earlier = {"kernels": now | {"combine": "other"}}
    assert tables.line(found, tables.ROUNDS, "4", "5 us", beside=earlier) == "| 4 † | 5 us |"
    cells = ("4", "5 us", "6 us", "")
    assert tables.line(earlier, tables.ROUNDS, *cells, at=(1, 3)) == "| 4 | 5 us † | 6 us |  |", (
        "no mark without a time"
    )


def test_times_of_other_libraries_are_never_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    import head_to_head
    import tables
    import times

    others = dict.fromkeys(tables.load(head_to_head.found())["kernels"], "other")
    monkeypatch.setattr(tables, "digests", lambda: others)
    rows = [line.split(" | ") for line in times.operations().splitlines() if re.match(r"\| \d", line)]
    assert {("moecomm" in row[2], "†" in row[2]) for row in rows} == {(True, True), (False, False)}
    assert not any("†" in cell for row in rows for cell in (*row[:2], *row[3:]))
    for shown in (head_to_head.front()[2], head_to_head.shown(head_to_head.found())):
        heads, _, *rest = shown.splitlines()
        ours = heads.split(" | ").index("moecomm")
        assert all([index for index, cell in enumerate(line.split(" | ")) if "†" in cell] == [ours] for line in rest)


def test_a_change_of_a_kernel_changes_the_page_until_it_is_written_again(
    launched_today: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result as if it were of today, and then another kernel."""
    import checks
    import head_to_head
    import layers_beside
    import pages
    import readme
    import tables
    import times
    import topics

    now, load = tables.digests(), tables.load
    for module in (tables, times, topics, checks, pages, head_to_head, layers_beside):
        monkeypatch.setattr(module, "load", lambda name: load(name) | {"kernels": now})

    def marked() -> tuple[bool, ...]:
        return tuple(" † |" in text for text in (*pages.pages().values(), readme.headlines()))

    assert marked() == (False,) * 4
    for part, of_page, of_calls, of_headlines in (
        ("dispatch", True, True, True),
        ("fused layer", True, True, True),
        ("dispatch between domains", True, False, False),
        ("host", True, False, False),
        ("gin", True, False, False),
        ("calls", True, True, False),
    ):
        monkeypatch.setattr(tables, "digests", lambda part=part: now | {part: "other"})
        assert marked() == (of_page, of_calls, True, of_headlines), part


def test_the_ratio_to_torch_says_which_rows_torch_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one older result, the text must not say that ratios are to the faster layer."""
    import topics

    rows = {"older": [{"who": "torch", "variant": ""}], "later": [{"who": "torch", "variant": "rows by rank"}]}
    monkeypatch.setattr(topics, "load", lambda name: {"rows": rows[name]})
    assert topics.torchs_forms(["later"]).startswith("`later`: torch's faster form")
    assert "`older`: torch's first form alone" in topics.torchs_forms(["later", "older"])


def test_the_readme_has_the_other_libraries_of_the_most_gpus() -> None:
    import head_to_head
    import tables

    used = head_to_head.found()
    ranks = [load["case"]["ranks"] for load in map(tables.load, tables.names()) if load.get("libraries")]
    assert tables.load(used)["case"]["ranks"] == max(ranks)
    assert f"(bench/results/{used}.svg)" in head_to_head.front()[0]


def test_failures_promised_are_errors_that_exist() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    promised = set(re.findall(r"^\| `([A-Z]\w+)`", page, re.MULTILINE))
    assert promised == {
        "BadInput",
        "TooManyRows",
        "CorruptWeights",
        "MemoryReleased",
        "Mismatch",
        "OutOfStep",
        "ConcurrentCall",
        "Timeout",
        "PeerLost",
        "Aborted",
        "CorruptRow",
        "Excluded",
        "Closed",
        "Unsupported",
    }
    assert all(issubclass(getattr(moecomm, name), moecomm.MoecommError) for name in promised)
    named = re.search(r"^\[Failures\]\(.*$", README, re.MULTILINE)
    assert named and {"PeerLost", "Timeout"} == set(re.findall(r"`(\w+)`", named[0])) <= promised
