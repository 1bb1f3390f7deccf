"""Recorded routing in benchmarks on two CPU ranks: rows as counting the file finds them, and what results say."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moecomm.errors import BadInput
from moecomm.router import Model
from moecomm.routing import Recorded, synthesize
from moecomm_bench import cli, moe, replay
from moecomm_bench.case import RoundsCase, Traffic
from moecomm_bench.cli import app
from moecomm_bench.layers import Layers
from moecomm_bench.show import show
from moecomm_bench.simulate import measured

from ..conftest import Ranks
from .test_dispatch_combine import measured as measured_on

EXPERTS, TOPK, TOKENS = 8, 3, 30
SMALL = Model("", 64, 32, EXPERTS, TOPK)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two layers, interleaved: those of the first are busy on rank 0, and some entries are -1."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]
    ids[::2] %= 4
    ids = ids.masked_fill(torch.rand(TOKENS, TOPK, generator=generator) < 0.2, -1).to(torch.int16)
    records = torch.tensor([[0, 0, 8], [1, 0, 8], [0, 1, 7], [1, 1, 7]], dtype=torch.int32)
    weights = torch.rand(TOKENS, TOPK, generator=generator)
    recorded = Recorded(EXPERTS, TOPK, ("a", "b"), records, ids, weights, "mine")
    return recorded.save(tmp_path / "run.routing")


def case_of(file: Path, **other: Any) -> RoundsCase:
    given = RoundsCase(
        "", 128, TOPK, EXPERTS, 2, "host", [8, 20], ["flat", "expert"], ["bf16"], [1], "eager", replays=2, inputs=1
    )
    return dataclasses.replace(given, routing_file=str(file), **other)


def dealt(file: Path, tokens: int, rank: int) -> list[list[int]]:
    """The tokens of a rank: those of layer a by step, then those of layer b, and then from the start."""
    ids = Recorded.load(file).topk_idx.tolist()
    order = [*range(8), *range(16, 23), *range(8, 16), *range(23, 30)]
    return [ids[order[(rank * tokens + token) % TOKENS]] for token in range(tokens)]


def counted(file: Path, tokens: int, index: int = 0) -> dict[str, list[list[int]]]:
    """Rows and entries from each rank to each rank, of an input."""
    rows, entries = [[0, 0], [0, 0]], [[0, 0], [0, 0]]
    for rank in range(2):
        for token in dealt(file, tokens, 2 * index + rank):
            owners = [expert // 4 for expert in token if expert >= 0]
            for owner in owners:
                entries[rank][owner] += 1
            for owner in set(owners):
                rows[rank][owner] += 1
    return {"rows": rows, "entries": entries}


def _arrived(rank: int, group: Any, path: str, tokens: int) -> tuple[Any, Any, list[int]]:
    """Rows by Traffic, and those that a Buffer hands out."""
    import moecomm

    ids, weights = case_of(Path(path)).routing(tokens, rank)
    traffic = Traffic.of(group, ids, EXPERTS)
    sizes: dict[str, Any] = {"hidden": 16, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": tokens}
    with moecomm.Buffer(group, **sizes, backend="host") as buffer:
        x = torch.ones(tokens, 16, dtype=torch.bfloat16)
        arrived = [len(buffer.dispatch(x, ids, weights, layout=layout).x) for layout in ("flat", "expert")]
    return traffic.rows.tolist(), traffic.entries.tolist(), arrived


@pytest.mark.parametrize("tokens", [8, 20])
def test_ranks_replay_the_rows_that_counting_the_file_finds(tokens: int, file: Path, ranks: Ranks) -> None:
    wanted = counted(file, tokens)
    for rank, (rows, entries, arrived) in enumerate(ranks.run(2, _arrived, str(file), tokens)):
        assert (rows, entries) == (wanted["rows"], wanted["entries"])
        assert arrived == [sum(row[rank] for row in wanted[name]) for name in ("rows", "entries")]


def test_dispatch_combine_replays_a_file_and_says_which(file: Path, ranks: Ranks, tmp_path: Path) -> None:
    case = case_of(file)
    found = measured_on(ranks, case)
    for row in found["rows"]:
        assert row["who"] == "moecomm" and row["us"]["p50"] > 0
        wanted = counted(file, row["tokens"])
        rows, entries = wanted["rows"], wanted["entries"]
        handed_out = sum(map(sum, rows if row["layout"] == "flat" else entries)) / 2
        if row["what"] == "dispatch":
            crossing = (rows[0][1] + rows[1][0]) / 2
            assert row["wire_bytes"] == crossing * 256
            assert row["moved_bytes"] == crossing * (256 + (12 * TOPK + 8) * (row["layout"] == "flat"))
            assert row["logical_bytes"] == handed_out * 256
        ceiling = found["ceiling"][0]["gbs"]
        assert row["of_wire"] == pytest.approx(row["busiest_bytes"] / ceiling / 1e3 / row["us"]["p50"], abs=1e-3)
    about = {"source": "recorded", "model": "mine", "tokens": TOKENS, "layers": 2}
    about["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    assert found["case"] == {
        **dataclasses.asdict(case),
        "peers": False,
        "routing_file": "run.routing",
        "routing": about,
    }
    assert replay.said(found["case"]).endswith("routing of run.routing (recorded of mine, 30 tokens, layers: 2)")


def _layers(rank: int, group: Any, path: str) -> list[Any]:
    case = moe.ModelsCase([SMALL], [20], 2, "host", "eager", replays=1, peers=False, routing_file=path, inputs=2)
    with Layers(case, SMALL, 20, {}, group, group, torch.device("cpu")) as layers:
        found = [[given["topk_idx"].tolist() for given in layers.inputs], layers.traffic.entries.tolist()]
        return [*found, layers.max_rows]


def test_layers_replay_a_file(file: Path, ranks: Ranks) -> None:
    """The second input has the tokens after those of the first, and a dispatch has room for the rows of both."""
    entries = [counted(file, 20, index)["entries"] for index in range(2)]
    mean = torch.tensor(entries).double().mean(dim=0).tolist()
    most = max(sum(column) for rows in entries for column in zip(*rows, strict=True))
    for rank, found in enumerate(ranks.run(2, _layers, str(file))):
        assert found == [[dealt(file, 20, rank), dealt(file, 20, 2 + rank)], mean, most]


def test_older_results_and_random_routing_say_nothing(file: Path) -> None:
    plain = dataclasses.replace(case_of(file), routing_file="")
    assert replay.shown(plain) == dataclasses.asdict(plain)
    assert replay.said({}) == replay.said(replay.shown(plain)) == ""


@pytest.mark.parametrize("command", ["dispatch-combine", "moe"])
def test_files_of_other_sizes_are_named(command: str, file: Path, tmp_path: Path) -> None:
    sizes = ["--ranks", "2", "--backend", "host", "--tokens", "4", "--routing", str(file), "--model", "mixtral-8x7b"]
    for more, want in (([], "top-2 of 8 experts of mixtral-8x7b"), (["--topk", "3", "--experts", "16"], "top-3 of 16")):
        with pytest.raises(BadInput, match=want) as caught:
            CliRunner().invoke(app, [command, *sizes, *more], catch_exceptions=False)
        assert caught.value.argument == "routing" and "top-3 of 8 experts of mine" in str(caught.value)
    (tmp_path / "none").write_text("no file")
    for wrong in ("none", "missing"):
        sizes[7] = str(tmp_path / wrong)
        with pytest.raises(BadInput, match=wrong) as caught:
            CliRunner().invoke(app, [command, *sizes], catch_exceptions=False)
        assert caught.value.argument == "routing"


def test_a_file_without_tokens_and_skew_beside_one_are_refused(file: Path, tmp_path: Path) -> None:
    empty = Recorded(EXPERTS, TOPK, (), torch.empty(0, 3).int(), torch.empty(0, TOPK).short()).save(tmp_path / "empty")
    with pytest.raises(BadInput, match="no tokens"):
        case_of(empty).check()
    case_of(file).check()
    with pytest.raises(BadInput, match="skew"):
        case_of(file, skew=0.25).check()


def test_the_command_passes_the_file_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cli, "_run_case", lambda case, json: asked.append(case))
    monkeypatch.setattr(moe, "run", asked.append)
    words = ["--ranks", "2", "--backend", "host", "--routing", str(file)]
    for command in ("dispatch-combine", "moe"):
        assert CliRunner().invoke(app, [command, *words], catch_exceptions=False).exit_code == 0
    assert [case.routing_file for case in asked] == [str(file)] * 2


@pytest.mark.long
@pytest.mark.parametrize("command", ["dispatch-combine", "moe"])
def test_the_command_measures_and_show_says_which(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A synthetic file, on two processes of the command's own."""
    file = synthesize("mixtral-8x7b", 64, zipf=1.2, seed=3).save(tmp_path / "s.routing")
    words = ["--model", "mixtral-8x7b", "--hidden", "64", "--ranks", "2", "--backend", "host", "--tokens", "16"]
    words += ["--replays", "1", "--no-peers", "--routing", str(file), "--json", str(tmp_path / "out.json")]
    words += ["--no-ceiling"] if command == "dispatch-combine" else ["--intermediate", "32"]
    told = CliRunner().invoke(app, [command, *words], catch_exceptions=False)
    assert told.exit_code == 0 and "Zipf exponent 1.2" in " ".join(told.stdout.split())
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["case"]["routing"]["zipf"] == "1.2" and found["case"]["routing"]["source"] == "synthetic"
    capfd.readouterr()
    show([tmp_path / "out.json"])
    assert "routing of s.routing (synthetic of mixtral-8x7b" in " ".join(capfd.readouterr().out.split())


def test_the_model_of_times_is_not_fitted_to_replayed_routing(tmp_path: Path) -> None:
    kept = Path(__file__).parents[2] / "bench" / "results" / "ht-h200-4.json"
    assert measured.read(kept)
    result = json.loads(kept.read_text())
    about = {"source": "recorded", "model": "", "tokens": 8, "layers": 1}
    result["case"] |= {"routing_file": "run.routing", "routing": about}
    (tmp_path / "replayed.json").write_text(json.dumps(result))
    assert measured.read(tmp_path / "replayed.json") == []
