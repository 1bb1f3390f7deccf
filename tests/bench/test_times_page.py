"""Tables of three times, of decode and of training steps: made of results that have them, and absent without any."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moecomm_bench import sources

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import launches
import tables
import times

ABOUT: dict[str, Any] = {
    "machine": {"gpus": ["NVIDIA H100 80GB HBM3"] * 2, "cpu": "some", "cores": 16},
    "kernels": sources.digests(tables.CSRC),
    "backend": "lsa/nccl",
    "date": "2026-11-25",
    "commit": "c0ffee00",
}
CASE = {"ranks": 2, "model": "deepseek-v3", "mode": "graph", "tokens": [128]}


def us(p50: float) -> dict[str, float]:
    return {"p50": p50, "p90": p50 + 1, "p99": p50 + 2}


def row(who: str, what: str, **other: Any) -> dict[str, Any]:
    about = {"who": who, "what": what, "layout": "batched", "payload": "", "variant": "", "tokens": 128, "sms": 16}
    return {**about, "us": us(10), "eager_us": us(20), "alone_us": us(30), "host_us": 4.56, **other}


def step(delays: bool, p50: float) -> dict[str, Any]:
    return {"tokens": 1, "layout": "flat", "payload": "fp8", "experts": "stand-in", "delays": delays, "us": us(p50)}


RESULTS: dict[str, dict[str, Any]] = {
    "times-few-h200-4": {
        **ABOUT,
        "case": CASE,
        "memory": [
            {"tokens": 128, "layout": layout, "window": 3 << 29, "beyond_outputs": 1}
            for layout in ("expert", "batched")
        ],
        "rows": [
            row("moecomm", "dispatch", payload="fp8", layout="expert"),
            row("moecomm", "dispatch", payload="fp8"),
            row("moecomm", "pair", payload="fp8", variant="bf16 wire"),
            row("nccl", "combine", sms=0, eager_us=None),
            {**row("moecomm", "combine"), "why": "no room"},
        ],
    },
    "zipf-h100-2": {**ABOUT, "case": {**CASE, "routing": {"zipf": "0.8"}}, "memory": [], "rows": [row("x", "combine")]},
    "recorded-h100-2": {
        **ABOUT,
        "case": {**CASE, "routing": {"source": "recorded"}},
        "memory": [],
        "rows": [row("x", "combine")],
    },
    "decode-h100-2": {
        **ABOUT,
        "case": CASE,
        "expert_us": 50.0,
        "waits_us": 800.0,
        "rows": [step(False, 5000), step(True, 6000), {**step(False, 1), "tokens": 2, "why": "no room"}],
    },
    "training-h100-2": {
        **ABOUT,
        "case": CASE,
        "rows": [
            {
                "who": "moecomm",
                "what": "forward",
                "tokens": 8,
                "us": us(9),
                "layer_us": 2.25,
                "tflops": 3,
                "of_torch": 2,
            }
        ],
    },
}
del RESULTS["times-few-h200-4"]["rows"][4]["alone_us"]
del RESULTS["decode-h100-2"]["rows"][2]["us"]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.fixture
def with_results(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tables, times):
        monkeypatch.setattr(module, "names", lambda: sorted(RESULTS))
        monkeypatch.setattr(module, "load", RESULTS.__getitem__)
    monkeypatch.setattr(launches, "noted", lambda commit: {"launches": launches.digests()})


def test_rows_have_the_time_alone_in_a_graph_and_eager(with_results: None) -> None:
    expert, batched, nccl, zipf, recorded = cells(times.operations())
    some, window = ["30.0 us", "31.0 us", "32.0 us", "10.0 us"], ["4.6 us", "16", "1.5 GiB"]
    assert expert == ["2 H100s", "128", "moecomm, `expert`", "dispatch, fp8", *some, "20.0 us", *window]
    assert batched == ["2 H100s", "128", "moecomm, `batched`", "dispatch, fp8", *some, "20.0 us", *window]
    assert nccl == ["2 H100s", "128", "nccl, `batched`", "combine", *some, "", "4.6 us", "", ""]
    assert zipf[2] == "x, `batched`, Zipf 0.8" and recorded[2] == "x, `batched`, recorded routing"


def test_steps_stand_in_step_beside_out_of_step(with_results: None) -> None:
    late = ["6000 us", "6002 us", "800 us"]
    assert cells(times.decode()) == [["2 H100s", "1", "`flat`, fp8", "50 us a layer", "5000 us", "5002 us", *late]]
    assert cells(times.training()) == [
        ["deepseek-v3", "2 H100s", "8", "forward", "9.0 us", "2.2 us", "3", "2.00"],
    ]
    assert [topic.title for topic in times.topics()] == ["What one call costs", "Decode steps", "Training steps"]


def of_combine(layout: str, eager_us: float, **other: Any) -> dict[str, Any]:
    return {**row("moecomm", "combine", layout=layout), "tokens": 4096, "eager_us": us(eager_us), **other}


def test_eager_combines_without_room_are_explained(with_results: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note stands only if the run says that its window was full, and not if an eager call may wait for the host."""
    slow = of_combine("flat", 20, variant="y outside")
    others = [of_combine("expert", 11), of_combine("batched", 20, host_us=19.0)]
    full = {"who": "moecomm", "what": "pair", "layout": "flat", "why": "window_bytes: got a window with 5 bytes free"}
    kept = RESULTS["times-few-h200-4"]
    for rows, noted in (([slow, *others, full], True), ([slow], False), ([*others, full], False)):
        monkeypatch.setitem(RESULTS, "times-few-h200-4", {**kept, "rows": [*kept["rows"][:4], *rows]})
        notes = times.no_room("times-few-h200-4")
        assert len(notes) == noted and all("4096 tokens, `flat`, y outside:" in note for note in notes)
        assert all(note in times.operations() for note in notes)


def test_decode_with_slow_single_steps_says_that_they_are_not_explained(
    with_results: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert times.tails() == [] and "not explained" not in times.decode()
    late = {**step(False, 5000), "us": {"p50": 5000, "p90": 5001, "p99": 10500}}
    kept = RESULTS["decode-h100-2"]
    monkeypatch.setitem(RESULTS, "decode-h100-2", {**kept, "rows": [late, *kept["rows"]]})
    [note] = times.tails()
    assert note.startswith("`decode-h100-2`: p99 is up to 2.1 times p50.") and times.decode().endswith(note)


def test_without_such_results_there_are_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "names", lambda: ["ht-h200-4"])
    assert times.topics() == []
