"""python -m tests.compat.deepxtrace FOLDER: DeepXTrace itself, from a checkout, beside four ranks of which one is late.

The ranks have a GPU each where there are four; else they are CPU ranks, and the tensors that DeepXTrace makes on the
GPU are made on the CPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from .test_deepxtrace import LATE, LATE_S, RANKS, Program

PERIOD, PERIODS = 8, 3  # steps between two diagnoses; a rank is late after the first


class OnCpu(TorchFunctionMode):
    """Make on the CPU what is to be made on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: "cpu" if str(value) == "cuda" else value for name, value in (kwargs or {}).items()}
        return function(*args, **given)


def rank_main(rank: int, folder: Path, work: Path, queue: Any) -> None:
    """Make steps, and diagnose them; pass on what rank 0 finds."""
    on_gpus = torch.cuda.device_count() >= RANKS
    place: AbstractContextManager[Any] = nullcontext() if on_gpus else OnCpu()
    if on_gpus:
        torch.cuda.set_device(rank)
    else:
        torch.cuda.is_current_stream_capturing = lambda: False
    store = dist.FileStore(str(work / "store"), RANKS)
    dist.init_process_group("nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=RANKS)
    sys.path.insert(0, str(folder / "src"))
    from deepxtrace.diagnose import Diagnose

    with place:
        diagnose = Diagnose(dist.group.WORLD)
    program = Program(rank, dist.group.WORLD, "cuda" if on_gpus else "cpu")
    program.dispatch_waits, program.combine_waits = diagnose.get_stats_ll_stats_tensor()
    for step in range(PERIODS * PERIOD):
        program.step(LATE_S if rank == LATE and step >= PERIOD else 0.0)
        with place:
            found = diagnose.diagnose_ll_sync(PERIOD)
        if found:
            queue.put([[int(column) for column, *_ in phase["abnormal_cols"]] for phase in found])
    program.buffer.destroy()


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.compat.deepxtrace", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as work:
        os.environ |= {"DEEPEP_DIAGNOSE_LOG_PATH": work, "GLOO_SOCKET_IFNAME": "lo"}
        context: Any = multiprocessing.get_context("spawn")
        queue = context.Queue()
        ranks = [context.Process(target=rank_main, args=(rank, folder, Path(work), queue)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        found = [queue.get(timeout=120) for _ in range(PERIODS)]
        for process in ranks:
            process.join()
    print(f"late ranks that it names, in dispatches and combines: {found}")
    assert found[0] == [[], []] and all(dispatch == [LATE] for dispatch, _ in found[1:])
    # On GPUs the late rank may be the last to launch its combine, too, while the others have launched theirs.
    on_gpus = torch.cuda.device_count() >= RANKS
    assert all(late == [] or (on_gpus and late == [LATE]) for _, late in found)


if __name__ == "__main__":
    main()
