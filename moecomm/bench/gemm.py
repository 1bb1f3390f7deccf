"""The grouped GEMMs of an expert layer on one GPU: ours, and torch's, whose turns alternate."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import grouped_mm

from moecomm.bench.clock import device_us
from moecomm.bench.ranks import progress
from moecomm.errors import BadInput
from moecomm.fused import SCHEDULES, choose, grouped_gemm
from moecomm.fused.kernels import multiprocessors
from moecomm.router import MODELS, Model, random_routing

TORCH, APART = "torch", "apart"  # beside schedules; apart: the chosen one, gate and up rows not interleaved
_LONG_US = 3000  # calls timed together take about as long, if they are no more than 20
_MOST_CALLS = 20
_WEIGHT_BYTES = (
    256 << 20
)  # several times the second-level cache: smaller weights are kept several times, and take turns
_HOST_CALLS = 10

Call = Callable[[int], Any]  # with the number of the call, which chooses a copy of the weights


@dataclass(frozen=True)
class Gemm:
    """One of the two GEMMs of a rank's experts."""

    model: str
    ranks: int
    gemm: int  # 1: gate and up, [2 I, H]; 2: down, [H, I]
    activation: str | None
    topk: int
    experts: int  # of the rank
    columns: int
    depth: int

    def counts(self, tokens: int) -> torch.Tensor:
        """int32 [experts]: rows that a random choice by so many tokens of every rank gives those of the first rank."""
        return _rows_of_experts(tokens * self.ranks, self.experts * self.ranks, self.topk)[: self.experts]

    def figures(self, rows: int, us: float) -> dict[str, float]:
        """TFLOP/s; TB/s of x, weights and product, each once; padding of tiles is no work."""
        out = self.columns // (1 if self.activation is None else 2)
        moved = 2 * (self.experts * self.columns * self.depth + rows * (self.depth + out))
        return {"tflops": round(2 * rows * self.columns * self.depth / us / 1e6, 1), "tbs": round(moved / us / 1e6, 3)}


@lru_cache(maxsize=64)  # every GEMM of a model wants the same, and most of the time of a case would be this
def _rows_of_experts(tokens: int, experts: int, topk: int) -> torch.Tensor:
    picked, _ = random_routing(tokens, experts, topk)
    return torch.bincount(picked.flatten(), minlength=experts).int()


def sizes(names: list[str], **given: int | None) -> list[Model]:
    """The models of these names; fields that are given take the place of a model's, which then has no name."""
    for name in names:
        if name not in MODELS:
            raise BadInput("model", repr(name), f"some of {', '.join(MODELS)}")
    own: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if any(value < 1 for value in own.values()):
        raise BadInput(", ".join(own), tuple(own.values()), "at least 1 each")
    return [dataclasses.replace(MODELS[name], **own, name="" if own else name) for name in names]


def gemms(models: list[Model], ranks: list[int]) -> list[Gemm]:
    """Of each model, dealt to so many ranks: the first with SwiGLU and without, and the second."""
    found = []
    for model in models:
        for count in ranks:
            if count < 1 or model.num_experts % count:
                raise BadInput("ranks", count, f"a divisor of {model.num_experts} experts")
            local = model.num_experts // count
            first = Gemm(model.name, count, 1, "swiglu", model.topk, local, 2 * model.intermediate, model.hidden)
            second = Gemm(model.name, count, 2, None, model.topk, local, model.hidden, model.intermediate)
            found += [first, dataclasses.replace(first, activation=None), second]
    return found


def run(
    models: list[Model], ranks: list[int], tokens: list[int], *, every_schedule: bool, replays: int
) -> dict[str, Any]:
    """The result: a row for each GEMM and number of tokens.  On the current GPU; else the reference, on the CPU.

    Times are medians over `replays`.  torch's GEMM has no activation, also where ours has.
    """
    if not tokens or min(tokens) < 1 or replays < 1:
        raise BadInput("tokens, replays", (tokens, replays), "at least 1 each")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rows, cases = [], gemms(models, ranks)
    with progress(None, len(cases) * len(tokens)) as step:
        for case in cases:
            weights = _weights(case, device)
            for count in tokens:
                step(f"{case.model} GEMM {case.gemm}, {count} tokens")
                row = _row(case, weights, case.counts(count).to(device), every_schedule, replays)
                rows.append({"tokens": count, **row})
    return {"benchmark": "gemm", "device": device.type, "dtype": "bf16", "replays": replays, "rows": rows}


def _weights(case: Gemm, device: torch.device) -> list[torch.Tensor]:
    """Several copies of small ones, so that no call finds its own in the cache."""
    nbytes = 2 * case.experts * case.columns * case.depth
    copies = -(-_WEIGHT_BYTES // nbytes) if device.type == "cuda" else 1
    shape = (case.experts, case.columns, case.depth)
    made = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(copies)]
    return [copy.normal_(std=case.depth**-0.5) for copy in made]


def _row(
    case: Gemm, weights: list[torch.Tensor], counts: torch.Tensor, every_schedule: bool, replays: int
) -> dict[str, Any]:
    rows = int(counts.sum())
    x = torch.randn(rows, case.depth, device=counts.device).bfloat16()
    ends = counts.cumsum(0).int()
    units = [multiprocessors(x.device.index)] if x.is_cuda else []
    chosen = choose(rows // case.experts, case.experts, case.columns, case.depth, *units)

    def ours(name: str, interleaved: bool = True) -> Call:
        how: dict[str, Any] = {"activation": case.activation, "interleaved": interleaved, "schedule": SCHEDULES[name]}
        return lambda i: grouped_gemm(x, weights[i % len(weights)], counts, **how)

    calls: dict[str, Call] = {name: ours(name) for name in (SCHEDULES if every_schedule else (chosen,))}
    if case.activation is not None:
        calls[APART] = ours(chosen, interleaved=False)
    calls[TORCH] = lambda i: grouped_mm(x, weights[i % len(weights)].transpose(1, 2), offs=ends)
    us = _alternating(calls, len(weights), replays) if x.is_cuda else _on_cpu(calls, replays)
    return {
        **dataclasses.asdict(case),
        "rows": rows,
        "chosen": chosen,
        "us": {name: round(time, 3) for name, time in us.items()},
        **case.figures(rows, us[chosen]),
        "of_torch": round(us[TORCH] / us[chosen], 3),
        "host_us": {name: _host_us(calls[name]) for name in (chosen, TORCH)} if x.is_cuda else None,
    }


def _alternating(calls: dict[str, Call], copies: int, replays: int) -> dict[str, float]:
    """Median microseconds of each.

    They take turns, because a GPU that has been at work for a while runs at another clock than one that has not.  What
    is timed is a captured graph of several calls: no launch by the host is part of it.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, call in calls.items():
        call(0)
        once = device_us(lambda call=call: call(0))  # type: ignore[misc]
        count = max(copies, 2, min(_MOST_CALLS, int(_LONG_US / once)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                call(i)
        graphs[name] = graph, count
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(replays + 1):
        for name, (graph, count) in graphs.items():
            times[name].append(device_us(graph.replay) / count)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def _on_cpu(calls: dict[str, Call], replays: int) -> dict[str, float]:
    times = {name: [_called(call) for _ in range(replays + 1)] for name, call in calls.items()}
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def _host_us(call: Call) -> float:
    torch.cuda.synchronize()
    return round(statistics.median(_called(call) for _ in range(_HOST_CALLS)), 2)


def _called(call: Call) -> float:
    begin = time.perf_counter()
    call(0)
    return (time.perf_counter() - begin) * 1e6
