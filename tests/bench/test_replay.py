"""Recorded routing in benchmarks on two CPU ranks: rows as counting the file finds them, and what results say."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moecomm.errors import BadInput
from moecomm.routing import Recorded
from moecomm_bench import replay
from moecomm_bench.case import RoundsCase, Traffic
from moecomm_bench.cli import app

from ..conftest import Ranks
from .test_dispatch_combine import measured as measured_on

EXPERTS, TOPK, TOKENS = 8, 3, 30


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
