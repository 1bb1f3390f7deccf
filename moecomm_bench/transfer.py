"""Transfers of weights from ranks that train to ranks that serve, beside what torch.distributed offers for it.

All ways bring the same experts of the same bfloat16 weights into the same tensors, and alternate in one run:

- `moecomm`: WeightTransfer.stage() and commit().
- `broadcast`: each rank that trains broadcasts its experts to all ranks, and ranks that serve cast theirs.
- `all_gather`: all ranks gather the experts of all; only where all ranks train equally many.
- `bytes`: each rank that serves copies as many bytes as it has to receive, in the format that arrives, from the memory
  of the ranks that have them.  No hash, no agreement, and nothing is written twice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from moecomm.base.choices import BackendName
from moecomm.base.placement import NONE, Placement
from moecomm.errors import BadInput
from moecomm.tools.progress import progress
from moecomm.transfer import WeightTransfer
from moecomm.transfer.casts import CASTS, Kind, kinds_of
from moecomm.transfer.routes import Route, routes_of
from moecomm.window import Window
from moecomm_bench.clock import orders, rounded
from moecomm_bench.exchange import nccl_group
from moecomm_bench.ranks import device_of, on_ranks

AS_THEY_ARE = "bf16"  # no cast
SETS = ("apart", "overlap")
WARM_UP = 2
Tensors = dict[str, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class TransferCase:
    """One run.  Every combination of sets and casts is measured.

    Attributes:
        sets: "apart": half of the ranks train, the others serve.  "overlap": all ranks do both, and serve other experts
            than they train.
        casts: names of moecomm.transfer.casts, or AS_THEY_ARE.
    """

    model: str
    hidden: int
    intermediate: int
    experts: int
    ranks: int
    backend: BackendName
    sets: list[str]
    casts: list[str]
    replays: int

    def check(self) -> None:
        """Raise BadInput for a value that cannot be measured."""
        if self.ranks < 2:
            raise BadInput("ranks", self.ranks, "at least 2: one trains, one serves")
        for name, values, known in (("sets", self.sets, SETS), ("cast", self.casts, (AS_THEY_ARE, *CASTS))):
            if not values or any(value not in known for value in values):
                raise BadInput(name, ",".join(values), f"some of {', '.join(known)}")
        if self.experts < self.ranks:
            raise BadInput("experts", self.experts, f"at least {self.ranks}, one a rank")
        if self.replays < 1:
            raise BadInput("replays", self.replays, "at least 1")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an expert's tensors, by name."""
        return {"w13": (2 * self.intermediate, self.hidden), "w2": (self.hidden, self.intermediate)}

    def placements(self, sets: str) -> tuple[Placement, Placement]:
        """Return the placements of the ranks that train, and of those that serve."""
        experts, ranks = range(self.experts), self.ranks
        if sets == "overlap":
            return _shared(experts, range(ranks), ranks), Placement(
                [list(experts[rank::ranks]) for rank in range(ranks)]
            )
        half = ranks // 2
        return _shared(experts, range(half), ranks), _shared(experts, range(half, ranks), ranks)


def _shared(experts: range, among: range, ranks: int) -> Placement:
    """Return a placement of consecutive experts on some ranks."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    for nth, rank in enumerate(among):
        held[rank] = list(experts[nth * len(experts) // len(among) : (nth + 1) * len(experts) // len(among)])
    return Placement(held, num_experts=len(experts))


def run(case: TransferCase) -> dict[str, Any] | None:
    """Measure a case on all ranks; None in a process that has nothing to report.  Raises BadInput, RanksFailed."""
    case.check()
    by_rank = on_ranks("moecomm_bench.transfer:run_rank", asdict(case), case.ranks)
    return None if by_rank is None else merge(case, by_rank)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Run one rank; returns the backend, and times by replay of each row."""
    case = TransferCase(**job)
    device = device_of(group, case.backend)
    transport = nccl_group() if device.type == "cuda" else group
    found: dict[str, Any] = {"rows": []}
    with progress(group, len(case.sets) * len(case.casts)) as step:
        for sets in case.sets:
            for cast in case.casts:
                step(f"{sets}, {cast}")
                with _Ways(case, sets, cast, group, transport, device) as ways:
                    found["backend"] = ways.backend
                    found["rows"].append(
                        {"sets": sets, "cast": cast, "received": ways.received, **ways.times(case.replays)}
                    )
    return found


class _Ways:
    """All ways of one transfer, on one rank.  Collective; a context manager."""

    def __init__(
        self,
        case: TransferCase,
        sets: str,
        cast: str,
        group: dist.ProcessGroup,
        transport: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._group, self._transport, self._device, self._rank = group, transport, device, group.rank()
        source, target = case.placements(sets)
        self._held = [[expert for expert in row if expert != NONE] for row in source.held]
        to = None if cast == AS_THEY_ARE else cast
        self._kinds: dict[str, Kind] = kinds_of(case.shapes, torch.bfloat16, to)
        self._routes = routes_of(source, target)
        self._weights = self._drawn()
        mine = len(self._route.slots)
        self._into: Tensors = {
            name: tuple(torch.zeros(mine, *shape, dtype=dtype, device=device) for shape, dtype in kind.parts)
            for name, kind in self._kinds.items()
        }
        about: dict[str, Any] = {"backend": case.backend, "device": device, "timeout_s": 120.0}
        placed: dict[str, Any] = {"source": source, "target": target, "cast": to}
        self._transfer = WeightTransfer(group, case.shapes, **placed, **about)
        # What others read for plain copies.
        self._window = Window(group, max(1, *(len(route.casts) for route in self._routes)) * self._of_expert, **about)
        self._landed = torch.empty(max(1, self.received), dtype=torch.uint8, device=device)
        self.backend = self._window.backend

    @property
    def received(self) -> int:
        """Bytes that this rank has to receive."""
        return self._of_expert * sum(sender != self._rank for sender in self._route.reads.values())

    @property
    def _route(self) -> Route:
        return self._routes[self._rank]

    @property
    def _of_expert(self) -> int:
        """Bytes of an expert as it arrives."""
        return sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in self._parts())

    def _parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return list(chain.from_iterable(kind.parts for kind in self._kinds.values()))

    def __enter__(self) -> _Ways:
        return self

    def __exit__(self, *error: object) -> None:
        self._transfer.close()
        self._window.close()

    def times(self, replays: int) -> dict[str, Any]:
        """Return seconds of each way by replay.  Ways alternate, in drawn orders."""
        ways: dict[str, Callable[[], Any]] = {"moecomm": self._moecomm, "bytes": self._copied}
        ways["broadcast"] = lambda: self._placed(self._broadcast())
        if len({len(row) for row in self._held}) == 1:
            ways["all_gather"] = lambda: self._placed(self._gathered())
        times: dict[str, list[float]] = {name: [] for name in (*ways, "stage")}
        wanted = None
        for replay, order in enumerate(orders(ways, WARM_UP + replays)):
            for name in order:
                self._wait()
                dist.barrier(self._group)
                begin = time.perf_counter()
                staged = ways[name]()
                self._wait()
                if replay >= WARM_UP:
                    times[name].append(time.perf_counter() - begin)
                    if name == "moecomm":
                        times["stage"].append(staged - begin)
                if replay == 0 and name != "bytes":
                    wanted = self._check(name, wanted)
        return times

    def _moecomm(self) -> float:
        self._transfer.stage(self._weights or None)
        staged = time.perf_counter()
        self._transfer.commit(self._into if self._route.slots else None)
        return staged

    def _copied(self) -> None:
        at = 0
        for sender in range(len(self._routes)):
            size = self._of_expert * sum(one == sender for one in self._route.reads.values())
            if sender != self._rank and size:
                self._landed[at : at + size].copy_(self._window.peer(sender)[:size])
                at += size

    def _broadcast(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return the bfloat16 tensors of all ranks that train, by name and rank."""
        found: dict[str, dict[int, torch.Tensor]] = {}
        for name, kind in self._kinds.items():
            found[name] = {}
            for rank, row in enumerate(self._held):
                if row:
                    here = rank == self._rank
                    w = self._weights[name] if here else self._empty(len(row), kind)
                    dist.broadcast(w.view(torch.float32), rank, group=self._transport)
                    found[name][rank] = w
        return found

    def _gathered(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return the same, by an all-gather."""
        found = {}
        for name, kind in self._kinds.items():
            mine = self._weights[name]
            every = self._empty(len(mine) * len(self._routes), kind)
            found[name] = {rank: every[rank * len(mine) : (rank + 1) * len(mine)] for rank in range(len(self._routes))}
            parts = [part.view(torch.float32) for part in found[name].values()]
            dist.all_gather(parts, mine.view(torch.float32), group=self._transport)
        return found

    def _placed(self, arrived: dict[str, dict[int, torch.Tensor]]) -> None:
        """Cast the experts that this rank serves, into the tensors of its slots."""
        for name, by_rank in arrived.items():
            for expert, slots in self._route.slots.items():
                rank = next(rank for rank, row in enumerate(self._held) if expert in row)
                w = by_rank[rank][self._held[rank].index(expert)]
                for to, part in zip(self._into[name], self._kinds[name].apply(w), strict=True):
                    for slot in slots:
                        to[slot].copy_(part.view(to[slot].shape))

    def _empty(self, experts: int, kind: Kind) -> torch.Tensor:
        return torch.empty(experts, *kind.shape, dtype=kind.dtype, device=self._device)

    def _drawn(self) -> dict[str, torch.Tensor]:
        """Return the weights of this rank's experts; the same numbers in every run."""
        found: dict[str, torch.Tensor] = {}
        held = self._held[self._rank]
        for name, kind in self._kinds.items():
            if held:
                found[name] = self._empty(len(held), kind)
            for row, expert in enumerate(held):
                generator = torch.Generator(self._device).manual_seed(expert + 1)
                found[name][row].normal_(std=kind.shape[-1] ** -0.5, generator=generator)
        return found

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check(self, name: str, wanted: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Compare the weights that a way has left with those of the first; then clear them."""
        found = [tensor.view(torch.uint8).clone() for tensor in chain.from_iterable(self._into.values())]
        for tensor in chain.from_iterable(self._into.values()):
            tensor.view(torch.uint8).zero_()
        assert wanted is None or all(map(torch.equal, found, wanted)), f"{name} has left other weights"
        return found if wanted is None else wanted


def merge(case: TransferCase, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all ranks.  Times are those of the slowest rank, the median over replays.

    A row is {sets, cast, mb, bytes_ms, moecomm_ms, stage_ms, broadcast_ms, all_gather_ms, of_bytes, of_torch}:

    - `mb`: megabytes that the rank with most has to receive.
    - `stage_ms`: the part of `moecomm_ms` that is stage(); the rest is commit().
    - `of_bytes`: moecomm / bytes.  `of_torch`: the faster of broadcast and all_gather / moecomm.
    - `all_gather_ms` is None where the ranks that train are not all ranks.

    Ratios are medians of the ratios within a replay.
    """
    rows = []
    for parts in zip(*(found["rows"] for found in by_rank), strict=True):
        row = {
            "sets": parts[0]["sets"],
            "cast": parts[0]["cast"],
            "mb": rounded(max(p["received"] for p in parts) / 1e6, 3),
        }
        slowest = {
            way: [max(same) for same in zip(*(part[way] for part in parts), strict=True)]
            for way in ("bytes", "moecomm", "stage", "broadcast", "all_gather")
            if way in parts[0]
        }
        for way in ("bytes", "moecomm", "stage", "broadcast", "all_gather"):
            row[f"{way}_ms"] = rounded(1e3 * statistics.median(slowest[way]), 3) if way in slowest else None
        others = [slowest[way] for way in ("broadcast", "all_gather") if way in slowest]
        best = [min(some) for some in zip(*others, strict=True)]
        ours = slowest["moecomm"]
        row["of_bytes"] = rounded(statistics.median(a / b for a, b in zip(ours, slowest["bytes"], strict=True)), 3)
        row["of_torch"] = rounded(statistics.median(b / a for a, b in zip(ours, best, strict=True)), 3)
        rows.append(row)
    return {"case": asdict(case), "backend": by_rank[0]["backend"], "rows": rows}
