"""Training over a framework's own dispatcher and over moecomm: ranks, comparison, and result of several programs.

On GPUs the framework's dispatcher trains twice: how far its own two runs are apart is what the hardware does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moecomm_bench import results
from moecomm_bench.ranks import free_port

Trained = tuple[list[float], float]  # the loss of each step, and tokens per second of all ranks
Runs = dict[str, list[Trained]]  # of each recipe: over their dispatcher, over moecomm; on GPUs, over theirs once more


class Program(NamedTuple):
    """A program that trains.

    Attributes:
        name: behind `python -m`.
        what: is trained, in words.
        package: of the framework, whose version a result has.
        ranks: on CPUs.
        open: opens a process group (rank, ranks, device, port).
        train: trains once: over moecomm or not, by a recipe, on a device, with so many ranks, so many steps.
        bounds: of each recipe, how far a loss may be from that of the framework's dispatcher, relative, on CPU ranks.
        bound: the same on GPUs.
    """

    name: str
    what: str
    package: str
    ranks: int
    open: Callable[[int, int, str, int], None]
    train: Callable[[bool, str, str, int, int], Trained]
    bounds: Mapping[str, float]
    bound: float


def _rank(
    rank: int, ranks: int, device: str, port: int, steps: int, recipes: list[str], program: Program, queue: Any
) -> None:
    torch.set_num_threads(1)
    program.open(rank, ranks, device, port)
    found: Runs = {}
    for recipe in recipes:
        found[recipe] = []
        for over_moecomm in (False, True, False)[: 3 if device == "cuda" else 2]:
            found[recipe].append(program.train(over_moecomm, recipe, device, ranks, steps))
            if rank == 0:
                losses, rate = found[recipe][-1]
                name = "over moecomm" if over_moecomm else "theirs"
                print(f"{recipe}, {name}: {losses[:: max(1, steps // 10)]}, {rate:.0f} tokens/s", flush=True)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    os._exit(0)  # threads of a framework may go on


def both(program: Program, ranks: int, device: str, steps: int, recipes: list[str]) -> Runs:
    """Return what training returns for each recipe, over each dispatcher; empty if a rank failed."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    port = free_port()
    given = [(rank, ranks, device, port, steps, recipes, program, found) for rank in range(ranks)]
    processes = [context.Process(target=_rank, args=one) for one in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return {} if found.empty() else found.get()


def apart(theirs: list[float], ours: list[float]) -> tuple[float, int]:
    """Return the largest relative difference of two losses, and how many steps are the same before the first."""
    pairs = list(zip(theirs, ours, strict=True))
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return max(abs(a - b) / abs(a) for a, b in pairs), same


def main(program: Program, description: str | None, arguments: list[str]) -> int:
    """Train, compare, print, and write a result if all losses are within their bound; returns the exit status."""
    parser = argparse.ArgumentParser(f"python -m {program.name}", description=description)
    parser.add_argument("steps", type=int, nargs="?", default=100)
    parser.add_argument("--gpus", type=int, metavar="N", help="ranks on GPUs")
    parser.add_argument("--recipes", type=int, metavar="N", help="only the first N")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if given.steps < 2:
        parser.error("steps: at least 2")
    begin = time.monotonic()
    ranks, device = (given.gpus, "cuda") if given.gpus else (program.ranks, "cpu")
    if not (runs := both(program, ranks, device, given.steps, list(program.bounds)[: given.recipes])):
        return 1
    rows, right = [], True
    for recipe, ((theirs, their_rate), (ours, our_rate), *again) in runs.items():
        error, same = apart(theirs, ours)
        right &= error <= (program.bound if given.gpus else program.bounds[recipe])
        print(
            f"{given.steps} steps on {ranks} ranks, {recipe}: loss {theirs[0]:.4f} to {theirs[-1]:.4f}, over moecomm "
            f"{ours[-1]:.4f}; {error:.1e} apart at most, the first {same} the same; {their_rate:.0f} tokens/s, over "
            f"moecomm {our_rate:.0f}"
        )
        row = {
            "kind": f"training of {program.what} on {ranks} {'GPU' if given.gpus else 'CPU'} ranks, losses of the "
            "all-to-all dispatcher",
            "recipe": recipe,
            "steps": given.steps,
            "ranks": ranks,
            "first_loss": theirs[0],
            "last_loss": ours[-1],
            "largest_difference": error,
            "same_steps": same,
            "seconds": round(time.monotonic() - begin),
        }
        if again:
            row["their_own_difference"], row["their_own_same_steps"] = apart(theirs, again[0][0])
            print(f"their own two runs: {row['their_own_difference']:.1e}, {row['their_own_same_steps']} the same")
        if given.gpus and ranks <= torch.cuda.device_count():
            row |= {"tokens_per_s": our_rate, "their_tokens_per_s": their_rate}
        rows.append(row)
    if given.json and right:
        version = {program.package: metadata.version(program.package)}
        results.write(given.json, {"rows": [row | version for row in rows]})
    return 0 if right else 1
