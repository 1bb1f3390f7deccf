"""Several backends in one run: what each has lost is a row that says so, and the others have theirs."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moecomm.errors import BadInput, Unsupported
from moecomm.tools.launch import Failure, RanksFailed
from moecomm_bench import backends, dispatch_combine
from moecomm_bench.backends import Way
from moecomm_bench.case import RoundsCase, Traffic

from ..conftest import Ranks
from .test_dispatch_combine import bench, measured

HIDDEN, EXPERTS, RANKS, NEAR = 128, 8, 4, 2
SIZES = ["--hidden", str(HIDDEN), "--experts", str(EXPERTS), "--topk", "3", "--ranks", str(RANKS), "--replays", "1"]
CASE = RoundsCase("", HIDDEN, 3, EXPERTS, RANKS, "host", [5], ["flat"], ["bf16"], [0], "eager")


def counted(tokens: int, *, direct: bool, inputs: int = 1) -> tuple[float, float]:
    """Rows inside and across domains of two, a token after the other, as they go to their owners: mean over inputs."""
    inside = across = 0
    for rank, index in itertools.product(range(RANKS), range(inputs)):
        for token in CASE.routing(tokens, rank, index)[0].tolist():
            owners = {expert // (EXPERTS // RANKS) for expert in token if expert >= 0}
            for domain in {owner // NEAR for owner in owners}:
                there = {owner for owner in owners if owner // NEAR == domain}
                if domain == rank // NEAR:
                    inside += len(there - {rank})
                elif direct:
                    across += len(there)
                else:
                    across += 1
                    inside += len(there - {domain * NEAR + rank % NEAR})
    return inside / RANKS / inputs, across / RANKS / inputs


def exact_rows(tokens: int) -> float:
    """Rows of y's dtype that leave a rank: one for a token's only expert at another rank, two for a sum."""
    rows = 0
    for rank, index in itertools.product(range(RANKS), range(CASE.inputs)):
        for token in CASE.routing(tokens, rank, index)[0].tolist():
            owners = [expert // (EXPERTS // RANKS) for expert in token if expert >= 0]
            rows += sum(min(owners.count(owner), 2) for owner in set(owners) - {rank})
    return rows / RANKS / CASE.inputs


def _crossing(rank: int, group: Any) -> list[tuple[float, float]]:
    idx = CASE.routing(70, rank)[0]
    found = Traffic.of(group, idx, EXPERTS, NEAR)
    whole = Traffic.of(group, idx, EXPERTS)
    return [found.crossing(direct=True), found.crossing(direct=False), whole.crossing(direct=False)]


def test_rows_inside_and_across_domains_are_what_counting_finds(ranks: Ranks) -> None:
    direct, forwarded = counted(70, direct=True), counted(70, direct=False)
    assert forwarded[1] < direct[1]
    for found in ranks.run(RANKS, _crossing):
        assert found == [direct, forwarded, (sum(direct), 0.0)]


@pytest.mark.skipif(torch.version.cuda is not None, reason="gin may run here")
@pytest.mark.long
def test_backends_and_domains_stand_beside_the_first(tmp_path: Path) -> None:
    words = ["--tokens", "2600", "--layout", "flat,expert", "--payload", "fp8"]
    ways = ["--backend", "host,gin", "--domain-ranks", f"0,{NEAR}"]
    said, found = bench(tmp_path, "dispatch-combine", *SIZES, *ways, *words)
    assert found["benchmark"] == "backends" and found["case"]["tokens"] == [2600] and found["case"]["ranks"] == RANKS
    assert found["ways"] == [{"backend": name, "domain_ranks": near} for near in (0, 2) for name in ("host", "gin")]
    failed = [row for row in found["rows"] if "why" in row]
    assert [(row["backend"], row["domain_ranks"], row["tokens"]) for row in failed] == [
        ("gin", 0, 2600),
        ("gin", 2, 2600),
    ]
    assert all(row["why"].startswith("backend 'gin' can't run here: ") for row in failed)
    assert said.replace("\n", "").count("backend 'gin' can't run here") == 2
    rows = [row for row in found["rows"] if "why" not in row]
    assert len(rows) == 2 * 2 * 4 and {row["through"] for row in rows} == {"host"}
    for row in rows:
        first = next(other for other in rows if same(other, row))
        assert row["of_first"] == pytest.approx(row["us"]["p50"] / first["us"]["p50"], abs=1e-3)
        check_crossing(row, row["domain_ranks"], direct=False)


@pytest.mark.parametrize("near", [0, NEAR])
def test_few_tokens_cross_straight(ranks: Ranks, near: int) -> None:
    about: dict[str, Any] = {"tokens": [4], "layouts": ["flat", "expert"], "payloads": ["fp8"], "replays": 1}
    found = measured(ranks, CASE, **about, domain_ranks=near, ceiling=False)
    assert len(found["rows"]) == 2 * 4
    for row in found["rows"]:
        check_crossing(row, near, direct=near > 0)


def check_crossing(row: dict[str, Any], domain_ranks: int, *, direct: bool) -> None:
    """Its bytes inside and across domains, from the counts."""
    assert row["straight"] == direct
    near, far = counted(row["tokens"], direct=direct, inputs=CASE.inputs)
    if domain_ranks == 0:
        near, far = sum(counted(row["tokens"], direct=True, inputs=CASE.inputs)), 0.0
    beside = 12 * CASE.topk + 8 if row["layout"] == "flat" else 0  # ids, weights, source
    fp8, wire = HIDDEN + 4 + beside, (2 if row["layout"] == "flat" or row["variant"] == "bf16 wire" else 4) * HIDDEN
    if domain_ranks == 0 and wire == 4 * HIDDEN:
        wire = 2 * HIDDEN * exact_rows(row["tokens"]) / near
    each = {"dispatch": fp8, "combine": wire, "pair": fp8 + wire}[row["what"]]
    assert row["inside_bytes"] == pytest.approx(near * each)
    assert row["across_bytes"] == pytest.approx(far * each)
    assert row["moved_bytes"] == pytest.approx((near + far) * each)
    assert row["across_gbs"] == pytest.approx(row["across_bytes"] / row["us"]["p50"] / 1e3, abs=1e-3)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("tokens", "what", "layout", "payload", "variant"))


def row(us: float, **other: Any) -> dict[str, Any]:
    about = {"who": "moecomm", "tokens": 5, "what": "dispatch", "layout": "flat", "payload": "bf16", "variant": ""}
    sizes = {"inside_bytes": 8e6, "inside_gbs": 4.0, "across_bytes": 1e6, "across_gbs": 0.5}
    timed = {"us": {"p50": us, "p90": us}, "host_us": None, "sms": 8, "sms_asked": 0}
    return {**about, **sizes, **timed, **other}


def test_a_backend_that_fails_is_not_asked_again_and_loses_nobody_elses_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kept = [], []

    def run(case: RoundsCase, limit_s: float) -> dict[str, Any]:
        asked.append((case.backend, case.domain_ranks, case.tokens, limit_s))
        if case.backend == "gin":
            raise RanksFailed([Failure(1, "Timeout", "had not ended after 9 s", consequence=False)])
        slower = {"lsa": 100.0, "nvshmem": 150.0}[case.backend] * (1 + case.domain_ranks)
        memory = [{"layout": "flat", "window": 1 << 20, "opened": 3 << 20}]
        return {"backend": f"{case.backend}/x", "memory": memory, "rows": [row(slower, tokens=case.tokens[0])]}

    def case_of(way: Way) -> RoundsCase:
        if way == Way("nvshmem", 2):
            raise Unsupported("too old")
        return RoundsCase(**{**CASE.__dict__, "backend": way.backend, "domain_ranks": way.domain_ranks})

    monkeypatch.setattr(dispatch_combine, "run", run)
    ways = backends.ways("lsa,gin,nvshmem", [0, 2])
    backends.dispatch_combine(ways, [5, 7], case_of, 9.0, lambda result: kept.append(json.loads(json.dumps(result))))
    lsa, gin, nvshmem = ("lsa", 0, [5], 9.0), ("gin", 0, [5], 9.0), ("nvshmem", 0, [5], 9.0)
    assert asked[:5] == [lsa, ("lsa", 0, [7], 9.0), gin, nvshmem, ("nvshmem", 0, [7], 9.0)]
    assert [len(result["rows"]) for result in kept] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [(r["backend"], r["tokens"], r.get("of_first"), r.get("why")) for r in kept[-1]["rows"]] == [
        ("lsa", 5, 1.0, None),
        ("lsa", 7, 1.0, None),
        ("gin", 5, None, "rank 1: Timeout: had not ended after 9 s"),
        ("nvshmem", 5, 1.5, None),
        ("nvshmem", 7, 1.5, None),
        ("lsa", 5, 3.0, None),
        ("lsa", 7, 3.0, None),
        ("gin", 5, None, "rank 1: Timeout: had not ended after 9 s"),
        ("nvshmem", 5, None, "too old"),
    ]


def test_what_no_backend_can_do_is_the_callers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def case_of(way: Way) -> RoundsCase:
        raise BadInput("ranks", 3, "a divisor of 8 experts")

    with pytest.raises(BadInput, match="a divisor of 8"):
        backends.dispatch_combine([Way("host"), Way("gin")], [5], case_of, 9.0, lambda _: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(BadInput, match="host, gin, host, domains of 2, gin, domains of 2; want one of each"):
        backends.ways("host,gin", [0, 2])


@pytest.mark.skipif(torch.version.cuda is not None, reason="nvshmem may run here")
@pytest.mark.long
def test_latencies_of_several_backends_are_one_table(tmp_path: Path) -> None:
    begin = time.monotonic()
    words = ["--backend", "host,nvshmem", "--least-bytes", "4", "--most-bytes", "5000", "--replays", "1"]
    said, found = bench(tmp_path, "latency", *words)
    assert found["benchmark"] == "latency-backends" and time.monotonic() - begin < 100
    *rows, last = found["rows"]
    assert [(row["backend"], row["bytes"]) for row in rows] == [("host", 1 << power) for power in range(2, 13)]
    assert last["backend"] == "nvshmem" and last["why"].startswith("backend 'nvshmem' can't run here: ")
    assert [line.split()[:2] for line in said.splitlines()[2:13]] == [[str(1 << n), "host"] for n in range(2, 13)]


def test_rows_have_the_window_of_their_backend_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"tokens": 5, "what": "dispatch", "payload": "fp8", "variant": "", "sms_asked": 0, "us": {"p50": 1.0}}
    sizes = (("flat", 7 << 20), ("expert", 9 << 20))
    memory = [{"layout": layout, "window": nbytes, "opened": 2 * nbytes} for layout, nbytes in sizes]

    def run(case: RoundsCase, limit_s: float) -> dict[str, Any]:
        rows = [{**about, "layout": layout} for layout in case.layouts]
        return {"backend": "host", "memory": memory, "rows": rows}

    monkeypatch.setattr(dispatch_combine, "run", run)
    found: list[dict[str, Any]] = []
    case = replace(CASE, layouts=["flat", "expert"])
    backends.dispatch_combine([Way("host")], [5], lambda way: case, 1.0, found.append)
    windows = [(row["layout"], row["window_bytes"], row["opened_bytes"]) for row in found[-1]["rows"]]
    assert windows == [(layout, nbytes, 2 * nbytes) for layout, nbytes in sizes]
