"""Expert layers (`Buffer.moe`), single and sustained, with clock and power of the GPU.

    python bench/at_work.py --ranks 2 --model deepseek-v3 --tokens 8192 --turns 1,16,64 --json at-work.json

The benchmark measures three choices of the fused layer: the order of its tiles
(moecomm.fused.compute.row_tiles_per_turn), the number of blocks that fetch (FETCHERS), and the early launch of its
kernels (moecomm.gpu.plain_kernel.enqueue).

A rank has as many experts as each of 4 ranks has, so that an expert has as many rows as there. All results are compared
bit for bit. Keys of a row:

- `us`: median over replays of a graph of 2 to 20 layers; variants alternate in random order.
- `at_work_us`: sustained time, of the same graph replayed for half a second, after a warm-up of an eighth of that;
  median of three.
- `mhz`, `watts`: clock and power of the rank's GPU during sustained replays, from nvidia-smi.
- `window_bytes`: window of a rank, with room for the graphs of all variants.
- `kernels_us` (with --kernels): for each rank the begin and end of each kernel of a layer, from the end of the layer
  before, as medians over layers.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import subprocess
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from moecomm import Buffer
from moecomm.fused import compute, pipeline, quantize_weights
from moecomm.fused.experts import apply_experts
from moecomm.fused.formats import format_of
from moecomm.gpu import plain_kernel
from moecomm.ranks.settings import Settings
from moecomm.router import MODELS, Model, random_routing
from moecomm_bench.case import Traffic
from moecomm_bench.ranks import on_ranks
from moecomm_bench.results import write

SECONDS, TIMES, REPLAYS, OF_RANKS, PROFILED = 0.5, 3, 11, 4, 5
BF16 = torch.bfloat16
Call = Callable[[], Any]
Way = tuple[Call, Any]  # a call, and the context of its capture


class Watch(threading.Thread):
    """A thread that records clock and power of a GPU, from nvidia-smi."""

    def __init__(self, gpu: int) -> None:
        super().__init__(daemon=True)
        query = "--query-gpu=clocks.sm,power.draw.instant"
        how = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "20", "-i", str(gpu)]
        self._process = subprocess.Popen(how, stdout=subprocess.PIPE, text=True)
        self.seen: list[list[float]] = []
        self.start()

    def run(self) -> None:
        """Record samples until end() is called."""
        for line in self._process.stdout or ():
            self.seen.append([float(word) for word in line.split(",")])

    def end(self) -> None:
        """Stop recording."""
        self._process.kill()


class Layers:
    """A Buffer, and its layers of one size. Collective."""

    def __init__(self, model: Model, tokens: int, fp8: bool, group: dist.ProcessGroup, watch: Watch) -> None:
        self._group, self._watch, ranks, rank = group, watch, group.size(), group.rank()
        local = model.num_experts // OF_RANKS
        device, experts = torch.device("cuda", torch.cuda.current_device()), local * ranks
        g = torch.Generator(device=device).manual_seed(rank)
        shapes = (local, 2 * model.intermediate, model.hidden), (local, model.hidden, model.intermediate)
        w13, w2 = (torch.empty(s, dtype=BF16, device=device).normal_(std=s[-1] ** -0.5, generator=g) for s in shapes)
        wide: Any = quantize_weights(w13) if fp8 else w13
        narrow: Any = quantize_weights(w2) if fp8 else w2
        drawn = random_routing(tokens, experts, model.topk, generator=torch.Generator().manual_seed(tokens + rank))
        topk_idx, topk_weights = (tensor.to(device) for tensor in drawn)
        x = torch.randn(tokens, model.hidden, device=device, generator=g).to(BF16)
        sizes = Settings(OF_RANKS, model.hidden, model.num_experts, model.topk, tokens, BF16, "auto", None)
        self.buffer = Buffer(
            group,
            hidden=model.hidden,
            num_experts=experts,
            topk=model.topk,
            max_tokens=tokens,
            window_bytes=replace(sizes, capacity_factor=math.inf).default_heap(),  # as graphs of all variants need
        )
        room = int(Traffic.of(group, drawn[0], experts).entries.sum(dim=0).max())
        self.meet = partial(self.buffer.dispatch, x, topk_idx, topk_weights, max_rows=room)
        arrived = self.meet(sync=True, quantize="fp8" if fp8 else None)
        about: dict[str, Any] = {"expected_rows": len(arrived.x) // local}
        counts = arrived.tokens_per_expert.clone()
        about |= {"scales": None if arrived.scales is None else arrived.scales.clone(), "dtype": BF16}
        rows = arrived.x.clone()
        self.gemms: Call = partial(apply_experts, format_of(narrow), rows, wide, narrow, counts, **about)
        self.layer = partial(self.buffer.moe, x, topk_idx, topk_weights, wide, narrow, max_rows=room)
        self.chain = max(2, min(20, 16384 // tokens))

    def ways(self, turns: list[int], fetchers: list[int], late: bool) -> dict[str, Way]:
        """Return the variants to measure, by name."""
        found: dict[str, Way] = {"GEMMs": (self.gemms, nullcontext())}
        found["one after the other"] = (partial(self.layer, fused=False), nullcontext())
        fused = partial(self.layer, fused=True)
        for turn in turns:
            changed = mock.patch.object(compute, "row_tiles_per_turn", lambda *about, turn=turn: turn)
            found[f"turns of {turn}"] = (fused, changed)
        for blocks in fetchers:
            changed = mock.patch.object(compute, "FETCHERS", blocks)
            found[f"{blocks} fetch"] = (fused, changed)
        if late:
            found["launched late"] = (fused, mock.patch.object(pipeline, "enqueue", _enqueue_late))
        return found

    def measure(self, ways: dict[str, Way], kernels: bool) -> list[dict[str, Any]]:
        """Measure all variants and return their rows."""
        graphs, want = {}, None
        for what, (call, changed) in ways.items():
            with changed:
                made, _ = call(), call()
                torch.cuda.synchronize()
                if call is not self.gemms:
                    want = made if want is None else want
                    assert torch.equal(made, want), what
                graphs[what] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[what], capture_error_mode="thread_local"):
                    for _ in range(self.chain):
                        call()
        us: dict[str, list[float]] = {what: [] for what in ways}
        for order in _orders(ways, REPLAYS):
            for what in order:
                us[what].append(self._replay_us(graphs[what], 1))
        work: dict[str, list[tuple[float, float, float]]] = {what: [] for what in ways}
        for order in _orders(ways, TIMES):
            for what in order:
                times = torch.tensor(int(SECONDS * 1e6 / statistics.median(us[what]) / self.chain) + 1)
                dist.all_reduce(times, dist.ReduceOp.MIN, group=self._group)
                self._replay_us(graphs[what], int(times) // 8 + 1)
                before = len(self._watch.seen)
                took = self._replay_us(graphs[what], int(times))
                seen = self._watch.seen[before:] or [[0.0, 0.0]]
                work[what].append((took, *(statistics.mean(column) for column in zip(*seen, strict=True))))
        self.buffer.check()
        rows = []
        for what in ways:
            took, mhz, watts = (statistics.median(column) for column in zip(*work[what], strict=True))
            mine = {"what": what, "us": round(statistics.median(us[what]), 1), "at_work_us": round(took, 1)}
            rows.append(mine | {"mhz": round(mhz), "watts": round(watts), "window_bytes": self.buffer.nbytes})
            if kernels and ways[what][0] is not self.gemms:
                rows[-1]["kernels_us"] = self._kernels_us(graphs[what])
        return rows

    def _kernels_us(self, graph: torch.cuda.CUDAGraph) -> list[tuple[float, float]]:
        """Return begin and end of each kernel of a layer on this rank, in the order of their begin."""
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(PROFILED):
                self._replay_us(graph, 1)
        spans = [e.time_range for e in seen.events() if e.name.startswith("moecomm_")]  # type: ignore[no-untyped-call]
        spans.sort(key=lambda span: span.start)
        of_replay = len(spans) // PROFILED
        of_layer, layers = of_replay // self.chain, []
        for replay, layer in itertools.product(range(PROFILED), range(1, self.chain)):
            first = replay * of_replay + 1 + layer * of_layer  # skips the dispatch before the replay
            before = spans[first - 1].end
            layers.append([t - before for s in spans[first : first + of_layer] for t in (s.start, s.end)])
        times = [round(statistics.median(column), 1) for column in zip(*layers, strict=True)]
        return list(zip(times[::2], times[1::2], strict=True))

    def _replay_us(self, graph: torch.cuda.CUDAGraph, times: int) -> float:
        """Return the microseconds of a layer."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier(self._group)
        if times == 1:
            torch.cuda._sleep(500_000)  # type: ignore[no-untyped-call]
        self.meet(sync=False)
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / self.chain / times


def _enqueue_late(device: int, kernel: Any, blocks: int, args: Any, overlap: bool = False) -> None:
    plain_kernel.enqueue(device, kernel, blocks, args)


def _orders(ways: dict[str, Way], times: int) -> list[list[str]]:
    """Return random orders of the variants, equal on all ranks."""
    return [random.Random(seed).sample(list(ways), len(ways)) for seed in range(times)]


def run_rank(
    group: dist.ProcessGroup,
    models: list[str],
    tokens: list[int],
    turns: list[int],
    fetchers: list[int],
    fp8: bool,
    late: bool,
    kernels: bool,
) -> list[dict[str, Any]]:
    """Run one rank of the benchmark."""
    torch.cuda.set_device(group.rank())
    watch, rows = Watch(group.rank()), []
    for model in (MODELS[name] for name in models):
        for size in tokens:
            layers = Layers(model, size, fp8, group, watch)
            about = {"model": model.name, "tokens": size, "dtype": "fp8" if fp8 else "bf16"}
            for row in layers.measure(layers.ways(turns, fetchers, late), kernels):
                rows.append(about | row)
                if group.rank() == 0:
                    print(*rows[-1].values(), flush=True)
            layers.buffer.close()
    watch.end()
    return rows


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", dest="models", type=_words, required=True)
    parser.add_argument("--tokens", type=_numbers, required=True)
    parser.add_argument("--turns", type=_numbers, default=[], help="row tiles")
    parser.add_argument("--fetchers", type=_numbers, default=[], help="blocks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--late", action="store_true", help="also measure without early launch")
    parser.add_argument("--kernels", action="store_true", help="also record when each kernel begins and ends")
    parser.add_argument("--json", type=Path, required=True)
    given = vars(parser.parse_args())
    path, ranks = given.pop("json"), given.pop("ranks")
    by_rank = on_ranks("at_work:run_rank", given, ranks)
    if by_rank is not None:
        for same in zip(*by_rank, strict=True):
            if "kernels_us" in same[0]:
                same[0]["kernels_us"] = [row["kernels_us"] for row in same]
        write(path, {"ranks": len(by_rank), "rows": by_rank[0]})


if __name__ == "__main__":
    main()
