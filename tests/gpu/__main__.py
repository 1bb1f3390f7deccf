"""tests/gpu/run [PART]... [--beside PART...]: the tests that want GPUs, each step under a limit, a line a step.

tests/gpu/run figures: the measurements behind the pages, see figures.py.
tests/gpu/run eight: these and the steps for several GPUs, the most valuable first, see eight.py.

Parts go one after the other.  Of those behind --beside, the steps of one GPU go side by side, SHARE of them (default 1)
on each GPU; then those that look at the memory of a GPU, and the rest.  With 15 on an H200 the driver said that it was
out of memory, of which most was free.

The native module must have been built, by `pip install -e .` or `python setup.py build_ext --inplace`, and for GIN
without a NIC the plugin, by `pip install ./rma_plugin`.

gpu-tests.json among the logs says which steps passed, see passed.py.

CASES: random cases of a test (default 300; limits grow with it).  SEED: which ones (default 0).  LOGS: where logs and
the JSON of `measure` go (default: a new folder).  A step that hangs ends at its limit, and its log says where each
Python thread was.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.gpu import eight, figures, processes
from tests.gpu.processes import all_gpus
from tests.gpu.steps import LOGS, ONLY_WHERE_NAMED, PARTS, SHARE, Step, run


def beside(parts: Sequence[str], gpus: Iterable[str | None]) -> list[bool]:
    """The steps of one GPU side by side, then the others."""
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for gpu in [*gpus] * SHARE:
        free.put(gpu)
    threads = max(1, (os.cpu_count() or 1) // free.qsize())  # torch would start one a core in each process

    def alone(step: Step) -> bool:
        gpu = free.get()
        try:
            return run(step, LOGS, gpu, threads)
        finally:
            free.put(gpu)

    every = [step for part in parts for step in PARTS[part]]
    by_share = {
        shares: [step for step in every if step.gpus == 1 and step.shares == shares] for shares in (True, False)
    }
    with ThreadPoolExecutor(free.qsize()) as pool:
        found = list(pool.map(alone, by_share[True]))
    return found + [run(step, LOGS) for step in (*by_share[False], *(step for step in every if step.gpus != 1))]


def main(arguments: Sequence[str]) -> int:
    """1 if a step has failed."""
    if arguments[:1] == ["figures"]:
        return figures.main(arguments[1:])
    if arguments[:1] == ["eight"]:
        return figures.main(arguments[1:], eight.order)
    parser = argparse.ArgumentParser("tests/gpu/run", usage=__doc__)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--beside", nargs="+", default=[])
    given = parser.parse_args(arguments)
    if unknown := {*given.parts, *given.beside} - PARTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    default = [part for part in PARTS if part not in ONLY_WHERE_NAMED]
    LOGS.mkdir(parents=True, exist_ok=True)
    in_turn = given.parts or ([] if given.beside else default)
    fine = [run(step, LOGS) for part in in_turn for step in PARTS[part]]
    if given.beside:
        fine += beside(given.beside, all_gpus())
    print(f"logs: {LOGS}")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    processes.end_with_children()
    sys.exit(main(sys.argv[1:]))
