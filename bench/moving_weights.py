"""Weights of experts that move: copies alone, rounds beside copies, and steps of decoding while placements change.

    python bench/moving_weights.py [--ranks 4] [--json FILE]

Experts have the sizes of DeepSeek-V3's in bf16 by default, and each rank has `--held` of them and as many empty slots.
A move takes every expert to the next rank.  Rows by `what`:

- `copies`: a move alone. `gbs`: bytes that a rank reads over the time until its copies have come, on the slowest rank.
- `rounds`: a dispatch and a combine of `tokens` in `expert`, in a graph: `us` alone, and `beside_us` beside copies at
  half of that bandwidth; `ratio`.
- `steps`: `--layers` layers of `tokens` in a graph, replayed: milliseconds between the ends of two steps, `quiet` and
  `moving`; `commit_us`: by how much the steps behind a commit are longer than the median of those without one;
  `commits`, and `wrong`: steps with a result that differs by more than roundings from that before.

Times of steps are p50, p90 and p99 of the slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moecomm import Buffer, ExpertWeights, Placement
from moecomm_bench.clock import percentiles
from moecomm_bench.ranks import device_of, on_ranks
from moecomm_bench.results import write

REPLAYS = 11
FEW_ROUNDS, MANY_ROUNDS = 4, 20  # in a graph, of many and of few tokens: copies beside them last a few milliseconds
WARM_UP, EVERY = 5, 8  # steps that are not timed; steps from one prefetch to its commit
ROOM = 3.0  # for rows, over those of even routing
ROUNDING = 2.0**-6  # sums over ranks are rounded to bf16, and placements change which rank adds what


class Moves:
    """A Buffer whose experts move from rank to rank."""

    def __init__(self, group: dist.ProcessGroup, held: int, hidden: int, inner: int, topk: int, tokens: int) -> None:
        self.ranks, self.held, self.at, self.started = group.size(), held, 0, False
        self.device = device_of(group, "auto" if torch.cuda.is_available() else "host")
        self.group, experts = group, held * self.ranks
        self.buffer = Buffer(
            group,
            hidden=hidden,
            num_experts=experts,
            topk=min(topk, experts),
            max_tokens=tokens,
            device=self.device,
            placement=self._placement(0),
            capacity_factor=ROOM,
        )
        self.weights = ExpertWeights(self.buffer, {"w13": (2 * inner, hidden), "w2": (hidden, inner)})
        for name in ("w13", "w2"):
            for slot, expert in enumerate(self.buffer.local_experts):
                g = torch.Generator(self.device).manual_seed(expert + 1)
                self.weights[name][slot].normal_(std=hidden**-0.5, generator=g)
        self.nbytes = held * sum(self.weights[name][0].nbytes for name in ("w13", "w2"))

    def _placement(self, at: int) -> Placement:
        first = [(rank - at) % self.ranks * self.held for rank in range(self.ranks)]
        return Placement([range(one, one + self.held) for one in first], slots=2 * self.held)

    def prefetch(self, max_gbs: float | None = None) -> None:
        """Start to take every expert to the next rank."""
        self.weights.prefetch(self._placement(self.at + 1), max_gbs=max_gbs)

    def commit(self) -> None:
        """End it."""
        self.weights.commit()
        self.at += 1

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait for the devices of all ranks."""
        self.wait()
        dist.barrier(self.group)

    def graph(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return what repeats a call: a graph, on GPUs."""
        call()
        if self.device.type != "cuda":
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def given(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, ids and weights of this rank."""
        g, topk = torch.Generator().manual_seed(self.group.rank()), self.buffer.topk
        x = torch.randn(tokens, self.buffer.hidden, generator=g).bfloat16()
        ids = torch.rand(tokens, self.held * self.ranks, generator=g).argsort(dim=1)[:, :topk].contiguous()
        weights = torch.rand(tokens, topk, generator=g)
        return x.to(self.device), ids.to(self.device), weights.to(self.device)


def _copies(moves: Moves) -> float:
    """Return GB/s of this rank's copies alone."""
    seconds = []
    for _ in range(REPLAYS):
        moves.meet()
        begin = time.perf_counter()
        moves.prefetch()
        moves.wait()
        seconds.append(time.perf_counter() - begin)
        moves.commit()
    return moves.nbytes / sorted(seconds)[REPLAYS // 2] / 1e9


def _rounds(moves: Moves, tokens: int, gbs: float) -> dict[str, Any]:
    x, ids, weights = moves.given(tokens)
    most, count = int(ROOM * tokens * moves.buffer.topk), FEW_ROUNDS if tokens > 1000 else MANY_ROUNDS

    def rounds() -> None:
        for _ in range(count):
            routed = moves.buffer.dispatch(x, ids, weights, layout="expert", sync=False, max_rows=most)
            moves.buffer.combine(routed.x, routed.handle)

    run = moves.graph(rounds)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * REPLAYS):
        beside = number % 2 == 1
        moves.meet()
        if beside:
            moves.prefetch(gbs / 2)
        begin = time.perf_counter()
        run()
        if moves.device.type == "cuda":
            torch.cuda.current_stream(moves.device).synchronize()
        times[beside].append((time.perf_counter() - begin) / count * 1e6)
        if beside:
            moves.commit()
    alone, beside_us = (sorted(found)[len(found) // 2] for found in times.values())
    moves.buffer.check()
    return {"tokens": tokens, "us": alone, "beside_us": beside_us}


def _steps(moves: Moves, tokens: int, layers: int, steps: int) -> dict[str, Any]:
    x, ids, weights = moves.given(tokens)
    held: dict[str, torch.Tensor] = {}

    def step() -> None:
        found = torch.zeros(x.shape, device=x.device)
        for _ in range(layers):
            found += moves.buffer.moe(x, ids, weights, moves.weights["w13"], moves.weights["w2"])
        held["sum"] = found

    run = moves.graph(step)
    run()
    want = held["sum"].clone()
    errors, found = list[torch.Tensor](), dict[str, Any]()
    for moving in (False, True):
        moves.meet()
        ends, commits = list[Any](), list[int]()
        for number in range(steps):
            if moving and number % (2 * EVERY) == 0:
                moves.prefetch()
            if moving and number % (2 * EVERY) == EVERY:
                moves.commit()
                commits.append(number)
            run()
            errors.append((held["sum"] - want).abs().max() / want.abs().max())
            ends.append(_stamp(moves.device))
        moves.wait()
        found["moving" if moving else "quiet"] = [_ms(a, b) for a, b in itertools.pairwise(ends)]
        found["commits"] = commits
    moves.buffer.check()
    wrong = int((torch.stack(errors) > ROUNDING).sum())
    return {"tokens": tokens, "layers": layers, "wrong": wrong, **found}


def _stamp(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _ms(begin: Any, end: Any) -> float:
    return 1e3 * (end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end))


def run_rank(
    group: dist.ProcessGroup, held: int, hidden: int, inner: int, topk: int, tokens: list[int], layers: int, steps: int
) -> list[dict[str, Any]]:
    """Return the rows of this rank."""
    moves = Moves(group, held, hidden, inner, topk, max(tokens))
    gbs = _copies(moves)
    rows = [{"what": "copies", "held": held, "nbytes": moves.nbytes, "gbs": gbs}]
    slowest = torch.tensor(gbs)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN, group=group)
    rows += [{"what": "rounds", **_rounds(moves, count, float(slowest))} for count in tokens]
    rows.append({"what": "steps", **_steps(moves, min(tokens), layers, steps)})
    moves.weights.close()
    moves.buffer.close()
    return rows


def of_all(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of all ranks: of times the slowest rank's."""
    row = dict(rows[0])
    if row["what"] == "copies":
        row["gbs"] = round(min(one["gbs"] for one in rows), 1)
    elif row["what"] == "rounds":
        row |= {name: round(max(one[name] for one in rows), 2) for name in ("us", "beside_us")}
        row["ratio"] = round(row["beside_us"] / row["us"], 3)
    else:
        times = {
            name: [max(same) for same in zip(*(one[name] for one in rows), strict=True)] for name in ("quiet", "moving")
        }
        # times[i] ends with step i + 1.
        behind = [times["moving"][number - 1] for number in row["commits"]]
        others = [ms for at, ms in enumerate(times["moving"], 1) if at not in row["commits"]]
        median = sorted(others)[len(others) // 2]
        row |= {name: percentiles([found[WARM_UP:]]) for name, found in times.items()}
        row["commit_us"] = percentiles([[1e3 * (ms - median) for ms in behind]])
        row |= {"commits": len(row["commits"]), "wrong": sum(one["wrong"] for one in rows)}
    return row


def main() -> int:
    """Measure, print and write; returns the exit status: 1 if a step was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--held", type=int, default=8, help="experts of a rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--tokens", default="128,4096")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("held", "hidden", "inner", "topk", "layers", "steps")}
    job = sizes | {"tokens": [int(count) for count in options.tokens.split(",")]}
    by_rank = on_ranks("moving_weights:run_rank", job, options.ranks)
    assert by_rank is not None, "ranks are processes of this one"
    rows = [of_all(list(same)) for same in zip(*by_rank, strict=True)]
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()))
    if options.json:
        print(write(options.json, {"ranks": options.ranks, **sizes, "rows": rows}))
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
