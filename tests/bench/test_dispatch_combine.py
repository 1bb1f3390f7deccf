"""dispatch-combine and sweep on CPU ranks: by themselves and under torchrun, their JSON against numbers of our own."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from moecomm.backends import host
from moecomm.base import packets
from moecomm_bench import dispatch_combine
from moecomm_bench.case import RoundsCase
from moecomm_bench.ours import operations
from moecomm_bench.simulate.domain import Operation
from moecomm_bench.simulate.rows import lines_of

from ..conftest import Ranks
from ..fresh_python import run_python

SIZES = ["--hidden", "128", "--experts", "8", "--topk", "3", "--backend", "host"]
HIDDEN, EXPERTS, TOPK = 128, 8, 3
CASE = RoundsCase(
    model="",
    hidden=HIDDEN,
    topk=TOPK,
    experts=EXPERTS,
    ranks=2,
    backend="host",
    tokens=[5, 24],
    layouts=["flat", "expert", "batched"],
    payloads=["bf16", "fp8"],
    sms=[1],
    mode="eager",
    replays=4,
    skew=0.0,
    rows_wire=True,
)


def bench(tmp_path: Path, *words: str, start: tuple[str, ...] = ("-m", "moecomm_bench")) -> tuple[str, Any]:
    """Return what the command prints, and the JSON that it writes."""
    out = tmp_path / "found.json"
    done = run_python(*start, *words, "--json", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


def counted(tokens: int, ranks: int) -> dict[str, Any]:
    """Rows between ranks, counted one by one, as means over inputs."""
    rows, entries = [[0.0] * ranks for _ in range(ranks)], [[0.0] * ranks for _ in range(ranks)]
    singles = 0.0  # rows between ranks of which the rank has one expert
    one = 1 / CASE.inputs
    links = Counter[tuple[int, str, int]]()  # rows out of, and into, a rank in an input
    for rank, index in itertools.product(range(ranks), range(CASE.inputs)):
        for token in CASE.routing(tokens, rank, index)[0].tolist():
            owners = [expert // (EXPERTS // ranks) for expert in token]
            for owner in owners:
                entries[rank][owner] += one
            for owner in set(owners):
                rows[rank][owner] += one
                singles += one * (owner != rank and owners.count(owner) == 1)
                links.update([(index, "out", rank), (index, "in", owner)] if owner != rank else [])
    remote = [sum(rows[a][b] for b in range(ranks) if b != a) for a in range(ranks)]
    busiest = [max(count for key, count in links.items() if key[0] == index) for index in range(CASE.inputs)]
    return {
        "wire": statistics.mean(remote),
        "by_expert": statistics.mean(sum(entries[a][b] for b in range(ranks) if b != a) for a in range(ranks)),
        "busiest": statistics.mean(busiest),
        "exact": 2 - singles / sum(remote),
        "flat": sum(map(sum, rows)) / ranks,
        "expert": sum(map(sum, entries)) / ranks,
    }


def check_row(row: dict[str, Any], ceiling: float) -> None:
    """That figures agree with each other."""
    us = row["us"]
    for times in (us, row["alone_us"]):
        assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert "eager_us" not in row, "on CPUs every time is"
    assert row["wire_gbs"] == pytest.approx(row["wire_bytes"] / us["p50"] / 1e3, abs=1e-3)
    assert row["logical_gbs"] == pytest.approx(row["logical_bytes"] / us["p50"] / 1e3, abs=1e-3)
    assert row["of_wire"] == pytest.approx(row["wire_bytes"] / ceiling / 1e3 / us["p50"], abs=1e-3)


@pytest.mark.long
def test_every_operation_has_a_row_whose_figures_agree(tmp_path: Path) -> None:
    layouts, words = "flat,expert,batched", ["--tokens", "5,24", "--sms", "1", "--replays", "4", "--ranks", "2"]
    words += ["--singles", "6", "--rows-wire"]
    said, found = bench(tmp_path, "dispatch-combine", *SIZES, *words, "--layout", layouts)
    assert found["benchmark"] == "dispatch-combine" and found["backend"] == "host"
    assert found["command"].startswith("python -m moecomm_bench dispatch-combine --hidden 128")
    assert {"python", "torch", "moecomm"} <= set(found["versions"])
    ceiling = found["ceiling"][0]["gbs"]
    assert ceiling == max(way["gbs"] for way in found["ceiling"]) > 0.1

    ours = [row for row in found["rows"] if row["who"] == "moecomm"]
    keys = ("what", "layout", "payload", "variant")
    wanted = [tuple(getattr(op, key) for key in keys) for op in operations(CASE)]
    for tokens in (5, 24):
        here = [row for row in ours if row["tokens"] == tokens]
        assert [tuple(row[key] for key in keys) for row in here] == wanted
        traffic = counted(tokens, 2)
        for row in here:
            check_row(row, ceiling)
            assert row["sms"] == row["sms_asked"] == 1
            check_bytes(row, traffic)
    assert [(memory["tokens"], memory["layout"]) for memory in found["memory"]] == [
        (tokens, layout) for tokens in (5, 24) for layout in layouts.split(",")
    ]
    assert all(0 < memory["beyond_outputs"] < memory["window"] for memory in found["memory"])

    peers = [row for row in found["rows"] if row["who"] == "gloo"]
    assert [(row["tokens"], row["what"], row["layout"]) for row in peers] == [
        (tokens, what, layout)
        for tokens in (5, 24)
        for layout in ("flat", "expert")
        for what in ("dispatch", "combine")
    ]
    for row in peers:
        check_row(row, ceiling)
        traffic = counted(row["tokens"], 2)
        assert row["logical_bytes"] == pytest.approx(traffic[row["layout"]] * 2 * HIDDEN)
        assert row["wire_bytes"] == pytest.approx(traffic["wire"] * 2 * HIDDEN), "as of ours"
        moved = traffic["wire" if row["layout"] == "flat" else "by_expert"]
        assert row["moved_bytes"] == pytest.approx(moved * 2 * HIDDEN)
    assert "all-to-all ceiling" in said and "of sum" in said
    assert "alone: 6 single calls, caches flushed" in said


def measured(on: Ranks, like: RoundsCase, **other: Any) -> dict[str, Any]:
    """A case on ranks that are forked, and not started anew, as the command starts them."""
    case = replace(like, peers=False, **other)
    return dispatch_combine.merge(case, on.run(case.ranks, _measure, asdict(case)))


def _measure(rank: int, group: Any, job: dict[str, Any]) -> dict[str, Any]:
    return dispatch_combine.run_rank(group, **job)


def check_bytes(row: dict[str, Any], traffic: dict[str, Any]) -> None:
    """Bytes of a row of the table, from the counts."""
    payload = {"bf16": 2 * HIDDEN, "fp8": HIDDEN + 4, "": 0}[row["payload"]]
    sent = {"fp32 wire": 2 * HIDDEN * traffic["exact"], "": 0}.get(row["variant"], 2 * HIDDEN)
    if row["variant"] == "rows wire":
        sent *= traffic["by_expert"] / traffic["wire"]
    handed_out = payload + (2 * HIDDEN if row["variant"] else 0)
    # Flat: ids of 8 bytes, weights of 4, the source's rank and token.
    beside = TOPK * (8 + 4) + 2 * 4 if row["layout"] == "flat" and payload else 0
    assert row["wire_bytes"] == pytest.approx(traffic["wire"] * handed_out)
    assert row["moved_bytes"] == pytest.approx(traffic["wire"] * (payload + sent + beside))
    assert row["ideal_bytes"] == pytest.approx(traffic["wire"] * (payload + sent))
    assert row["beside_bytes"] == pytest.approx(traffic["wire"] * beside)
    assert row["busiest_bytes"] == pytest.approx(traffic["busiest"] * handed_out)
    assert row["logical_bytes"] == pytest.approx(traffic["flat" if row["layout"] == "flat" else "expert"] * handed_out)


def _measure_in_packets(rank: int, group: Any, job: dict[str, Any]) -> dict[str, Any]:
    with patch.object(host, "packet_bytes", packets.room):
        return _measure(rank, group, job)


def test_moved_bytes_of_packets_are_their_lines(ranks: Ranks) -> None:
    """A line of 128 bytes has 15 words of 8, and a row of one packet TOPK words of entries."""
    case = replace(CASE, tokens=[5], layouts=["flat", "expert"], replays=1, ceiling=False, peers=False, rows_wire=False)
    found = dispatch_combine.merge(case, ranks.run(2, _measure_in_packets, asdict(case)))
    traffic = counted(5, 2)
    sums = -(-2 * HIDDEN // 8 // 15)
    for row in found["rows"]:
        words = {"bf16": 2 * HIDDEN // 8 + TOPK, "fp8": HIDDEN // 8 + 1 + TOPK, "": 0}[row["payload"]]
        lines = -(-words // 15) + (row["what"] != "dispatch") * sums
        if row["variant"] != "fp32 wire":
            assert row["moved_bytes"] == pytest.approx(traffic["wire"] * 128 * lines)
            if row["what"] != "pair":
                operation = Operation(row["what"], row["layout"], row["variant"])
                predicted = lines_of(operation, row["payload"], HIDDEN, TOPK)
                assert predicted is not None and predicted.nbytes == 128 * lines, "as `moecomm simulate` counts them"
            assert row["ideal_bytes"] < row["moved_bytes"]


@pytest.mark.long
def test_torchrun_starts_the_ranks_as_well(tmp_path: Path) -> None:
    start = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "moecomm_bench")
    words = ["--tokens", "1,2,4", "--replays", "2", "--no-ceiling"]
    said, found = bench(tmp_path, "sweep", *SIZES, *words, start=start)
    assert found["command"].startswith("torchrun --nproc-per-node 2 -m moecomm_bench sweep")
    assert found["case"]["ranks"] == 2 and found["ceiling"] == []
    rows = [(row["tokens"], row["who"], row["what"], row["variant"]) for row in found["rows"]]
    everybody = [
        ("moecomm", "dispatch", ""),
        ("moecomm", "combine", "y in the window"),
        ("moecomm", "combine", "y outside"),
        ("gloo", "dispatch", ""),
        ("gloo", "combine", ""),
    ]
    assert rows == [(tokens, *words) for tokens in (1, 2, 4) for words in everybody]
    assert all(row["of_wire"] is None and row["us"]["p50"] > 0 for row in found["rows"])
    assert said.count("tokens  by") == 1, "rank 0 alone reports"


@pytest.mark.long
def test_latency_and_all_to_all_write_their_rows(tmp_path: Path) -> None:
    said, found = bench(tmp_path, "latency", "--backend", "host", "--most-bytes", "5000", "--replays", "2")
    assert [row["bytes"] for row in found["rows"]] == [1 << power for power in range(13)]
    for row in found["rows"]:
        us = row["us"]
        assert 0 < us["p50"] <= us["p90"] <= us["p99"]
        assert row["gbs"] == pytest.approx(row["bytes"] / us["p50"] / 1e3, abs=1e-3)
    assert "half a round trip" in said
    _, found = bench(tmp_path, "all-to-all", "--backend", "host", "--ranks", "2", "--part-bytes", "100000")
    assert {row["method"] for row in found["rows"]} == {"memcpy write", "memcpy read"}
    for row in found["rows"]:
        assert row["gbs"] == pytest.approx(12 * 8192 / row["us"]["p50"] / 1e3, rel=0.01)


@pytest.mark.gpu1
@pytest.mark.long
def test_one_of_the_ranks_of_torchrun_times_the_gemms(tmp_path: Path) -> None:
    start = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "moecomm_bench")
    sizes = ["--model", "mixtral-8x7b", "--hidden", "64", "--intermediate", "32", "--tokens", "1", "--ranks", "4"]
    said, _ = bench(tmp_path, "gemm", *sizes, "--replays", "1", start=start)
    assert said.count("grouped GEMMs of a rank's experts") == 1
