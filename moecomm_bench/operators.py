"""The operators of moecomm.overlap, in each form, beside torch's products and NCCL's collectives, in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moecomm import config
from moecomm.base.choices import BackendName
from moecomm.errors import BadInput, MoecommError, Unsupported
from moecomm.fused.schedules import FP8_SCHEDULES, SCHEDULES
from moecomm.overlap import Workspace, sizes
from moecomm.overlap.executors import GpuExecutors
from moecomm.tools.progress import progress
from moecomm.window import Window
from moecomm_bench import operator_peers
from moecomm_bench.clock import Call, Clock, percentiles, rounded
from moecomm_bench.exchange import nccl_group
from moecomm_bench.operator_cases import DTYPES, OPERATORS, OperatorCase, cases
from moecomm_bench.ranks import device_of, on_ranks, together

OURS, UNFUSED, DEFAULT = "moecomm", "moecomm unfused", "moecomm default"  # fused=True, False and None
NCCL, TORCH, ALONE = "nccl", "torch", "alone"
# NVLink multicast stays off: fused operators do not use it, and a rank that dies in it takes others with it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_CHAIN_US, _MOST_CHAINED = 3000.0, 20
_WINDOW_BYTES = 2 << 30


@dataclass(frozen=True)
class OperatorRun:
    """One run of one operator."""

    operator: str
    ranks: int
    backend: BackendName
    only: str = ""  # part of the names of the cases to measure; "": all
    dtype: str = ""  # of the cases to measure; "": all
    replays: int = 10
    peers: bool = True
    every_schedule: bool = False  # also ours with each schedule
    window_bytes: int = _WINDOW_BYTES

    def check(self) -> None:
        """Raise BadInput or Unsupported for what can't be measured."""
        if self.operator not in OPERATORS:
            raise BadInput("operator", repr(self.operator), f"some of {', '.join(OPERATORS)}")
        if self.backend == "host":
            raise Unsupported("bench overlap times kernels of GPUs; there is no GPU here")
        if self.dtype not in ("", *DTYPES):
            raise BadInput("dtype", repr(self.dtype), f"one of {', '.join(DTYPES)}")
        if not self.cases:
            raise BadInput("case", repr(self.only), "a part of the name of a case, of the dtype")

    @property
    def cases(self) -> list[OperatorCase]:
        """The cases to measure."""
        return [
            case
            for case in cases(self.operator, self.ranks)
            if self.only in case.name and self.dtype in ("", case.dtype)
        ]


def run(settings: OperatorRun, limit_s: float) -> list[dict[str, Any]] | None:
    """Measure an operator on all ranks; None in a process that has nothing to report.  Returns rows: see merge().

    Raises BadInput, Unsupported, RanksFailed.
    """
    settings.check()
    by_rank = on_ranks("moecomm_bench.operators:run_rank", asdict(settings), settings.ranks, limit_s)
    return None if by_rank is None else merge(by_rank)


def run_rank(group: dist.ProcessGroup, **job: Any) -> list[dict[str, Any]]:
    """Run one rank of the benchmark."""
    settings = OperatorRun(**job)
    with config.variables(NO_MULTICAST, insist=True):
        return _measure(group, settings)


def _measure(group: dist.ProcessGroup, settings: OperatorRun) -> list[dict[str, Any]]:
    device = device_of(group, settings.backend)
    transport = nccl_group() if settings.peers else None
    rows: list[dict[str, Any]] = []
    with (  # over the group of NCCL, if there is one, so that its collectives are a form of ours
        Workspace(transport or group, settings.window_bytes, backend=settings.backend, device=device) as workspace,
        progress(group, len(settings.cases)) as step,
    ):
        for case in settings.cases:
            step(f"{case.operator}, {case.name}")
            rows += _MeasuredOperator(settings, case, workspace, group, transport).rows()
    return rows


class _MeasuredOperator:
    """One case.  Collective."""

    def __init__(
        self,
        settings: OperatorRun,
        case: OperatorCase,
        workspace: Workspace,
        group: dist.ProcessGroup,
        transport: dist.ProcessGroup | None,
    ) -> None:
        self._settings, self._case, self._window = settings, case, workspace.window
        self._workspace, self._group, self._transport = workspace, group, transport
        executors = workspace.executors
        assert isinstance(executors, GpuExecutors)
        if isinstance(executors.fused, MoecommError):
            raise executors.fused
        self._executors = executors
        self._executor: Any = executors.fused
        self._x, self._w = case.inputs(workspace.device, group.rank())

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each way, with `us` by replay, or with `why` there are none."""
        calls: dict[str, Call] = {}
        failed = []
        for who, make in self._ways().items():
            call, why = together(self._group, partial(tried, make, self._window))
            if why:
                failed.append({**self._about(who), "why": why})
            elif call is not None:
                calls[who] = call
        chosen = {DEFAULT: {"form": self._form}}
        clock = partial(Clock, self._group, self._window.device, graph=True, cold=False)
        short = clock(chain=2, replays=1)
        longest = torch.tensor(max(short(call, self._window.barrier)[0] for call in calls.values()))
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group)
        chain = max(2, min(_MOST_CHAINED, int(_CHAIN_US / float(longest))))
        us = clock(chain=chain, replays=self._settings.replays).alternately(calls, self._window.barrier)
        self._window.check()
        return [{**self._about(who), **chosen.get(who, {}), "us": times} for who, times in us.items()] + failed

    def _ways(self) -> dict[str, Callable[[], Call | None]]:
        case, x, w, ranks = self._case, self._x, self._w, self._settings.ranks
        ways: dict[str, Callable[[], Call | None]] = {
            OURS: lambda: self._ours,
            UNFUSED: lambda: self._planned(False),
            DEFAULT: lambda: self._planned(None),
            **{f"{OURS} {name}": partial(self._scheduled, name) for name in self._schedules},
            ALONE: lambda: operator_peers.alone(case, x, w, ranks),
        }
        if (transport := self._transport) is not None:
            ways[NCCL] = lambda: operator_peers.nccl(case, x, w, transport)
            ways[TORCH] = lambda: operator_peers.of_torch(case, x, w, transport)
        return ways

    @property
    def _schedules(self) -> list[str]:
        is_product = self._case.operator != "embedding_all_to_all"
        names = FP8_SCHEDULES if self._case.dtype == "fp8" else SCHEDULES
        fixed = [name for name, schedule in names.items() if not schedule.dynamic]  # operators order tiles themselves
        return fixed if self._settings.every_schedule and is_product else []

    def _scheduled(self, name: str) -> Call:
        def call() -> Any:
            self._executor.schedule = name
            try:
                return self._ours()
            finally:
                self._executor.schedule = None

        return call

    def _ours(self) -> Any:
        return self._executor.plan(self._sizes)(self._x, self._w)

    def _planned(self, fused: bool | None) -> Call:
        """Return a call whose form is chosen once."""
        given = self._x, self._w
        run, _ = self._executors.choose(self._sizes, fused, False, given)
        return partial(run, *given)

    @property
    def _form(self) -> str:
        """The measured form of the default; "": there was only one."""
        dims, dtype = self._sizes.dims.items(), self._sizes.given
        found = (of for of in self._workspace.choices if (of.operator, of.dtype) == (self._case.operator, dtype))
        return next((of.form for of in found if of.sizes.items() <= dims), "")

    @property
    def _sizes(self) -> sizes.Sizes:
        more = (None,) if self._case.operator == "embedding_all_to_all" else ()
        found: sizes.Sizes = getattr(sizes, self._case.operator)(self._settings.ranks, self._x, self._w, *more)
        return found

    def _about(self, who: str) -> dict[str, Any]:
        case = self._case
        about = {"operator": case.operator, "case": case.name, "dtype": case.dtype, "shapes": case.shapes, "who": who}
        copies = self._settings.ranks if case.operator == "all_gather_matmul" else 1  # rows of all ranks are computed
        return about | {"flops": copies * case.flops}


def tried(make: Callable[[], Call | None], window: Window) -> Call | None:
    """Make and run a call before the Clock, so that a failure does not leave other ranks waiting there."""
    call = make()
    if call is None:
        return None
    call()
    torch.cuda.synchronize()
    window.check()
    if window.device.type == "cuda":  # some may run, and not be captured
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            call()
    return call


def merge(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the rows of all ranks.

    A row is {operator, case, dtype, shapes, who, us: {p50, p90, p99}, tflops, speedup, of_alone}, or has `why` in place
    of figures.  That of the default has `form`, too: see moecomm.overlap.Choice.

    - `us`: times of the slowest rank.
    - `tflops`: of a rank; None for an embedding.
    - `speedup`: this way's time over ours: above 1, ours is faster.
    - `of_alone`: this way's time over that of the product alone.
    """
    rows = [_merged(parts) for parts in zip(*by_rank, strict=True)]
    for row in rows:
        if "us" not in row:
            continue
        for field, who in (("speedup", OURS), ("of_alone", ALONE)):
            other = [r["us"]["p50"] for r in rows if "us" in r and r["who"] == who and _same_case(r, row)]
            row[field] = rounded(row["us"]["p50"] / other[0], 3) if other else None
    return rows


def _same_case(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("operator", "case", "dtype"))


def _merged(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    row = dict(parts[0])
    flops = row.pop("flops")
    if "us" not in row:
        return row
    us = percentiles([part["us"] for part in parts])
    return row | {"us": us, "tflops": rounded(flops / us["p50"] / 1e6, 1) if flops else None}
