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
import torch
from typer.testing import CliRunner

from moecomm.backends import host
from moecomm.base import packets
from moecomm_bench import dispatch_combine
from moecomm_bench.case import RoundsCase
from moecomm_bench.cli import app
from moecomm_bench.ours import IN_WINDOW, Ours, TimedOperation, operations
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


def test_words_of_the_command_become_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RoundsCase] = []
    monkeypatch.setattr(dispatch_combine, "run", asked.append)
    words = ["--tokens", "40", "--layout", "flat", "--payload", "bf16", "--ranks", "4", "--domain-ranks", "2"]
    words += ["--skew", "--cold", "--replays", "2", "--singles", "7", "--no-peers", "--no-ceiling"]
    told = CliRunner().invoke(app, ["dispatch-combine", *SIZES, *words], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    about: dict[str, Any] = {"tokens": [40], "layouts": ["flat"], "payloads": ["bf16"], "ranks": 4, "domain_ranks": 2}
    how: dict[str, Any] = {"skew": 0.25, "cold": True, "replays": 2, "singles": 7, "peers": False, "ceiling": False}
    how["rows_wire"] = False
    assert asked == [replace(CASE, **about, **how, sms=[0])]


def test_domains_of_one_rank_have_room_for_what_crosses(ranks: Ranks) -> None:
    beyond = []
    about: dict[str, Any] = {"ranks": 2, "tokens": [24], "layouts": ["flat"], "replays": 1, "ceiling": False}
    for domain_ranks in (0, 1):
        found = measured(ranks, CASE, **about, domain_ranks=domain_ranks, rows_wire=False)
        assert found["case"]["domain_ranks"] == domain_ranks and all("us" in row for row in found["rows"])
        beyond.append(found["memory"][0])
    assert all(0 < memory["beyond_outputs"] < memory["window"] for memory in beyond)
    assert beyond[0]["beyond_outputs"] < beyond[1]["beyond_outputs"]


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


def test_pairs_and_layouts_are_compared_with_their_parts() -> None:
    def row(what: str, layout: str, payload: str, variant: str, us: float) -> dict[str, Any]:
        about = {"who": "moecomm", "tokens": 5, "sms_asked": 0, "what": what, "layout": layout}
        sizes = {"wire_bytes": 8000.0, "busiest_bytes": 16000.0, "logical_bytes": 0.0}
        times = {"us": [us] * 4, "eager_us": [us + 1] * 4, "alone_us": [us + 2] * 4, "host_us": us / 2}
        return {**about, "payload": payload, "variant": variant, **times, **sizes}

    def rank(factor: float) -> dict[str, Any]:
        rows = [
            row("dispatch", "flat", "fp8", "", 2 * factor),
            row("combine", "flat", "", "y in the window", 3 * factor),
            row("combine", "flat", "", "y outside", 4 * factor),
            row("pair", "flat", "fp8", "y in the window", 4 * factor),
            row("dispatch", "expert", "fp8", "", 3 * factor),
            row("combine", "expert", "", "bf16 wire", 5 * factor),
        ]
        ceiling = [{"method": "st", "sms": 8, "bytes": 8000, "us": [1.0 * factor] * 4}]
        memory = [{"tokens": 5, "layout": "flat", "window": 10 * factor, "beyond_outputs": 1}]
        alone = {"calls": 4, "floor_us": [factor] * 4, "step_ns": int(32 * factor)}
        libraries = {"deep_ep": "2.1"}
        shown = {"backend": "host", "ceiling": ceiling, "memory": memory, "rows": rows, "alone": alone}
        return {**shown, "libraries": libraries}

    found = dispatch_combine.merge(CASE, [rank(1.0), rank(2.0)])
    assert found["libraries"] == {"deep_ep": "2.1"}
    assert found["ceiling"][0]["gbs"] == 4.0
    assert [row["us"]["p50"] for row in found["rows"]] == [4, 6, 8, 8, 6, 10]  # of the slower rank
    assert [row["host_us_slowest"] for row in found["rows"]] == [2, 3, 4, 4, 3, 5]
    assert found["rows"][0]["host_us"] == 1.5  # of the rank in the middle
    assert [row["of_wire"] for row in found["rows"]] == [0.5, 0.3333, 0.25, 0.25, 0.3333, 0.2]
    assert [row.get("of_sum") for row in found["rows"]] == [None, None, None, 0.8, None, None]
    assert [row.get("of_flat") for row in found["rows"]] == [None, None, None, None, 1.5, 1.25]
    assert found["memory"] == [{"tokens": 5, "layout": "flat", "window": 20.0, "beyond_outputs": 1}]
    slower = dict.fromkeys(("p50", "p90", "p99"), 2.0)
    assert found["alone"] == {"calls": 4, "floor_us": slower, "step_ns": 64}
    assert [(row["alone_us"]["p50"], row["eager_us"]["p99"]) for row in found["rows"][:2]] == [(6, 5), (8, 7)]
    assert found["ceiling_is"] == "ceiling"


def test_a_ceiling_that_a_row_beats_is_a_reference() -> None:
    sizes = {"wire_bytes": 8000.0, "busiest_bytes": 8000.0, "logical_bytes": 0.0}
    about = {"who": "nccl", "tokens": 5, "sms_asked": 0, "what": "dispatch", "layout": "flat", "payload": "bf16"}
    row = {**about, "variant": "", "us": [0.9], "host_us": None, **sizes}
    rank = {"backend": "lsa", "memory": [], "rows": [row]}
    rank["ceiling"] = [{"method": "st", "sms": 8, "bytes": 8000, "us": [1.0]}]
    found = dispatch_combine.merge(CASE, [rank, rank])
    assert found["rows"][0]["of_wire"] == 1.1111 and found["ceiling_is"] == "reference"


def test_skewed_routing_is_held_against_the_busiest_link(ranks: Ranks) -> None:
    flat: dict[str, Any] = {"layouts": ["flat"], "payloads": ["bf16"]}
    found = measured(ranks, CASE, ranks=4, tokens=[40], **flat, skew=0.25, cold=True, replays=2, inputs=1)
    ceiling = found["ceiling"][0]["gbs"]
    assert found["case"]["skew"] == 0.25 and found["case"]["cold"]
    for row in found["rows"]:
        assert row["busiest_bytes"] > 1.2 * row["wire_bytes"]
        assert row["of_wire"] == pytest.approx(row["busiest_bytes"] / ceiling / 1e3 / row["us"]["p50"], abs=1e-3)
    assert {row["who"] for row in found["rows"]} == {"moecomm"}


def _pair_of_fp8(rank: int, group: Any) -> list[tuple[bool, bool, list[str]]]:
    """Say of each input if a pair in fp8 combines the rows that a dispatch in bf16 hands out, and what it calls."""
    case = replace(CASE, ranks=2, layouts=["flat"], cold=True, inputs=3)
    found = []
    with Ours(case, group, torch.device("cpu"), 5) as ours:
        buffer, made = ours.buffer, []

        def combine(y: torch.Tensor, handle: Any, **options: Any) -> None:
            made.append("combine")
            combined.append((y, handle))

        dispatch, combined = buffer.dispatch, []
        with (
            patch.object(buffer, "combine", combine),
            patch.object(buffer, "dispatch", lambda **given: (made.append("dispatch"), dispatch(**given))[1]),
            patch.object(ours.clock, "_flush", lambda: made.append("flush")),
        ):
            calls = ours.call(TimedOperation("pair", "flat", "fp8", IN_WINDOW, 1)).calls
            for given, call in zip(ours.inputs, calls, strict=True):
                made.clear()
                call()
                steps = list(made)
                y, handle = combined[-1]
                arrived = dispatch(given.x, given.topk_idx, given.topk_weights, layout="flat")
                rows = len(arrived.x)
                found.append((torch.equal(y[:rows], arrived.x), buffer.empty(handle).shape == y.shape, steps))
    return found


def test_pairs_in_fp8_combine_the_rows_that_arrived_and_flush_between(ranks: Ranks) -> None:
    steps = ["dispatch", "flush", "combine"]
    assert ranks.run(2, _pair_of_fp8) == [[(True, True, steps)] * 3] * 2


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


@pytest.mark.gpu1
@pytest.mark.long
def test_one_of_the_ranks_of_torchrun_times_the_gemms(tmp_path: Path) -> None:
    start = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "moecomm_bench")
    sizes = ["--model", "mixtral-8x7b", "--hidden", "64", "--intermediate", "32", "--tokens", "1", "--ranks", "4"]
    said, _ = bench(tmp_path, "gemm", *sizes, "--replays", "1", start=start)
    assert said.count("grouped GEMMs of a rank's experts") == 1


def test_no_room_in_the_window_is_a_row_that_says_so() -> None:
    why = {"who": "moecomm", "tokens": 5, "sms_asked": 0, "what": "dispatch", "layout": "batched", "payload": "bf16"}
    row = {**why, "variant": "", "why": "window_bytes: got too few"}
    rank = {"backend": "host", "ceiling": [], "memory": [], "rows": [row]}
    assert dispatch_combine.merge(CASE, [rank, rank])["rows"] == [row]


@pytest.mark.long
def test_why_no_matmul_was_timed_beside_operations_is_said_once(tmp_path: Path) -> None:
    words = ["--ranks", "1", "--tokens", "3", "--replays", "1", "--no-ceiling", "--no-peers", "--overlap-gemm"]
    words += ["--singles", "0"]
    said, found = bench(tmp_path, "dispatch-combine", *SIZES, *words)
    assert [row.get("overlap") for row in found["rows"] if row["what"] == "dispatch"] == [{"why": "on GPUs only"}] * 4
    assert said.count("no matmul beside operations: on GPUs only") == 1


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
