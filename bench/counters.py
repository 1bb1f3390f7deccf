"""Time that the counters take, and that a Buffer which masks ranks takes beside them.

    python bench/counters.py --ranks 2 --json counters.json

Four Buffers of the same ranks run DeepSeek-V3's dispatch and combine in captured graphs, in turn; y lies in the window.
Kernels of `off` are compiled from a copy of csrc without all that counts.  `again` is like `on`: what the two differ by
is noise.  `mask` is opened with on_timeout="mask": each dispatch looks its routing up in a table.  Times are of one
pair on the slowest rank, in microseconds.  Keys of a row: percentiles of `on`, `off`, `again` and `mask`; `on_by_off`,
`again_by_on` and `mask_by_on`, medians over replays.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import moecomm
from moecomm.base.choices import Layout
from moecomm.gpu import jit, loader
from moecomm.router import MODELS, random_routing
from moecomm_bench.clock import Clock, percentiles
from moecomm_bench.ranks import device_of, on_ranks
from moecomm_bench.results import write

TOKENS: tuple[int, ...] = (1, 128, 4096)
LAYOUTS: tuple[Layout, ...] = ("flat", "expert")
CHAINS = {1: 100, 128: 50, 4096: 10}
# (header, text that counts, what is there without): each text occurs once.
COUNTING = (
    ("device/grid.cuh", "    add_relaxed(own<u64>(ctx, rounds_counter_at(ctx.window)), 1);\n", ""),
    ("device/wait.cuh", "    add_relaxed(own<u64>(ctx, counter_at(ctx.window, ctx.shape, which, peer)), n);\n", ""),
    ("device/wait.cuh", "    const u64 begun = now_ns();\n    const Waited waited", "    const Waited waited"),
    ("device/wait.cuh", "    if (peer != ctx.rank) add_counter(ctx, which, peer, now_ns() - begun);\n", ""),
    (
        "device/tagged_words.cuh",
        "    timed_wait(r.ctx, r.tag, peer, own<const u64>(r.ctx, tagged_word(r, peer, 0)), Counter::wait_header);\n",
        "",
    ),
    (
        "dispatch/outputs.cuh",
        "    const u64 bytes = static_cast<u64>(",
        "    return;\n    const u64 bytes = static_cast<u64>(",
    ),
    ("combine/collect.cuh", "            if (counts_waits()) c.shared.wait_begun = now_ns();\n", ""),
    (
        "combine/collect.cuh",
        "            if (counts_waits() && missing_peer != c.me())\n"
        "                add_counter(c.a.ctx, Counter::wait_combine, missing_peer, now_ns() - c.shared.wait_begun);\n",
        "",
    ),
)


def copy_without_counting(to: Path) -> None:
    """Copy csrc, and take out what counts."""
    shutil.copytree(loader.headers(), to)
    for header, counts, instead in COUNTING:
        text = (to / header).read_text()
        if text.count(counts) != 1:
            raise ValueError(f"{header} has {text.count(counts)} times, not once: {counts}")
        text = text.replace(counts, instead)
        if instead == "    return;\n":
            text = text[: text.index(instead) + len(instead)] + "}\n\n}  // namespace moecomm\n"
        (to / header).write_text(text)


@contextmanager
def kernels_of(sources: Path) -> Iterator[None]:
    """Compile and load kernels from these sources."""
    with (
        mock.patch.object(loader, "headers", return_value=sources),
        mock.patch.object(loader, "toolchain", loader.toolchain.__wrapped__),
        mock.patch.dict(jit._loaded, clear=True),
    ):
        yield


def run_rank(group: dist.ProcessGroup, replays: int) -> list[dict[str, list[float]]]:
    """Run one rank; microseconds of each replay, by case and by kernels."""
    device, model, found = device_of(group, "lsa"), MODELS["deepseek-v3"], []
    sizes: dict[str, Any] = {"hidden": model.hidden, "num_experts": model.num_experts, "topk": model.topk}
    sizes["window_bytes"] = 4 << 30  # a graph keeps its outputs
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        without = Path(folder) / "csrc"
        copy_without_counting(without)
        for tokens in TOKENS:
            routing = random_routing(tokens, model.num_experts, model.topk)
            inputs = [tensor.to(device) for tensor in (torch.zeros(tokens, model.hidden).bfloat16(), *routing)]
            for layout in LAYOUTS:
                on, off, again, mask = (
                    opened.enter_context(moecomm.Buffer(group, **sizes, max_tokens=tokens, on_timeout=how))
                    for how in ("raise", "raise", "raise", "mask")
                )

                def pair(buffer: moecomm.Buffer, inputs: Any = inputs, layout: Any = layout) -> None:
                    routed = buffer.dispatch(*inputs, layout=layout, sync=False)
                    buffer.combine(routed.x, routed.handle)

                with kernels_of(without):
                    pair(off)
                clock = Clock(group, device, graph=True, cold=False, chain=CHAINS[tokens], replays=replays)
                buffers = {"on": on, "off": off, "again": again, "mask": mask}
                calls = {name: partial(pair, buffer) for name, buffer in buffers.items()}
                found.append(clock.alternately(calls, calls["on"]))
                counted, silent = on.stats(), off.stats()
                if not counted.rounds or silent.rounds or silent.rows_to.any() or silent.wait_ns.any():
                    raise RuntimeError("kernels without counters count, or those with them do not")
                opened.close()
    return found


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replays", type=int, default=101)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    by_rank = on_ranks("counters:run_rank", {"replays": given.replays}, given.ranks)
    if by_rank is None:
        return
    rows = []
    cases = [(tokens, layout) for tokens in TOKENS for layout in LAYOUTS]
    for (tokens, layout), ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        row: dict[str, Any] = {"tokens": tokens, "layout": layout}
        slowest = {which: [max(us) for us in zip(*(rank[which] for rank in ranks), strict=True)] for which in ranks[0]}
        row |= {which: percentiles([us]) for which, us in slowest.items()}
        for of, by in (("on", "off"), ("again", "on"), ("mask", "on")):
            ratios = (a / b for a, b in zip(slowest[of], slowest[by], strict=True))
            row[f"{of}_by_{by}"] = round(statistics.median(ratios), 4)
        rows.append(row)
        print(rows[-1], flush=True)
    write(given.json, {"ranks": len(by_rank), "replays": given.replays, "rows": rows})


if __name__ == "__main__":
    main()
