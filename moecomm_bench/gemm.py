"""The grouped GEMMs of an expert layer on one GPU: ours, alternating with torch's and other libraries'."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn.functional import grouped_mm

from moecomm.dispatch.reference import quantize
from moecomm.errors import BadInput
from moecomm.fused import (
    FP8_SCHEDULES,
    MXFP4_SCHEDULES,
    PACKED_SCHEDULES,
    SCHEDULES,
    Fp8,
    Schedule,
    choose,
    choose_fp8,
    grouped_gemm,
    kernels,
    pack_mxfp4,
    quantize_weights,
)
from moecomm.fused.fp8 import Operand
from moecomm.fused.schedules import mxfp4_schedule, packed_as, schedule_of
from moecomm.router import MODELS, Model, random_routing
from moecomm.tools.progress import progress
from moecomm_bench import other_gemms
from moecomm_bench.clock import device_us, orders, rounded
from moecomm_bench.four_bits import in_mxfp4

TORCH, APART = "torch", "apart"  # next to schedules; APART: the chosen one, gate and up rows not interleaved
BF16, FP8, MXFP4, PACKED = "bf16", "fp8", "mxfp4", "packed-mxfp4"  # PACKED: beside FP8 rows; MXFP4: beside bf16 ones
_SCHEDULES = {BF16: SCHEDULES, FP8: FP8_SCHEDULES, MXFP4: MXFP4_SCHEDULES, PACKED: PACKED_SCHEDULES}
DTYPES = tuple(_SCHEDULES)
_WEIGHT_BITS = {BF16: 16, FP8: 8, MXFP4: 4, PACKED: 4}
_LONG_US = 3000  # calls timed together take about this long, with at most _MOST_CALLS
_MOST_CALLS = 20
_WEIGHT_BYTES = 256 << 20  # several times the L2 cache: smaller weights have several copies, used in rotation
_HOST_CALLS = 10
_MOST_BYTES = 128 << 30  # of a rank's weights
_READ_BYTES = 4 << 30
_COMPARED_ROWS = 16  # whose products are compared with float64

Call = Callable[[int], Any]  # takes the number of the call, which selects a copy of the weights


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
    dtype: str = BF16

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules of the dtype, by name."""
        return _SCHEDULES[self.dtype]

    @property
    def has_fp8_rows(self) -> bool:
        """True if x is in FP8, else in bfloat16."""
        return self.dtype in (FP8, PACKED)

    @property
    def casts(self) -> bool:
        """True if our kernel casts its result for the second GEMM."""
        return self.has_fp8_rows and self.activation is not None

    def choose(self, rows: int, device: torch.device) -> str:
        """Return the name of the schedule for `rows` rows of all experts, on a GPU; on the CPU, that of the H200."""
        each, shape = rows // self.experts, (self.experts, self.columns, self.depth)
        units = 132 if device.type == "cpu" else kernels.multiprocessors(device.index)
        if self.dtype == MXFP4:
            chosen = mxfp4_schedule(each, self.experts, self.columns, units)
        elif device.type == "cpu":
            chosen = FP8_SCHEDULES[choose_fp8(each, *shape)] if self.has_fp8_rows else SCHEDULES[choose(each, *shape)]
        else:
            dtype = kernels.FP8 if self.has_fp8_rows else torch.bfloat16
            chosen = schedule_of(dtype, each, *shape, units, kernels.gpu_name(device.index))
        chosen = packed_as(chosen) if self.dtype == PACKED else chosen
        return next(name for name, schedule in self.schedules.items() if schedule == chosen)

    def counts(self, tokens: int) -> torch.Tensor:
        """Return int32 [experts]: rows of the first rank's experts after random routing of `tokens` tokens per rank."""
        return _rows_of_experts(tokens * self.ranks, self.experts * self.ranks, self.topk)[: self.experts]

    def figures(self, counts: torch.Tensor, us: float) -> dict[str, float]:
        """Return TFLOP/s, and TB/s of x, the product, and the weights of experts with rows.

        Each counts once, without scales and tile padding.
        """
        rows, experts = int(counts.sum()), int(counts.count_nonzero())
        out = self.columns // (1 if self.activation is None else 2)
        of_weights = experts * self.columns * self.depth * _WEIGHT_BITS[self.dtype] // 8
        moved = of_weights + (1 if self.has_fp8_rows else 2) * rows * self.depth + (1 if self.casts else 2) * rows * out
        done = 2 * rows * self.columns * self.depth
        return {"tflops": rounded(done / us / 1e6, 1), "tbs": rounded(moved / us / 1e6, 3)}


@lru_cache(maxsize=64)  # all GEMMs of a model use the same counts, which would take most of a case's time
def _rows_of_experts(tokens: int, experts: int, topk: int) -> torch.Tensor:
    picked, _ = random_routing(tokens, experts, topk)
    return torch.bincount(picked.flatten(), minlength=experts).int()


def sizes(names: list[str], **given: int | None) -> list[Model]:
    """Return the models with these names; given fields replace a model's own, which then has no name.

    Models that have become the same size are one.
    """
    for name in names:
        if name not in MODELS:
            raise BadInput("model", repr(name), f"some of {', '.join(MODELS)}")
    own: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if any(value < 1 for value in own.values()):
        raise BadInput(", ".join(own), tuple(own.values()), "at least 1 each")
    found = [dataclasses.replace(MODELS[name], **own, name="" if own else name) for name in names]
    by_size = {(one.name, one.hidden, one.intermediate, one.num_experts, one.topk): one for one in found}
    return list(by_size.values())


def gemms(models: list[Model], ranks: list[int], dtypes: Sequence[str] = (BF16,)) -> list[Gemm]:
    """Return the GEMMs for each model, number of ranks and dtype: the first with SwiGLU and without, the second."""
    if not dtypes or set(dtypes) - set(DTYPES):
        raise BadInput("dtype", dtypes, f"some of {', '.join(DTYPES)}")
    found = []
    for model in models:
        for count in ranks:
            if count < 1 or model.num_experts % count:
                raise BadInput("ranks", count, f"a divisor of {model.num_experts} experts")
            local = model.num_experts // count
            if (nbytes := 4 * local * model.hidden * model.intermediate) > _MOST_BYTES:
                raise BadInput("experts, hidden, intermediate", f"weights of {nbytes >> 30} GiB", "what a GPU holds")
            if not 1 <= model.topk <= model.num_experts:
                raise BadInput("topk", model.topk, f"1 to {model.num_experts}")
            first = Gemm(model.name, count, 1, "swiglu", model.topk, local, 2 * model.intermediate, model.hidden)
            second = Gemm(model.name, count, 2, None, model.topk, local, model.hidden, model.intermediate)
            of_model = [first, dataclasses.replace(first, activation=None), second]
            found += [dataclasses.replace(gemm, dtype=dtype) for dtype in dtypes for gemm in of_model]
    return found


def check(
    models: list[Model],
    ranks: list[int],
    tokens: list[int],
    *,
    replays: int,
    dtypes: Sequence[str] = (BF16,),
    others: Sequence[str] = (),
) -> list[Gemm]:
    """Return the GEMMs of a run.  Raises BadInput if an argument is out of range."""
    if set(others) - set(other_gemms.LIBRARIES):
        raise BadInput("others", ",".join(others), f"some of {', '.join(other_gemms.LIBRARIES)}")
    if others and set(dtypes) - {BF16, FP8}:
        raise BadInput("dtype", ",".join(dtypes), f"{BF16} or {FP8} beside other libraries")
    if not tokens or min(tokens) < 1 or replays < 1:
        raise BadInput("tokens, replays", (tokens, replays), "at least 1 each")
    return gemms(models, ranks, dtypes)


def run(
    models: list[Model],
    ranks: list[int],
    tokens: list[int],
    *,
    every_schedule: bool,
    replays: int,
    dtypes: Sequence[str] = (BF16,),
    others: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure a row for each GEMM and number of tokens, on the current GPU; without one, the reference on the CPU.

    Times are medians over `replays`. torch's GEMM never has an activation. In FP8 (scales of 128 columns, and of
    blocks) and with MXFP4 weights there is no GEMM of torch. Our GEMM with SwiGLU casts its result if rows are in FP8.
    `read_tbs` is what the memory of the GPU gives to a plain read.

    Args:
        others: libraries to measure too, of other_gemms.LIBRARIES. They have neither activation nor cast; few rows are
            also multiplied in their masked form. Rows then have `error`: of each GEMM without activation, the norm of
            its difference to float64 over that of float64, for some rows; and `why`: reasons of those that failed.

    Raises:
        BadInput: an argument is out of range.
    """
    cases = check(models, ranks, tokens, replays=replays, dtypes=dtypes, others=others)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rows = []
    with progress(None, len(cases) * len(tokens)) as step:
        for case in cases:
            weights = _weights(case, device)
            for count in tokens:
                step(f"{case.model} GEMM {case.gemm}, {case.dtype}, {count} tokens")
                row = _row(case, weights, case.counts(count).to(device), every_schedule, replays, bool(others))
                rows.append({"tokens": count, **row})
    about = {"benchmark": "gemm", "device": device.type, "dtype": ",".join(dtypes), "replays": replays}
    return about | ({"read_tbs": _read_tbs(device, replays)} if device.type == "cuda" else {}) | {"rows": rows}


def _read_tbs(device: torch.device, replays: int) -> float:
    """Return TB/s of torch's sum of many numbers, which reads memory and does little else."""
    numbers = torch.zeros(_READ_BYTES // 4, device=device)
    us = statistics.median([device_us(numbers.sum) for _ in range(replays + 1)][1:])
    return rounded(_READ_BYTES / us / 1e6, 3)


def schedules_of(case: Gemm, tokens: list[int], device: torch.device, replays: int) -> list[dict[str, Any]]:
    """Measure all schedules of a GEMM and nothing else; returns a row {tokens, rows, us, ...} for each size."""
    weights, found = _weights(case, device), []
    for count in tokens:
        counts = case.counts(count).to(device)
        calls = _schedules(case, _rows_of(case, counts)[1], weights, counts, tuple(case.schedules))
        us = _alternating(calls, len(weights), replays)
        about = {"tokens": count, **dataclasses.asdict(case), "rows": int(counts.sum())}
        found.append({**about, "us": {name: rounded(time, 3) for name, time in us.items()}})
    return found


def _weights(case: Gemm, device: torch.device) -> list[Any]:
    """Return copies of the weights, several of small ones, so that no call finds its own in the cache."""
    nbytes = case.experts * case.columns * case.depth * _WEIGHT_BITS[case.dtype] // 8
    copies = -(-_WEIGHT_BYTES // nbytes) if device.type == "cuda" else 1
    return [_drawn(case, device) for _ in range(copies)]


def _drawn(case: Gemm, device: torch.device) -> Any:
    made = torch.empty(case.experts, case.columns, case.depth, dtype=torch.bfloat16, device=device)
    made.normal_(std=case.depth**-0.5)
    if case.dtype == BF16:
        return made
    if case.dtype == FP8:
        return quantize_weights(made)
    return pack_mxfp4(in_mxfp4(made)) if case.dtype == PACKED else in_mxfp4(made)


def _rows_of(case: Gemm, counts: torch.Tensor) -> tuple[torch.Tensor, Operand]:
    """Return random rows in bfloat16, and the same in the dtype of the GEMM."""
    drawn = torch.randn(int(counts.sum()), case.depth, device=counts.device).bfloat16()
    return drawn, Fp8(*quantize(drawn)) if case.has_fp8_rows else drawn


def _row(
    case: Gemm, weights: list[Any], counts: torch.Tensor, every_schedule: bool, replays: int, with_others: bool
) -> dict[str, Any]:
    rows = int(counts.sum())
    drawn, x = _rows_of(case, counts)
    chosen = case.choose(rows, drawn.device)
    calls = _schedules(case, x, weights, counts, tuple(case.schedules) if every_schedule else (chosen,))
    if case.activation is not None:
        calls[APART] = _schedules(case, x, weights, counts, (chosen,), interleaved=False)[chosen]
    others = _of_torch(drawn, weights, counts) if case.dtype == BF16 else {}
    compared: dict[str, Any] = {}
    if with_others:
        found, failed = other_gemms.calls(x, weights, counts)
        ours = {chosen: calls[chosen]} if case.activation is None else {}
        made: dict[str, Callable[[], torch.Tensor]] = {n: partial(call, 0) for n, call in {**ours, **others}.items()}
        made |= {name: gemm.rows for name, gemm in found.items()}
        compared = {"error": _errors(x, weights[0], counts, made)} | ({"why": failed} if failed else {})
        others |= {name: gemm.call for name, gemm in found.items()}
    calls |= others
    us = _alternating(calls, len(weights), replays) if drawn.is_cuda else _on_cpu(calls, replays)
    return {
        **dataclasses.asdict(case),
        "rows": rows,
        "chosen": chosen,
        "us": {name: rounded(time, 3) for name, time in us.items()},
        **case.figures(counts, us[chosen]),
        "of_torch": rounded(us[TORCH] / us[chosen], 3) if TORCH in us else None,
        "host_us": {name: _host_us(calls[name]) for name in (chosen, *others)} if drawn.is_cuda else None,
        **compared,
    }


def _errors(
    x: Operand, w: Operand, counts: torch.Tensor, made: dict[str, Callable[[], torch.Tensor]]
) -> dict[str, float]:
    """Return the relative error of each product against float64, over rows spread over all experts."""
    ends = counts.cumsum(0)
    rows = torch.arange(0, int(ends[-1]), max(1, int(ends[-1]) // _COMPARED_ROWS), device=counts.device)
    experts = torch.bucketize(rows, ends, right=True)
    wide = _widened(x, rows, 1)
    true = torch.stack([_widened(w, expert, 128) @ row for expert, row in zip(experts, wide, strict=True)])
    return {name: float((make()[rows].double() - true).norm() / true.norm()) for name, make in made.items()}


def _widened(operand: Operand, at: torch.Tensor, rows_of_scale: int) -> torch.Tensor:
    """Return rows or a matrix of an operand in float64, times its scales of 128 columns."""
    if isinstance(operand, torch.Tensor):
        return operand[at].double()
    data, scales = operand[0][at].double(), operand[1][at].double()
    scales = scales.repeat_interleave(128, -1)[..., : data.shape[-1]]
    return data * scales.repeat_interleave(rows_of_scale, -2)[..., : data.shape[-2], :]


def _schedules(
    case: Gemm,
    x: Operand,
    weights: list[Any],
    counts: torch.Tensor,
    names: Sequence[str],
    interleaved: bool = True,
) -> dict[str, Call]:
    """Return calls of our GEMM by schedule."""
    how: dict[str, Any] = {"activation": case.activation, "interleaved": interleaved}
    how["quantize"] = "fp8" if case.casts else None

    def call(name: str) -> Call:
        return lambda i: grouped_gemm(x, weights[i % len(weights)], counts, **how, schedule=case.schedules[name])

    return {name: call(name) for name in names}


def _of_torch(x: torch.Tensor, weights: list[Any], counts: torch.Tensor) -> dict[str, Call]:
    ends = counts.cumsum(0).int()
    return {TORCH: lambda i: grouped_mm(x, weights[i % len(weights)].transpose(1, 2), offs=ends)}


def _alternating(calls: dict[str, Call], copies: int, replays: int) -> dict[str, float]:
    """Return the median microseconds of each call.

    Calls alternate, because a GPU under sustained load runs at another clock rate than one that was idle. Each time is
    that of a captured graph of several calls, without launches by the host.
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
    for order in orders(graphs, replays + 1):
        for name in order:
            graph, count = graphs[name]
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
