"""Results of eight GPUs get tables of their own.  Stand-ins for them are made of results of fewer GPUs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moecomm_bench.simulate.measured import read, rows_of

from ..gpu.pieces import PIECES
from . import test_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
sys.path.append(str(ROOT / "bench"))
MACHINE, GPUS, LONGER = "h200-8", 8, 1.25
LIKE = {  # results that pieces without one resemble
    "peers-qwen3": "peers-h200-4",
    "peers-one": "peers-h200-4",
    "peers-qwen3-one": "peers-h200-4",
    "formats-peers": "peers-h200-4",
    "four-domains": "domains-h200-4",
    "four-domains-nic": "nic-h200-4",
    "kill-plans-all-gpus": "kill-plans-gpus-h200-4",
    "layers-peers": "moe-channels-h200-2",
}
# No table has them: pictures, long tables and the model of `moecomm simulate` do.
WITHOUT_TABLE = {"sweep", "all-to-all", "eager", "tune-layers", "all-gather-study"}
ON_OTHER_PAGES = {"transfer"}  # bench/ratios.py
FIRST = {"who": "moecomm", "tokens": 128, "layout": "flat", "what": "dispatch", "payload": "fp8", "sms_asked": 0}
WEIGHTS: list[dict[str, Any]] = [
    {"what": "copies", "held": 8, "gbs": 311.5},
    {"what": "rounds", "tokens": 128, "us": 61.25, "beside_us": 70.5, "ratio": 1.151},
    {"what": "steps", "layers": 60, "tokens": 128, "wrong": 0, "quiet": {"p50": 7.125}, "moving": {"p50": 8.25}},
]


def longer(value: Any, key: str = "") -> Any:
    """Return a part of a result with other times."""
    if isinstance(value, dict):
        return {name: longer(of, name) for name, of in value.items()}
    if isinstance(value, list):
        return [longer(of) for of in value]
    return value * LONGER if key in ("p50", "p90", "p99", "at_work_us", "layer_us") else value


def stand_in(kind: str) -> dict[str, Any]:
    """Return a result of this kind as if it were of eight GPUs."""
    there = {path.stem for path in RESULTS.glob("*.json")}
    machines = [f"{kind}-{machine}" for machine in ("h200-4", "h100-4", "h200-2", "h100-2")]
    name = LIKE.get(kind) or next((name for name in machines if name in there), "")
    found = json.loads((RESULTS / f"{name or 'placed-layers-h200-2'}.json").read_text())
    case = found.get("case", {})
    found = {**longer(found), "what": f"{kind}-{MACHINE}", "ranks": GPUS}
    found["machine"]["gpus"] = ["NVIDIA H200"] * GPUS
    if case:
        found["case"] = case | {"ranks": GPUS}
        of_domain = 2 if kind.startswith("four-") else 4
        for one in (found["case"], *found["rows"]):
            if one.get("domain_ranks", 0) > 1:
                one["domain_ranks"] = of_domain
    if "qwen3" in kind and kind.startswith("peers"):
        found["case"] |= {"model": "qwen3-235b"}
    if kind.endswith("-one"):
        few = [row | {"tokens": 1} for row in found["rows"] if row["tokens"] == 128]
        found |= {"rows": few, "memory": [one | {"tokens": 1} for one in found["memory"] if one["tokens"] == 128]}
        found["case"] |= {"tokens": [1]}
    if kind == "formats-peers":
        renamed = {"fp8": "mxfp8-given", "bf16": "bf16", "": ""}
        found["rows"] = [row | {"payload": renamed[row["payload"]]} for row in found["rows"]]
        found["case"] |= {"payloads": ["bf16", "mxfp8-given"]}
    if kind == "layers-peers":
        layers = [row for row in found["rows"] if row["what"] == "layer"]
        found["case"] |= {"tokens": sorted({row["tokens"] for row in layers})}
        found["rows"] = [row | {"error": 0.03} for row in layers]
        for who, variant in (("deep_gemm", "fp8, one launch"), ("torch", "sequential")):
            alike = (row for row in layers if row["variant"] == variant)
            found["rows"] += [row | {"who": who, "us": longer(row["us"]), "error": 0.04} for row in alike]
    if kind == "moving-weights":
        found["rows"] = WEIGHTS
    if kind == "placed-layers":
        layers = [row for row in found["rows"] if (row["what"], row["placed"]) == ("layer", "token")]
        found["rows"] += [row | {"placed": "replicate", "us": longer(row["us"])} for row in layers]
        dispatches = [row for row in found["rows"] if (row["what"], row["placed"]) == ("dispatch", "token")]
        found["rows"] += [row | {"placed": "balanced", "us": longer(row["us"])} for row in dispatches]
    if kind == "kill-plans-all-gpus":
        found["command"] = "python -m tests.kill_plans 2000 --gpus --most-ranks 8 --jobs 2"
    return found


KINDS = [piece.name for piece in PIECES if piece.gpus > 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results that there are, and a stand-in for each piece."""
    made = tmp_path_factory.mktemp("results")
    for path in RESULTS.glob("*.json"):
        (made / path.name).symlink_to(path)
    for kind in KINDS:
        path = made / f"{kind}-{MACHINE}.json"
        path.unlink(missing_ok=True)
        path.write_text(json.dumps(stand_in(kind)))
    return made


@pytest.fixture
def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Generators read these results; which ones they have read since the set was emptied."""
    import checks
    import head_to_head
    import layers_beside
    import pages
    import readme  # before the patches: what it imports would keep them
    import tables
    import times
    import topics

    monkeypatch.setattr(tables, "RESULTS", folder)
    monkeypatch.setattr(test_tables, "RESULTS", folder)
    found, load = set[str](), tables.load

    def loads(name: str) -> dict[str, Any]:
        found.add(name)
        return load(name)

    for module in (tables, times, topics, checks, pages, head_to_head, layers_beside, readme):
        monkeypatch.setattr(module, "load", loads)
    for module in (tables, topics):  # marks take long, and tests/test_readme.py has them
        monkeypatch.setattr(module, "older", lambda found, parts: False)
    test_tables.result.cache_clear()
    yield found
    test_tables.result.cache_clear()


def test_each_result_of_eight_gpus_is_named_and_all_but_some_are_in_a_table(loaded: set[str]) -> None:
    import checks
    import tables
    import times
    import topics

    every = [*topics.TOPICS, *times.topics(), *checks.TOPICS]
    named = {name for topic in every for name in topic.names}
    assert {kind for kind in KINDS if f"{kind}-{MACHINE}" not in named} == ON_OTHER_PAGES
    loaded.clear()
    for topic in every:
        for some in topic.larger:
            assert {tables.split(name)[1:] for name in some} in ({("h200", GPUS)}, {("h200", 2)}, {("h200", 1)})
            topic.tables_of(some)
    for topic in times.topics():
        topic.table()
    assert {kind for kind in KINDS if f"{kind}-{MACHINE}" not in loaded} == WITHOUT_TABLE | ON_OTHER_PAGES


def test_their_numbers_stand_in_tables_of_their_own(loaded: set[str]) -> None:
    """As on the pages that there are, times are those of the results which a page names behind them."""
    import pages
    import readme

    texts = {str(path.relative_to(ROOT)): text for path, text in pages.pages().items()}
    found = [table for text in texts.values() for table in test_tables.tables_of(text)]
    own = [table for table in found if all(one["name"].endswith(MACHINE) for one in table.results)]
    assert len(own) > 20
    assert {len(one["machine"]["gpus"]) for table in own for one in table.results} == {GPUS}
    front = test_tables.tables_of(readme.headlines())
    assert [one["name"] for table in front for one in table.results] == [
        f"layers-peers-{MACHINE}",
        f"peers-{MACHINE}",
    ]
    assert [time for table in (*own, *front) for time in test_tables.strange(table)] == []
    _, _, first, *_ = next(part for part in readme.headlines().split("\n\n") if "| DeepEP V1" in part).splitlines()
    (ours,) = (row["us"]["p50"] for row in stand_in("peers")["rows"] if FIRST.items() <= row.items())
    assert first.startswith(f"| 128 | dispatch in FP8 | {ours:.1f} us")
    pictures = {path.stem for path in readme.drawn() if path.stem.endswith(MACHINE)}
    assert pictures >= {f"{kind}-{MACHINE}" for kind in ("peers", "peers-qwen3", "sweep")}
    assert all(f"(../bench/results/{picture}.svg)" in texts["docs/measurements.md"] for picture in pictures)


def test_the_model_has_their_rows(folder: Path) -> None:
    """`bench/refit.py` fits and checks each result that it reads; of rounds and sweeps there are rows."""
    kinds = ("times-few", "times-many", "ht", "few-sms", "skew", "qwen3", "sweep", "peers", "four-domains-nic", "nic")
    for kind in kinds:
        (result,) = read(folder / f"{kind}-{MACHINE}.json")
        rows = list(rows_of(result))
        assert result.ranks * result.domains == GPUS and len(rows) > 3, kind
        assert {result.domains} == {4 if kind.startswith("four-") else 2 if kind == "nic" else 1}
