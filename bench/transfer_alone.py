"""Transfers of weights on one GPU: what the kernels and the host take, without links and agreements.

    python bench/transfer_alone.py --json transfer-alone.json

One rank trains and serves 32 experts of DeepSeek-V3's sizes, so all casts stay in its memory. A row is {cast, mb,
copy_ms, stage_ms, commit_ms, write_ms, enqueue_ms, read_ms, switch_ms, launches, torch_ms}; times are medians of 9:

- `mb`: megabytes of all experts as they arrive. `copy_ms`: a copy of them.
- `stage_ms`, `commit_ms`: the calls.
- `write_ms`: casts, hashes and copies to records. `enqueue_ms`: the part of it in which the host launches. `read_ms`:
  hashes of what has arrived. `switch_ms`: copies to the engine's tensors.
- `launches`: kernels of moecomm in a stage().
- `torch_ms`: casts of one expert after the other, and copies to the engine's tensors, as a receiver of bfloat16 does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moecomm import Placement
from moecomm.gpu import plain_kernel
from moecomm.transfer import WeightTransfer
from moecomm.transfer.records import Arriving, Leaving
from moecomm_bench.results import write

HIDDEN, INTERMEDIATE, EXPERTS, TIMES = 7168, 2048, 32, 9
CASTS = (None, "fp8", "mxfp8", "nvfp4", "mxfp4", "int8_token")


def measure(cast: str | None, hidden: int, intermediate: int, experts: int, device: torch.device) -> dict[str, Any]:
    """Return the row of a cast.  AssertionError: torch's weights are others."""
    shapes = {"w13": (2 * intermediate, hidden), "w2": (hidden, intermediate)}
    weights = {
        name: torch.randn(experts, *shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()
    }
    all_here = Placement([range(experts)])
    backend: Any = "lsa" if device.type == "cuda" else "host"
    about: dict[str, Any] = {"source": all_here, "target": all_here, "cast": cast, "backend": backend, "device": device}
    with WeightTransfer("self", shapes, **about) as transfer:
        into, theirs = (
            {
                name: tuple(torch.zeros(experts, *shape, dtype=dtype, device=device) for shape, dtype in parts)
                for name, parts in transfer.arrives.items()
            }
            for _ in range(2)
        )
        records, carrier, kinds = transfer._records, transfer._carrier, transfer._kinds
        there = [transfer._record(0, expert) for expert in range(experts)]
        leaving = [Leaving(record, [w[expert] for w in weights.values()]) for expert, record in enumerate(there)]
        found = records.found(experts, device)
        arriving = [Arriving(record, record, words) for record, words in zip(there, found, strict=True)]
        slots = list(chain.from_iterable(into.values()))
        copies = [
            (to[expert], part)
            for expert, record in enumerate(there)
            for to, part in zip(slots, records.parts(record), strict=True)
        ]

        def written() -> None:
            size = carrier.batch(experts)
            for begin in range(0, experts, size):
                carrier.write(leaving[begin : begin + size], 1)

        def by_torch() -> None:
            for name, kind in kinds.items():
                for expert in range(experts):
                    for to, part in zip(theirs[name], kind.apply(weights[name][expert]), strict=True):
                        to[expert].copy_(part.view(to[expert].shape))

        def staged() -> None:
            transfer.stage(weights)

        plain = torch.empty(sum(part.nbytes for part in slots), dtype=torch.uint8, device=device)
        other = torch.empty_like(plain)
        row: dict[str, Any] = {"cast": cast or "bf16", "mb": round(plain.nbytes / 1e6, 3)}
        row["copy_ms"], _ = _timed(lambda: other.copy_(plain), device)
        row["write_ms"], row["enqueue_ms"] = _timed(written, device)
        row["read_ms"], _ = _timed(lambda: carrier.read(arriving), device)
        row["switch_ms"], _ = _timed(lambda: carrier.switch(copies), device)
        row["torch_ms"], _ = _timed(by_torch, device)
        row["launches"] = _launches(staged)
        row["stage_ms"], _ = _timed(staged, device)
        commits = []
        for _ in range(TIMES):
            staged()
            begin = time.perf_counter()
            transfer.commit(into)
            commits.append(time.perf_counter() - begin)
        row["commit_ms"] = round(1e3 * statistics.median(commits), 3)
    for name, parts in theirs.items():
        for mine, part in zip(into[name], parts, strict=True):
            assert torch.equal(mine.view(torch.uint8), part.view(torch.uint8)), name
    return row


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Return the milliseconds of a call until all that it enqueues has ended, and until it returns."""
    all_ms, host_ms = [], []
    for _ in range(TIMES + 2):
        _wait(device)
        begin = time.perf_counter()
        call()
        host_ms.append(1e3 * (time.perf_counter() - begin))
        _wait(device)
        all_ms.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(all_ms[2:]), 3), round(statistics.median(host_ms[2:]), 3)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _launches(call: Callable[[], None]) -> int:
    launch, count = plain_kernel.launch_on, 0

    def counted(*given: Any) -> None:
        nonlocal count
        count += 1
        launch(*given)

    plain_kernel.launch_on = counted
    try:
        call()
    finally:
        plain_kernel.launch_on = launch
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    gpu = torch.device("cuda", 0)
    rows = []
    for cast in CASTS:
        rows.append(measure(cast, HIDDEN, INTERMEDIATE, EXPERTS, gpu))
        print(rows[-1], flush=True)
    write(parser.parse_args().json, {"rows": rows})
