"""A study of all-gather and matmul, variant by variant: NVIDIA/Fuser pull request 6002, repeated over a Window.

C = A B in float16 with 1024 rows, columns and depth.  A is sharded by rows over the ranks, B is on all of them, and
every rank computes all of C.  docs/maintainers/all_gather_matmul_study.md tells what each variant shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moecomm import config
from moecomm.base.choices import BackendName
from moecomm.errors import BadInput, Unsupported
from moecomm.overlap.gpu import GpuExecutor
from moecomm.overlap.kernels import MOST_RANKS
from moecomm.tools.progress import progress
from moecomm.window import Window
from moecomm_bench import operator_peers
from moecomm_bench.clock import Call, Clock, percentiles, rounded
from moecomm_bench.exchange import nccl_group
from moecomm_bench.gather_kernels import GatherMatmul
from moecomm_bench.operator_cases import OperatorCase
from moecomm_bench.operators import NO_MULTICAST, tried
from moecomm_bench.ranks import device_of, on_ranks, together

SIZE = 1024
_CHAIN = 20
_WORKSPACE_BYTES = 64 << 20
OFF = "off: multicast (moecomm doctor)"


class Variant(NamedTuple):
    """A way to compute C.

    Attributes:
        name: in a few words.
        kind: "baseline", "one kernel" or "two kernels".
        source: name in the source; "" for ours.
        ms, tflops: published by the source, of 8 H100s; None for ours.
        off: the source's needs multicast over NVLink, which moecomm leaves off.
    """

    name: str
    kind: str
    source: str
    ms: float | None
    tflops: float | None
    off: bool = False

    def published(self) -> dict[str, Any] | None:
        """Return {name, ms, tflops, of_first} of the source, the last over the first variant; None for ours."""
        first = VARIANTS[1].tflops
        if self.tflops is None or first is None:
            return None
        return {"name": self.source, "ms": self.ms, "tflops": self.tflops, "of_first": self.tflops / first}


VARIANTS = {
    1: Variant("NCCL all-gather, cuBLAS", "baseline", "baselineNcclAllgatherMatmul", 0.052, 41.4),
    2: Variant("multicast all-gather, cuBLAS", "baseline", "baselineCudaAllgatherMatmul", 0.093, 23.2, off=True),
    3: Variant("remote reads, scalar", "one kernel", "naiveRemoteRead", 0.808, 2.66),
    4: Variant("gather by loads, scalar", "one kernel", "threadloadGatherScalarCompute", 0.531, 4.04),
    5: Variant("gather by multicast, scalar", "one kernel", "multimemGatherScalarCompute", 0.588, 3.65, off=True),
    6: Variant("gather by loads, tensor cores", "two kernels", "threadloadGatherThenCutlass", 0.043, 50.3),
    7: Variant("gather by multicast, tensor cores", "two kernels", "multimemGatherThenCutlass", 0.043, 50.1, off=True),
    8: Variant("moecomm.overlap, tensor cores", "one kernel", "", None, None),
}


def run(ranks: int, backend: BackendName, replays: int, limit_s: float) -> list[dict[str, Any]] | None:
    """Measure all variants on all ranks; None in a process that has nothing to report.  Returns rows: see merge().

    Raises BadInput, Unsupported, RanksFailed.
    """
    if backend == "host":
        raise Unsupported("the study times kernels of GPUs; there is no GPU here")
    if SIZE % ranks or ranks > MOST_RANKS:
        raise BadInput("ranks", ranks, f"1, 2, 4 or 8: equal parts of {SIZE} rows")
    by_rank = on_ranks("moecomm_bench.gather_study:run_rank", {"backend": backend, "replays": replays}, ranks, limit_s)
    return None if by_rank is None else merge(by_rank)


def run_rank(group: dist.ProcessGroup, *, backend: BackendName, replays: int) -> list[dict[str, Any]]:
    """Run one rank of the study."""
    with config.variables(NO_MULTICAST, insist=True):
        device = device_of(group, backend)
        transport = nccl_group()
        nbytes = SIZE * SIZE * 2 + _WORKSPACE_BYTES
        with Window(group, nbytes, backend=backend, device=device, signals=2 * SIZE) as window:
            return _measure(Study(window, SIZE), transport, group, replays)


class Study:
    """The variants on one rank of a Window.

    Attributes:
        x: float16 `[size / ranks, size]`, this rank's rows.
        w: float16 `[size, size]`, B transposed, equal on all ranks.
        own: the variants whose kernels are csrc/bench/gather_matmul.cu, with values of their own.
        executor: the fused operator.
    """

    def __init__(self, window: Window, size: int) -> None:
        self.window, self.size = window, size
        rows = size // window.num_ranks
        self.case = OperatorCase("all_gather_matmul", f"{size}^3", "fp16", ((rows, size), (size, size)))
        self.own = GatherMatmul(window, rows, size, size)
        self.executor = GpuExecutor(window, size * size * 2)
        self.x, self.w = (torch.zeros(n, dtype=torch.float16, device=window.device) for n in self.case.shapes)

    def fill(self, x: torch.Tensor, w: torch.Tensor) -> None:
        """Set the values of A and B for all variants, between calls of them."""
        for to, values in ((self.x, x), (self.own.a, x), (self.w, w), (self.own.b, w.mT)):
            to.copy_(values)

    def fill_exactly(self, turn: int = 0) -> torch.Tensor:
        """Set small whole numbers, whose sums are exact in float16, and return their product, computed in float64."""
        g = torch.Generator().manual_seed(turn)
        a = torch.randint(-3, 4, (self.size, self.size), generator=g).to(self.window.device)
        w = torch.randint(-1, 2, (self.size, self.size), generator=g).to(self.window.device)
        self.fill(a.chunk(self.window.num_ranks)[self.window.rank], w)
        return (a.double() @ w.double().mT).to(torch.float16)

    def calls(self, transport: dist.ProcessGroup | None) -> dict[int, Callable[[], Call]]:
        """Return functions that make the call of each variant that is not off; without `transport` not the first."""
        found: dict[int, Callable[[], Call]] = {}
        if transport is not None:
            found[1] = lambda: operator_peers.nccl(self.case, self.x, self.w, transport)
        return found | {
            3: lambda: self.own.naive_remote_read,
            4: lambda: self.own.gather_then_scalar,
            6: lambda: self.own.gather_then_matmul,
            8: lambda: self.fused,
        }

    def fused(self) -> torch.Tensor:
        """Compute C by the fused operator."""
        return self.executor.all_gather_matmul(self.x, self.w, False)[0]


def _measure(
    study: Study, transport: dist.ProcessGroup, group: dist.ProcessGroup, replays: int
) -> list[dict[str, Any]]:
    window = study.window
    calls: dict[str, Call] = {}
    whys = {}
    with progress(group, len(VARIANTS)) as step:
        for number, make in study.calls(transport).items():
            step(VARIANTS[number].name)
            call, why = together(group, partial(_checked, make, study, number))
            if why:
                whys[number] = why
            else:
                calls[str(number)] = call
    x, w = study.case.inputs(window.device, window.rank)[0], study.case.inputs(window.device, 0)[1]
    assert isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor)  # the study is in float16
    study.fill(x, w)
    clock = Clock(group, window.device, graph=True, cold=False, chain=_CHAIN, replays=replays)
    us = clock.alternately(calls, window.barrier)
    window.check()
    rows: list[dict[str, Any]] = []
    for number, variant in VARIANTS.items():
        found: dict[str, Any] = {"us": us[str(number)]} if str(number) in us else {"why": whys.get(number, OFF)}
        rows.append({"variant": number, "name": variant.name, "kind": variant.kind, **found})
    return rows


def _checked(make: Callable[[], Call], study: Study, turn: int) -> Call:
    """Return the call, which has computed the product of new values; results of earlier calls are others."""
    wanted = study.fill_exactly(turn)
    call = tried(make, study.window)
    assert call is not None
    if not torch.equal(call(), wanted):
        raise ArithmeticError("the result is not the product")
    return call


def merge(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the rows of all ranks.

    A row is {variant, name, kind, us: {p50, p90, p99}, tflops, of_first, source}, or has `why` in place of figures.

    - `us`: times of the slowest rank.
    - `tflops`: of a rank, which computes all of C.
    - `of_first`: TFLOP/s over those of the first variant; None without these.
    - `source`: {name, ms, tflops, of_first} of the source; None for ours.
    """
    rows = []
    for parts in zip(*by_rank, strict=True):
        row, variant = dict(parts[0]), VARIANTS[parts[0]["variant"]]
        if "us" in row:
            row["us"] = percentiles([part["us"] for part in parts])
            row["tflops"] = rounded(2 * SIZE**3 / row["us"]["p50"] / 1e6, 2)
        rows.append(row | {"source": variant.published()})
    first = rows[0].get("tflops")
    for row in rows:
        if "us" in row:
            row["of_first"] = row["tflops"] / first if first else None
    return rows
