"""A decode step: many layers of dispatch, experts and combine in one graph; random delays put ranks out of step."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moecomm.errors import BadInput
from moecomm.gpu import plain_kernel
from moecomm.tools.progress import Step, progress
from moecomm_bench import kernels, overlap, replay
from moecomm_bench.case import RoundsCase
from moecomm_bench.clock import Call, percentiles
from moecomm_bench.ours import BF16_WIRE, OUTSIDE, Ours, TimedOperation
from moecomm_bench.ranks import device_of, on_ranks
from moecomm_bench.singles import Singles

STAND_IN, REAL = "stand-in", "GEMMs"  # of `experts` in a row
_TABLE_STEPS = 64  # steps until the delays repeat


@dataclass(frozen=True)
class Decode:
    """One run of decode: every combination of the tokens, layouts and payloads of `case`, without and with delays.

    Attributes:
        case: sizes, routing and backend; of `case.inputs` routings each layer takes the next.
        layers: dispatches, experts and combines of a step.
        expert_us: microseconds for which all SMs are busy between dispatch and combine (CPUs: for which a rank waits).
        delay_us: the most that a rank comes late to a layer; the delay is even between 0 and this.
        steps: timed steps.
        intermediate: columns inside an expert: also measure Buffer.moe, whose layers share one set of bf16 weights; 0:
            do not.
    """

    case: RoundsCase
    layers: int = 60
    expert_us: float = 50.0
    delay_us: float = 20.0
    steps: int = 100
    intermediate: int = 0

    def check(self) -> None:
        """Raise BadInput for a value that cannot be measured."""
        self.case.check()
        if self.layers < 1 or self.steps < 1 or min(self.expert_us, self.delay_us, self.intermediate) < 0:
            got = (self.layers, self.steps, self.expert_us, self.delay_us, self.intermediate)
            raise BadInput("layers, steps, expert_us, delay_us, intermediate", got, "at least 1, 1, 0, 0 and 0")

    def delays_ns(self, rank: int) -> torch.Tensor:
        """Return the delays of a rank by step and layer, int64 [_TABLE_STEPS, layers]; equal in every run."""
        generator = torch.Generator().manual_seed(self.case.seed * 1000 + rank)
        even = torch.rand(_TABLE_STEPS, self.layers, generator=generator, dtype=torch.float64)
        return (even * self.delay_us * 1e3).long()

    def waits_us(self) -> float:
        """Return the mean of a step's delays if each layer waits for its latest rank."""
        latest = torch.stack([self.delays_ns(rank) for rank in range(self.case.ranks)]).amax(dim=0)
        return float(latest.sum(dim=1).double().mean()) / 1e3


class _DelayArgs(ctypes.Structure):
    """DelayArgs of csrc/bench/sleep.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("delays", "step")),
        *((name, ctypes.c_int64) for name in ("layer", "layers", "steps")),
    )


def run(decode: Decode) -> dict[str, Any] | None:
    """Measure on all ranks; None in a process that has nothing to report.

    Returns {benchmark, case, backend, layers, expert_us, delay_us, steps, waits_us, alone, rows}: see `merge`. Raises
    BadInput, RanksFailed.
    """
    decode.check()
    by_rank = on_ranks("moecomm_bench.decode:run_rank", asdict(decode), decode.case.ranks)
    return None if by_rank is None else merge(decode, by_rank)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Run one rank of the benchmark."""
    decode = Decode(**{**job, "case": RoundsCase(**job["case"])})
    case = decode.case
    device = device_of(group, case.backend)
    found: dict[str, Any] = {"rows": []}
    count = len(case.tokens) * 2 * (len(case.layouts) * len(case.payloads) + (decode.intermediate > 0))
    with Singles(group, device, decode.steps) as singles, progress(group, count) as step:
        found["alone"] = singles.about()
        for tokens in case.tokens:
            for layout in case.layouts:
                with Ours(replace(case, layouts=[layout]), group, device, tokens) as ours:
                    found["backend"] = ours.buffer.backend
                    model = DecodeStep(decode, ours, singles, group.rank())
                    found["rows"] += model.rows(
                        layout, step, real=decode.intermediate > 0 and layout == case.layouts[0]
                    )
    return found


class DecodeStep:
    """The steps of one size and layout. Collective."""

    def __init__(self, decode: Decode, ours: Ours, singles: Singles, rank: int) -> None:
        self._decode, self._ours, self._singles = decode, ours, singles
        self._device = ours.buffer.device
        self._delays = decode.delays_ns(rank).to(self._device)
        self._steps = 0  # on CPUs: so far

    def rows(self, layout: str, announce: Step, *, real: bool) -> list[dict[str, Any]]:
        """Return rows with `us` by step, or with `why` there are none."""
        found = []
        for payload in self._decode.case.payloads:
            found += self._both(layout, payload, STAND_IN, partial(self._round, layout, payload), announce)
        if real:
            found += self._both("expert", "bf16", REAL, self._moe, announce)
        return found

    def _both(
        self,
        layout: str,
        payload: str,
        experts: str,
        make: Callable[[], Callable[[int, torch.Tensor], torch.Tensor]],
        announce: Step,
    ) -> list[dict[str, Any]]:
        """Time a step without and with delays. `make` returns the layer, as function(layer, x) -> x."""
        found = []
        for delays in (False, True):
            announce(f"{self._ours.tokens} tokens: {layout} {payload} {experts}{' out of step' * delays}")
            row: dict[str, Any] = {"tokens": self._ours.tokens, "layout": layout, "payload": payload}
            row |= {"experts": experts, "delays": delays, **self._ours.windows()}
            try:
                row["us"] = self._singles([partial(self._step, make(), delays)], self._device.type == "cuda")
                self._ours.buffer.check()
            except BadInput as error:  # no room in the window, on all ranks alike
                row["why"] = str(error)
            found.append(row)
        return found

    def _step(self, layer_of: Callable[[int, torch.Tensor], torch.Tensor], delays: bool) -> None:
        x = self._ours.inputs[0].x
        for layer in range(self._decode.layers):
            if delays:
                self._delay(layer)
            x = layer_of(layer, x)
        self._steps += 1

    def _delay(self, layer: int) -> None:
        steps, layers = self._delays.shape
        if self._device.type == "cuda":
            args = _DelayArgs(self._delays.data_ptr(), self._singles.starts_address, layer, layers, steps)
            plain_kernel.launch(kernels.DELAY, 1, args)
        else:
            time.sleep(float(self._delays[self._steps % steps, layer]) / 1e9)

    def _round(self, layout: str, payload: str) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Return a layer whose experts take a fixed time and leave the same rows in every step."""
        ours = self._ours
        dispatches = ours.dispatches(TimedOperation("dispatch", layout, payload, "", 0))
        variant = OUTSIDE if layout == "flat" else BF16_WIRE
        rows = ours.rows(TimedOperation("combine", layout, "", variant, 0))
        stand_in = self._stand_in()

        def layer_of(layer: int, x: torch.Tensor) -> torch.Tensor:
            index = layer % len(dispatches)
            arrived = ours.buffer.dispatch(**{**dispatches[index], "x": x})
            stand_in()
            return ours.buffer.combine(rows[index], arrived.handle)

        return layer_of

    def _stand_in(self) -> Call:
        us = self._decode.expert_us
        if self._device.type != "cuda":
            return partial(time.sleep, us / 1e6)
        if not us:
            return lambda: None
        return overlap.holding(torch.cuda.get_device_properties(self._device).multi_processor_count, us)

    def _moe(self) -> Callable[[int, torch.Tensor], torch.Tensor]:
        case, ours = self._decode.case, self._ours
        local, inner = case.experts // case.ranks, self._decode.intermediate
        w13, w2 = (
            torch.empty(shape, dtype=torch.bfloat16, device=self._device).normal_(std=shape[-1] ** -0.5)
            for shape in ((local, 2 * inner, case.hidden), (local, case.hidden, inner))
        )

        def layer_of(layer: int, x: torch.Tensor) -> torch.Tensor:
            given = ours.inputs[layer % len(ours.inputs)]
            return ours.buffer.moe(x, given.topk_idx, given.topk_weights, w13, w2)

        return layer_of


def merge(decode: Decode, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all ranks.

    A row is {tokens, layout, payload, experts, delays, window_bytes, opened_bytes, us: {p50, p90, p99}, layer_us,
    beside_us}, or has `why` in place of figures.

    - `window_bytes`, `opened_bytes`: window of a rank as a caller opens it, and as opened here.
    - `us`: a step of the slowest rank, from a common start.
    - `layer_us`: p50 of a layer.
    - `beside_us`: what a layer takes beside its stand-in and, with delays, the wait for the latest rank (`waits_us` of
      a step); not for real experts.
    """
    rows = [_merged(decode, parts) for parts in zip(*(found["rows"] for found in by_rank), strict=True)]
    about = {name: getattr(decode, name) for name in ("layers", "expert_us", "delay_us", "steps")}
    floor = by_rank[0]["alone"]["floor_us"]
    alone = {**by_rank[0]["alone"], "floor_us": None if floor is None else statistics.median(floor)}
    return {
        "benchmark": "decode",
        "case": replay.shown(decode.case),
        "backend": by_rank[0]["backend"],
        **about,
        "waits_us": round(decode.waits_us(), 2),
        "alone": alone,
        "rows": rows,
    }


def _merged(decode: Decode, parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    row = dict(parts[0])
    whys = [part["why"] for part in parts if "why" in part]
    if whys:
        return {key: value for key, value in row.items() if key != "us"} | {"why": whys[0]}
    row["us"] = percentiles([part["us"] for part in parts])
    row["layer_us"] = round(row["us"]["p50"] / decode.layers, 3)
    if row["experts"] == STAND_IN:
        busy = decode.expert_us * decode.layers + row["delays"] * decode.waits_us()
        row["beside_us"] = round((row["us"]["p50"] - busy) / decode.layers, 3)
    return row
