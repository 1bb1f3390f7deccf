"""The flight record of a rank while its kernels run, which does not wait for them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing import LocalBuffers

pytestmark = pytest.mark.gpu1

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 32, "backend": "lsa", "device": 0}


def call() -> dict[str, Any]:
    x = torch.ones(20, 64, dtype=torch.bfloat16, device="cuda")
    return {"x": x, "topk_idx": torch.tensor([[0, 3]], device="cuda").expand(20, 2).contiguous()}


def states(buffer: moecomm.Buffer) -> list[str]:
    return [entry["state"] for entry in buffer.flight_record()["entries"]]


def test_a_kernel_that_waits_is_seen_to_have_started() -> None:
    with LocalBuffers(2, **SIZES, timeout_s=3) as ranks:
        routed = ranks.dispatch([call(), call()])
        ranks.combine([{"y": r.x, "handle": r.handle} for r in routed])
        ranks.check()
        one, two = ranks.buffers
        assert states(one) == states(two) == ["completed"] * 2
        assert one.flight_record()["moecomm"]["round_begun"] == 2
        with torch.cuda.stream(ranks.streams[0]):
            one.dispatch(**call())  # waits for rank 1, which does not come
            one.combine(routed[0].x, routed[0].handle)
        begin = time.monotonic()
        while (found := one.flight_record())["moecomm"]["round_begun"] != 3:
            assert time.monotonic() - begin < 2
        assert [entry["state"] for entry in found["entries"]] == ["completed"] * 2 + ["started", "scheduled"]
        begin = time.monotonic()
        one.flight_record()
        assert time.monotonic() - begin < 0.1, "nothing waits for the kernel"
        while not (known := one.flight_record()["moecomm"]["failures"]):
            assert time.monotonic() - begin < 10
        assert [failure["error"] for failure in known] == ["Timeout"], "before any call has raised it"
        with pytest.raises(moecomm.Timeout):
            one.check()
        assert states(one) == ["completed"] * 2 + ["failed", "scheduled"]
        assert states(two) == ["completed"] * 2


def test_a_capture_is_marked_and_not_disturbed() -> None:
    mine = call()
    with moecomm.Buffer(**SIZES) as buffer:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            buffer.dispatch(**mine, max_rows=80)
        buffer.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            routed = buffer.dispatch(**mine, max_rows=80)
            assert states(buffer) == ["completed", "captured"]
            out = buffer.combine(routed.x, routed.handle)
        for _ in range(3):
            out.zero_()
            graph.replay()
            buffer.check()
            assert torch.equal(out, 2 * mine["x"])
        record = buffer.flight_record()
        assert record["moecomm"]["replays"]
        assert [entry["state"] for entry in record["entries"]] == ["completed", "captured", "captured"]


def test_a_call_costs_little_on_gpus() -> None:
    """Beside the launch: the stream is asked whether it is being captured."""
    with moecomm.Buffer(**SIZES) as buffer:
        buffer.dispatch(**call())
        flight = buffer.rounds.flight
        (kind,) = flight.kinds
        best = 1.0
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(200):
                flight.end(flight.begin(kind, 20))
            best = min(best, (time.perf_counter() - begin) / 200)
        print(f"{best * 1e9:.0f} ns a call")
        assert best < 4e-6
