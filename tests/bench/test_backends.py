"""Several backends in one run: what each has lost is a row that says so, and the others have theirs."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from moecomm.errors import BadInput, Unsupported
from moecomm.tools.launch import Failure, RanksFailed
from moecomm_bench import backends, dispatch_combine
from moecomm_bench.backends import Way
from moecomm_bench.case import RoundsCase, Traffic

from ..conftest import Ranks

HIDDEN, EXPERTS, RANKS, NEAR = 128, 8, 4, 2
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
