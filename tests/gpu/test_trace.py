"""Traces of GPUs: spans of the roles of kernels, on the clock of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing import LocalBuffers, check_case, random_case, random_layer

from ..tracing import traces
from .layers import checked

pytestmark = pytest.mark.gpu1

SIZES: dict[str, Any] = {"hidden": 256, "num_experts": 8, "topk": 3, "max_tokens": 700, "dtype": torch.bfloat16}
LAYER: dict[str, Any] = {
    "ranks": 2,
    "hidden": 512,
    "intermediate": 256,
    "num_experts": 8,
    "topk": 2,
    "max_tokens": 600,
}
Event = dict[str, Any]


def of_kernels(trace: dict[str, Any], pid: int) -> dict[int, dict[str, list[Event]]]:
    """Spans of kernels, by round and role."""
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    rounds: dict[int, dict[str, list[Event]]] = {}
    for event in traces.spans_of(trace, pid):
        if tracks[pid, event["tid"]].startswith("block"):
            rounds.setdefault(event["args"]["round"], {}).setdefault(event["name"], []).append(event)
    return rounds


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def test_kernels_of_rounds_are_in_the_trace_when_they_ran(tmp_path: Path) -> None:
    with LocalBuffers(2, **SIZES) as ranks:
        check_case(ranks, random_case(0, ranks=2, **SIZES))
        before = ranks.buffers[0].rounds.flight.rounds
        with moecomm.trace(tmp_path):
            for seed in range(4):
                check_case(ranks, random_case(seed, ranks=2, **SIZES))
            ranks.check()
        made = ranks.buffers[0].rounds.flight.rounds
        check_case(ranks, random_case(0, ranks=2, **SIZES))
    trace = traces.merged(tmp_path)
    errors = [clock["error_ns"] for clock in trace["otherData"]["gpu_clocks"].values()]
    assert len(errors) == 2 and max(errors) < 1_000_000
    slack_us = max(errors) / 1000
    kernels = {pid: of_kernels(trace, pid) for pid in (1, 2)}
    for pid in (1, 2):
        assert sorted(kernels[pid]) == list(range(before + 1, made + 1))
        calls: dict[int, Event] = {}  # of a split dispatch the first half, which launches it
        for event in sorted(traces.spans_of(trace, pid), key=lambda event: float(event["ts"])):
            if " round " in event["name"]:
                calls.setdefault(event["args"]["round"], event)
        for number, roles in kernels[pid].items():
            assert {"kernel"} < roles.keys()
            begin = min(event["ts"] for event in roles["kernel"])
            assert begin >= calls[number]["ts"] - slack_us  # no kernel begins before its launch
            other = min(event["ts"] for event in kernels[3 - pid][number]["kernel"])
            # One clock: no block agrees before the other rank has begun.
            assert all(end(event) >= other for event in roles.get("agree", []))


def test_a_layer_shows_fetch_both_products_and_the_return(tmp_path: Path) -> None:
    case = random_layer(0, **LAYER, dtype=torch.bfloat16)
    case.wire = None
    for rank in range(2):  # every expert has rows
        case.topk_idx[rank] = torch.stack([(torch.arange(len(case.x[rank])) + k) % 8 for k in (0, 1)], dim=1)
    sizes = {name: size for name, size in LAYER.items() if name != "intermediate"}
    with moecomm.trace(tmp_path), LocalBuffers(**sizes) as ranks:
        calls = [{**case.call(rank, "cuda"), "fused": True} for rank in range(2)]
        checked(ranks, case, calls)
    trace = traces.merged(tmp_path)
    for pid in (1, 2):
        (roles,) = of_kernels(trace, pid).values()
        assert {"publish", "kernel", "fetch", "await rows", "gemm 1", "gemm 2"} <= roles.keys()
        assert {"send results", "await results", "reduce"} <= roles.keys()
        assert min(e["ts"] for e in roles["fetch"]) <= min(e["ts"] for e in roles["gemm 1"])
        assert min(end(e) for e in roles["gemm 1"]) <= max(e["ts"] for e in roles["gemm 2"])
        assert max(end(e) for e in roles["await results"]) <= max(end(e) for e in roles["reduce"])
