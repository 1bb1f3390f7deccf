"""Losses of a small language model whose tokens and gradients travel between its experts in bf16, FP8 and MXFP8.

    python bench/quantized_training.py [--steps 200] [--json bench/results/quantized-training-cpu.json]

The model of trained_routing.py is trained on two CPU ranks, each with half of every batch. Rows travel in bf16, or in
the format of the dispatch (`forward`) and of the backward pass of the combine (`backward`); what is not cast is the
same in all runs: the weights they start from, the sequences, the optimizer. The last run has other sequences in bf16,
which shows how far apart losses are for another reason.

Keys of a row: `losses`, means of nats a byte over 20 steps each and all ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trained_routing import LENGTH, SEQUENCES, Model, texts

from moecomm.tools.launch import launch
from moecomm_bench.results import write

RANKS, MEAN_OF = 2, 20  # steps of which a mean is kept
RUNS = (  # forward, backward, seed of the sequences
    ("bf16", "bf16", 0),
    ("fp8", "bf16", 0),
    ("mxfp8", "bf16", 0),
    ("fp8", "fp8", 0),
    ("mxfp8", "mxfp8", 0),
    ("bf16", "bf16", 1),
)


def run_rank(group: dist.ProcessGroup, steps: int) -> list[list[float]]:
    """Return the losses of each run, means over all ranks."""
    torch.set_num_threads(1)
    return [losses(group, steps, *run) for run in RUNS]


def losses(group: dist.ProcessGroup, steps: int, forward: str, backward: str, seed: int) -> list[float]:
    """Train a model, and return the loss of each step."""
    torch.manual_seed(0)
    formats = {"quantize": forward, "grad_wire": backward}
    how = {name: word for name, word in formats.items() if word != "bf16"}
    model = DistributedDataParallel(Model(group, payload=torch.bfloat16, **how), process_group=group)
    text, _ = texts()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    mine, found = slice(group.rank(), None, group.size()), []
    for _ in range(steps):
        begin = torch.randint(len(text) - LENGTH, (SEQUENCES, 1), generator=generator)[mine]
        loss = model(text[begin + torch.arange(LENGTH + 1)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach() / group.size()
        dist.all_reduce(mean, group=group)
        found.append(float(mean))
    return found


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    by_rank: list[Any] = launch("quantized_training:run_rank", {"steps": options.steps}, RANKS)
    rows = []
    for (forward, backward, seed), every in zip(RUNS, by_rank[0], strict=True):
        parts = [every[at : at + MEAN_OF] for at in range(0, len(every), MEAN_OF)]
        means = [round(sum(part) / len(part), 4) for part in parts]
        print(f"forward {forward:<6} backward {backward:<6} sequences {seed}:", *means)
        rows.append({"forward": forward, "backward": backward, "sequences": seed, "losses": means})
    if options.json:
        print(write(options.json, {"ranks": RANKS, "steps": options.steps, "rows": rows}))


if __name__ == "__main__":
    main()
