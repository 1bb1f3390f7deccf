"""Metrics: exact counts, also of Buffers that are gone, few series, and a dashboard of metrics that there are."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import metrics
from moecomm.rounds import tally

from .backends.conftest import run_ranks
from .fresh_python import run_python
from .live import shorten

client = pytest.importorskip("prometheus_client")
DASHBOARD = Path(__file__).parent.parent / "docs" / "grafana" / "moecomm.json"
X, IDS = torch.ones(4, 64, dtype=torch.bfloat16), torch.arange(4).remainder(2).unsqueeze(1)
SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 2, "topk": 1, "max_tokens": 4, "backend": "host"}


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, float]]:
    """Return the metrics of the text, without Buffers of other tests."""
    monkeypatch.setattr(tally, "_process", tally.Tallies())
    registry = client.CollectorRegistry()
    metrics.register(registry)

    def read() -> dict[str, float]:
        lines = client.generate_latest(registry).decode().splitlines()
        return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}

    return read


def test_calls_tokens_and_bytes_are_counted(values: Callable[[], dict[str, float]]) -> None:
    assert values() == {}
    with moecomm.Buffer("self", **SIZES) as buffer:
        for layout in ("flat", "expert", "flat"):
            routed = buffer.dispatch(X, IDS, layout=layout)
            buffer.combine(routed.x, routed.handle)
        buffer.dispatch_end(buffer.dispatch_begin(X, IDS))
        assert values() == {
            'moecomm_calls_total{op="combine",rank="0"}': 3,
            'moecomm_calls_total{op="dispatch",rank="0"}': 3,
            'moecomm_calls_total{op="dispatch_begin",rank="0"}': 1,
            'moecomm_calls_total{op="dispatch_end",rank="0"}': 1,
            'moecomm_tokens_total{op="combine",rank="0"}': 12,
            'moecomm_tokens_total{op="dispatch",rank="0"}': 12,
            'moecomm_tokens_total{op="dispatch_begin",rank="0"}': 4,
            'moecomm_token_bytes_total{op="combine",rank="0"}': 12 * 128,
            'moecomm_token_bytes_total{op="dispatch",rank="0"}': 12 * 128,
            'moecomm_token_bytes_total{op="dispatch_begin",rank="0"}': 4 * 128,
            'moecomm_rejected_calls_total{rank="0"}': 0,
            **{
                f'moecomm_wait_seconds_total{{phase="{phase}",rank="0"}}': 0
                for phase in ("header", "dispatch", "combine")
            },
            'moecomm_open_buffers{rank="0"}': 1,
            'moecomm_window_bytes{rank="0"}': buffer.nbytes,
        }


def test_counts_stay_when_buffers_are_gone(values: Callable[[], dict[str, float]]) -> None:
    for opened in range(1, 6):
        buffer = moecomm.Buffer("self", **SIZES)
        buffer.dispatch(X, IDS)
        with pytest.raises(moecomm.BadInput):
            buffer.dispatch(X.double(), IDS)
        with pytest.raises(moecomm.BadInput):
            buffer.dispatch(X, IDS + 7)
        for _ in range(3):  # open, closed, gone
            found = values()
            assert found['moecomm_calls_total{op="dispatch",rank="0"}'] == 2 * opened
            assert found['moecomm_rejected_calls_total{rank="0"}'] == opened
            assert found['moecomm_failures_total{error="BadInput",rank="0"}'] == opened
            assert found.get('moecomm_open_buffers{rank="0"}', 0) == float(buffer is not None and not buffer.closed)
            if buffer is not None and buffer.closed:
                buffer = None  # type: ignore[assignment]
                gc.collect()
            elif buffer is not None:
                buffer.close()
    moecomm.Buffer("self", **SIZES).close()
    assert len(tally._process) <= 2


def test_failures_are_counted_by_rank_and_error(values: Callable[[], dict[str, float]]) -> None:
    kinds: list[str] = [""] * 3
    left = threading.Barrier(3)

    def rank(group: Any) -> None:
        number = group.rank
        with moecomm.Buffer(group, **{**SIZES, "num_experts": 3}) as buffer:
            shorten(buffer, 0.2)
            try:
                if number != 1:
                    buffer.dispatch(X, IDS)
            except moecomm.RoundFailed as error:
                kinds[number] = type(error).__name__
            left.wait(20)

    assert run_ranks(3, rank) == [None] * 3
    found = {name: value for name, value in values().items() if "failures" in name}
    assert found == {f'moecomm_failures_total{{error="Timeout",rank="{number}"}}': 1 for number in (0, 2)}
    assert kinds == ["Timeout", "", "Timeout"]


def test_waits_for_a_late_rank_are_counted_and_stay(values: Callable[[], dict[str, float]]) -> None:
    late_s, seen, read = 0.1, list[float](), threading.Barrier(2)

    def rank(group: Any) -> None:
        number = group.rank
        with moecomm.Buffer(group, **SIZES) as buffer:
            if number == 1:
                time.sleep(late_s)
            buffer.dispatch(X, IDS)
            read.wait(20)
            if number == 0:
                seen.append(values()['moecomm_wait_seconds_total{phase="header",rank="0"}'])
            read.wait(20)

    assert run_ranks(2, rank) == [None] * 2
    assert late_s / 2 < seen[0] < 10
    assert values()['moecomm_wait_seconds_total{phase="header",rank="0"}'] == seen[0], "of a Buffer that is closed"


def test_experts_layouts_and_calls_make_no_series(values: Callable[[], dict[str, float]]) -> None:
    series = set()
    for experts in (1, 4, 64):
        with moecomm.Buffer("self", **{**SIZES, "num_experts": experts}) as buffer:
            for layout in ("flat", "expert", "batched"):
                for _ in range(20):
                    buffer.dispatch(X, IDS * 0, layout=layout)
            series.add(len(values()))
    assert series == {9}


def test_a_registry_has_them_once_and_gives_them_back() -> None:
    registry = client.CollectorRegistry(auto_describe=True)
    collector = metrics.register(registry)
    with pytest.raises(moecomm.BadInput, match="registry"):
        metrics.register(registry)
    registry.unregister(collector)
    metrics.register(registry)
    with pytest.raises(moecomm.BadInput, match="registry"):
        metrics.register("a registry")


def test_without_the_library_it_is_unsupported_and_nothing_else_needs_it() -> None:
    told = run_python(
        "-c",
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import moecomm, moecomm.metrics\n"
        "moecomm.Buffer('self', hidden=64, num_experts=1, topk=1, max_tokens=1, backend='host').close()\n"
        "try:\n    moecomm.metrics.register()\n"
        "except moecomm.Unsupported as error:\n    print(error)\n",
    )
    assert told.returncode == 0, told.stderr
    assert "moecomm[metrics]" in told.stdout


def test_the_dashboard_asks_for_metrics_that_there_are(values: Callable[[], dict[str, float]]) -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = set(re.findall(r"moecomm_\w+", DASHBOARD.read_text()))
    families = [*(f"{name}_total" for name, *_ in metrics._COUNTERS), *(name for name, _ in metrics._GAUGES)]
    assert asked == set(families)
    used = {label for by in re.findall(r"by \(([^)]*)\)", DASHBOARD.read_text()) for label in by.split(", ")}
    assert used <= {"instance", "rank", "op", "error", "phase"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)
