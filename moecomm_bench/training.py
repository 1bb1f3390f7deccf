"""A training step of expert layers: forward, and forward with backward, through moecomm.ops.moe and autograd."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moecomm import ops
from moecomm.errors import BadInput
from moecomm.tools.progress import progress
from moecomm_bench import replay
from moecomm_bench.case import RoundsCase
from moecomm_bench.clock import Clock, percentiles, rounded
from moecomm_bench.exchange import nccl_group
from moecomm_bench.ours import Input, Ours
from moecomm_bench.ranks import device_of, on_ranks, together
from moecomm_bench.torch_layer import TorchLayer

OURS, TORCH = "moecomm", "torch"
WHAT = ("forward", "forward and backward")


@dataclass(frozen=True)
class Training:
    """One run of training: every number of tokens of `case`.

    Attributes:
        case: sizes, routing and backend; of `case.inputs` routings each layer takes the next.
        intermediate: columns inside an expert.
        layers: of a step; they share one set of bf16 weights, whose gradients add up.
    """

    case: RoundsCase
    intermediate: int
    layers: int = 4

    def check(self) -> None:
        """Raise BadInput for a value that cannot be measured."""
        self.case.check()
        if self.layers < 1 or self.intermediate < 8 or self.intermediate % 8 or self.case.hidden % 8:
            sizes = (self.layers, self.intermediate, self.case.hidden)
            raise BadInput("layers, intermediate, hidden", sizes, "at least 1; multiples of 8")


def run(training: Training) -> dict[str, Any] | None:
    """Measure on all ranks; None in a process that has nothing to report.

    Returns {benchmark, case, backend, layers, intermediate, rows}: see `merge`. Raises BadInput, RanksFailed.
    """
    training.check()
    by_rank = on_ranks("moecomm_bench.training:run_rank", asdict(training), training.case.ranks)
    return None if by_rank is None else merge(training, by_rank)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Run one rank of the benchmark."""
    training = Training(**{**job, "case": RoundsCase(**job["case"])})
    case = training.case
    device = device_of(group, case.backend)
    transport = nccl_group() if case.peers and device.type == "cuda" else group
    found: dict[str, Any] = {"rows": []}
    with progress(group, len(case.tokens)) as step:
        for tokens in case.tokens:
            step(f"{tokens} tokens")
            with Ours(replace(case, layouts=["expert"]), group, device, tokens) as ours:
                found["backend"] = ours.buffer.backend
                found["rows"] += _rows(training, ours, group, transport)
    return found


def _rows(
    training: Training, ours: Ours, group: dist.ProcessGroup, transport: dist.ProcessGroup
) -> list[dict[str, Any]]:
    case, device = training.case, ours.buffer.device
    local, hidden = case.experts // case.ranks, case.hidden
    w13, w2 = (
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=shape[-1] ** -0.5).requires_grad_()
        for shape in ((local, 2 * training.intermediate, hidden), (local, hidden, training.intermediate))
    )
    clock = Clock(group, device, graph=False, cold=False, chain=1, replays=case.replays)
    makers: dict[str, Callable[[Input], Callable[[torch.Tensor], torch.Tensor]]] = {
        OURS: lambda given: lambda x: ops.moe(ours.buffer, x, given.topk_idx, given.topk_weights, w13, w2)
    }
    if case.peers:
        makers[TORCH] = lambda given: _torch_layer(given, w13, w2, transport)
    flops = 6 * ours.traffic.entries.sum().item() / case.ranks * hidden * training.intermediate * training.layers
    found = []
    for who, make in makers.items():
        layers = [make(given) for given in ours.inputs]
        for what in WHAT:
            call = partial(_step, training.layers, layers, ours.inputs[0].x, (w13, w2), what == WHAT[1])
            row: dict[str, Any] = {"tokens": ours.tokens, "who": who, "what": what}
            row |= ours.windows() if who == OURS else {}
            _, why = together(group, partial(_tried, call))
            row |= {"why": why} if why else {"us": clock(call), "flops": flops * (3 if what == WHAT[1] else 1)}
            found.append(row)
    return found


def _torch_layer(
    given: Input, w13: torch.Tensor, w2: torch.Tensor, transport: dist.ProcessGroup
) -> Callable[[torch.Tensor], torch.Tensor]:
    layer = TorchLayer(given.x, given.topk_idx, given.topk_weights, w13, w2, transport)
    return layer.differentiable


def _tried(call: Callable[[], None]) -> None:
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _step(
    count: int,
    layers: list[Callable[[torch.Tensor], torch.Tensor]],
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    backward: bool,
) -> None:
    """Run all layers with residual connections, and the backward pass of their mean."""
    for weight in weights:
        weight.grad = None
    with torch.set_grad_enabled(backward):
        x = x.detach().requires_grad_(backward)
        for index in range(count):
            x = x + layers[index % len(layers)](x)
        if backward:
            x.float().mean().backward()  # type: ignore[no-untyped-call]


def merge(training: Training, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all ranks.

    A row is {tokens, who, what, window_bytes, opened_bytes, us: {p50, p90, p99}, layer_us, tflops, of_torch}, or has
    `why` in place of figures.

    - `window_bytes`, `opened_bytes` (moecomm only): window of a rank as a caller opens it, and as opened here.
    - `us`: a step of the slowest rank, in eager mode.
    - `layer_us`: p50 of a layer.
    - `tflops`: a rank's, of the experts' forward and, if measured, backward products without recomputation.
    - `of_torch`: torch's time for the same / this time.
    """
    rows = [_merged(training, parts) for parts in zip(*(found["rows"] for found in by_rank), strict=True)]
    for row in rows:
        like = [r for r in rows if r["who"] == TORCH and all(r[key] == row[key] for key in ("tokens", "what"))]
        if row["who"] != TORCH and "us" in row and like and "us" in like[0]:
            row["of_torch"] = rounded(like[0]["us"]["p50"] / row["us"]["p50"], 4)
    about = {"layers": training.layers, "intermediate": training.intermediate}
    case = replay.shown(training.case)
    return {"benchmark": "training", "case": case, "backend": by_rank[0]["backend"], **about, "rows": rows}


def _merged(training: Training, parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    row = dict(parts[0])
    if "why" in row:
        return row
    row["us"] = percentiles([part["us"] for part in parts])
    row["layer_us"] = rounded(row["us"]["p50"] / training.layers, 3)
    row["tflops"] = rounded(statistics.mean(part["flops"] for part in parts) / row["us"]["p50"] / 1e6, 2)
    del row["flops"]
    return row
