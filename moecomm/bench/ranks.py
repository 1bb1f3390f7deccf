"""Ranks of a benchmark: processes of our own, or those that torchrun has started; and the device of each."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moecomm import backends, config
from moecomm.core.choices import BackendName
from moecomm.core.rendezvous import rendezvous
from moecomm.errors import BadInput
from moecomm.tools.launch import launch

Step = Callable[[str], None]  # says what comes next
MOST_RANKS = 64
_TEXT_BYTES = 200


def plan(backend: str, ranks: int | None) -> tuple[BackendName, int]:
    """The backend that is taken for `backend`, and how many ranks there will be: one a GPU, or 4 on CPUs.

    Raises BadInput, Unsupported.
    """
    name, _ = backends.choose(config.asked_backend(backend), None)
    if under_torchrun():
        _join()
        if ranks not in (None, dist.get_world_size()):
            raise BadInput("ranks", ranks, f"the {dist.get_world_size()} that torchrun has started")
        return name, dist.get_world_size()
    most = MOST_RANKS if name == "host" else torch.cuda.device_count()
    wanted = ranks if ranks is not None else 4 if name == "host" else min(most, 8)
    if not 1 <= wanted <= most:
        raise BadInput("ranks", wanted, f"1 to {most}")
    return name, wanted


def under_torchrun() -> bool:
    """Whether torchrun has started this process as one of several ranks."""
    return dist.is_torchelastic_launched()


def leads() -> bool:
    """Whether what one process measures by itself is for this one: of torchrun's, the first."""
    if not under_torchrun():
        return True
    _join()
    return dist.get_rank() == 0


def starter() -> list[str]:
    """The words that have started this process, before those that say what to run."""
    return ["torchrun", "--nproc-per-node", str(_joined)] if _joined else ["python"]


_joined = 0  # how many ranks torchrun has started, once we have met them


def _join() -> None:
    global _joined
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        _joined = dist.get_world_size()


def on_ranks(target: str, job: dict[str, Any], ranks: int, limit_s: float = float("inf")) -> list[Any] | None:
    """Calls `target` ("module:function") as function(group, **job) on every rank, in at most `limit_s` seconds where
    the ranks are processes of our own.

    Returns what each rank returned (JSON), by rank; None in a process of torchrun that is not rank 0, which has nothing
    to report.  Raises RanksFailed.
    """
    if not under_torchrun():
        try:
            return launch(target, job, ranks, limit_s)
        finally:
            Console(stderr=True).show_cursor(True)  # a rank that was ended may have left it hidden
    _join()
    group = dist.group.WORLD
    assert group is not None
    module, function = target.split(":")
    mine = json.dumps(getattr(importlib.import_module(module), function)(group, **job)).encode()
    found, rank = [json.loads(data) for data in _gather(mine, group)], group.rank()
    # Together and now: threads of gloo that are left to the end of the process may bring it down.
    dist.barrier(group)
    dist.destroy_process_group()
    return found if rank == 0 else None


def _gather(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    ranks = rendezvous(group)
    lengths = [int.from_bytes(length, "little") for length in ranks.all_gather(len(data).to_bytes(8, "little"))]
    padded = ranks.all_gather(data.ljust(max(lengths), b"\0"))
    return [text[:length] for text, length in zip(padded, lengths, strict=True)]


def together(group: dist.ProcessGroup, work: Callable[[], Any]) -> tuple[Any, str]:
    """Collective: (what it returns, "") if it succeeds on every rank, else (None, what the first that failed says)."""
    result, why = None, ""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - whatever another library raises is told
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    everybody = rendezvous(group).all_gather(why.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"))
    whys = [text for data in everybody if (text := data.rstrip(b"\0").decode(errors="replace"))]
    return (None, whys[0]) if whys else (result, "")


def device_of(group: dist.ProcessGroup, backend: str) -> torch.device:
    """The device of this rank, made current: the CPU, or the GPU of its number on this host."""
    if backend == "host":
        return torch.device("cpu")
    index = dist.get_node_local_rank(fallback_rank=group.rank())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def progress(group: dist.ProcessGroup | None, total: int) -> Iterator[Step]:
    """A bar on standard error, drawn by rank 0 if that is a terminal: each step says what is measured now.

    Without a group this process is alone.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    silent = (group is not None and group.rank() != 0) or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        task, done = bar.add_task("", total=total), itertools.count()

        def step(text: str) -> None:
            bar.update(task, completed=next(done), description=text)

        yield step
