"""Ranks of an engine, each in a process of its own.

Engines open the default process group themselves, so `moecomm.tools.launch`, which has opened one, cannot start them.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from moecomm_bench.ranks import free_port

Job = dict[str, Any]  # the same for all ranks
Found = dict[str, Any]  # values of one rank: tensors on the CPU, numbers, text, containers of these


def run(serve: Callable[[int, Job], Found], job: Job, what: str, limit_s: float) -> list[Found]:
    """Call `serve(rank, job)` in `job["ranks"]` processes, with a free port as `job["port"]`.

    Args:
        serve: a function that a new process can import.
        job: its second argument; `ranks` is their number.
        what: names the run in a TimeoutError.
        limit_s: seconds after which ranks are killed; shortly before, they write where they are to stderr.

    Returns:
        The return value of each rank, by rank.

    Raises:
        RuntimeError: at least one rank failed; the message has each rank's error.
        TimeoutError: ranks had not ended after `limit_s`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = (serve, job | {"port": free_port()}, folder, limit_s)
        deadline = time.monotonic() + limit_s
        ranks = start_processes(_rank, given, nprocs=job["ranks"], join=False, start_method="spawn")
        try:
            while not ranks.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{what}: no end within {limit_s:g} s")
        except ProcessException as error:
            said = sorted(f"rank {one.suffix[1:]}: {one.read_text()}" for one in folder.glob("error.*"))
            raise RuntimeError("; ".join(said)[:2000] or str(error)) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [torch.load(folder / f"found.{rank}", weights_only=True) for rank in range(job["ranks"])]


def _rank(rank: int, serve: Callable[[int, Job], Found], job: Job, folder: Path, limit_s: float) -> None:
    """Write what a rank finds, or its error, and end the process, which an engine's threads would keep."""
    faulthandler.dump_traceback_later(max(1.0, limit_s - 5))
    try:
        torch.save(serve(rank, job), folder / f"found.{rank}")
    except Exception as error:  # noqa: BLE001 - the parent raises it
        traceback.print_exc()
        (folder / f"error.{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)
