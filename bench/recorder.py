"""Host time of a dispatch and its combine, with and without the flight recorder.

    python bench/recorder.py --ranks 4 --json recorder.json

Two Buffers of the same ranks make equal eager rounds of DeepSeek-V3 in turn. The recorder of the second does nothing.
Files are asked for (MOECOMM_FLIGHT_DIR), as in a job that keeps records. A time ends when both calls have returned to
the host; before it the host waits for the device. Keys of a row, over the rounds of all ranks:

- `us`, `us_off`: percentiles with the recorder, and without.
- `a_call_us`: half of the median difference of two rounds in a row; a round has two calls.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import moecomm
from moecomm.base.choices import BackendName
from moecomm.router import MODELS, random_routing
from moecomm_bench.clock import percentiles
from moecomm_bench.ranks import device_of, on_ranks
from moecomm_bench.results import write

TOKENS, WARMUP = (1, 128), 50


def run_rank(group: dist.ProcessGroup, backend: BackendName, rounds: int) -> list[tuple[list[float], list[float]]]:
    """Run one rank; microseconds of each round with the recorder and without, by number of tokens."""
    device, model, found = device_of(group, backend), MODELS["deepseek-v3"], []
    sizes: dict[str, Any] = {"hidden": model.hidden, "num_experts": model.num_experts, "topk": model.topk}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        opened.enter_context(mock.patch.dict(os.environ, MOECOMM_FLIGHT_DIR=folder))
        buffers = [
            opened.enter_context(moecomm.Buffer(group, **sizes, max_tokens=max(TOKENS), backend=backend))
            for _ in range(2)
        ]
        for call in ("begin", "end"):
            opened.enter_context(mock.patch.object(buffers[1].rounds.flight, call, _nothing))
        for tokens in TOKENS:
            routing = random_routing(tokens, model.num_experts, model.topk)
            inputs = [tensor.to(device) for tensor in (torch.zeros(tokens, model.hidden).bfloat16(), *routing)]
            us: tuple[list[float], list[float]] = [], []
            for number in range(WARMUP + rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    us[which].append(_round_us(buffers[which], *inputs))
            found.append((us[0][WARMUP:], us[1][WARMUP:]))
            for buffer in buffers:
                buffer.check()
    return found


def _nothing(*about: Any) -> int:
    return 0


def _round_us(buffer: moecomm.Buffer, *inputs: torch.Tensor) -> float:
    """Return the microseconds of a round on the host."""
    if buffer.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    routed = buffer.dispatch(*inputs, sync=False)
    buffer.combine(routed.x, routed.handle)
    return (time.perf_counter() - begin) * 1e6


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="lsa")
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    by_rank = on_ranks("recorder:run_rank", {"backend": given.backend, "rounds": given.rounds}, given.ranks)
    if by_rank is None:
        return
    rows = []
    for tokens, ranks in zip(TOKENS, zip(*by_rank, strict=True), strict=True):
        on, off = ([us for rank in ranks for us in rank[which]] for which in (0, 1))
        row = {"tokens": tokens, "us": percentiles([on]), "us_off": percentiles([off])}
        less = statistics.median(with_it - without for with_it, without in zip(on, off, strict=True)) / 2
        rows.append(row | {"a_call_us": round(less, 3)})
        print(rows[-1], flush=True)
    write(given.json, {"ranks": len(by_rank), "backend": given.backend, "rounds": given.rounds, "rows": rows})


if __name__ == "__main__":
    main()
