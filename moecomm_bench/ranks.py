"""Ranks of a benchmark (local processes, or those that torchrun has started) and the device of each."""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from moecomm import backends, config
from moecomm.base.choices import BackendName
from moecomm.errors import BadInput, Unsupported
from moecomm.ranks.rendezvous import rendezvous
from moecomm.tools.launch import launch

MOST_RANKS = 64
_TEXT_BYTES = 200


def plan(backend: str, ranks: int | None) -> tuple[BackendName, int]:
    """Resolve `backend` and choose the number of ranks: by default one per GPU, or 4 on CPUs.

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
    """Return True if torchrun has started this process as one of several ranks."""
    return dist.is_torchelastic_launched()


def leads() -> bool:
    """Return True if this process runs the measurements of a single process: under torchrun, rank 0."""
    if not under_torchrun():
        return True
    _join()
    return dist.get_rank() == 0


def need_gpu(command: str, why: str) -> None:
    """Raise Unsupported without a GPU: what a command measures is not on CPUs."""
    if not torch.cuda.is_available():
        raise Unsupported(f"moecomm {command} needs a GPU, and there is none here: {why}")


def starter() -> list[str]:
    """Return the start of the command line, before the name of the program."""
    return ["torchrun", "--nproc-per-node", str(_joined)] if _joined else ["python"]


_joined = 0  # number of ranks under torchrun, once joined


def _join() -> None:
    global _joined
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        _joined = dist.get_world_size()


def on_ranks(target: str, job: dict[str, Any], ranks: int, limit_s: float = float("inf")) -> list[Any] | None:
    """Call `target` on every rank as function(group, **job).

    Args:
        target: "module:function".
        job: keyword arguments, as JSON values.
        ranks: number of processes, if not under torchrun.
        limit_s: seconds for local processes; has no effect under torchrun.

    Returns:
        The (JSON) return value of each rank, by rank; None under torchrun except on rank 0.

    Raises:
        RanksFailed: at least one rank failed.
    """
    if not under_torchrun():
        try:
            return launch(target, job, ranks, limit_s)
        finally:
            Console(stderr=True).show_cursor(True)  # a killed rank may have left it hidden
    _join()
    group = dist.group.WORLD
    assert group is not None
    module, function = target.split(":")
    mine = json.dumps(getattr(importlib.import_module(module), function)(group, **job)).encode()
    found, rank = [json.loads(data) for data in _gather(mine, group)], group.rank()
    # Destroy the group on all ranks now: gloo threads that run until exit may crash the process.
    dist.barrier(group)
    dist.destroy_process_group()
    return found if rank == 0 else None


def _gather(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    ranks = rendezvous(group)
    lengths = [int.from_bytes(length, "little") for length in ranks.all_gather(len(data).to_bytes(8, "little"))]
    padded = ranks.all_gather(data.ljust(max(lengths), b"\0"))
    return [text[:length] for text, length in zip(padded, lengths, strict=True)]


def together(group: dist.ProcessGroup, work: Callable[[], Any]) -> tuple[Any, str]:
    """Run `work` on every rank. Collective.

    Returns (result, "") if every rank succeeds, else (None, the first failed rank's error).
    """
    result, why = None, ""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - any exception becomes the reason
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    everybody = rendezvous(group).all_gather(why.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"))
    whys = [text for data in everybody if (text := data.rstrip(b"\0").decode(errors="replace"))]
    return (None, whys[0]) if whys else (result, "")


def free_port() -> int:
    """Return a port of the loopback interface that is free now, for frameworks that take only a number."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def device_of(group: dist.ProcessGroup, backend: str) -> torch.device:
    """Return the device of this rank and make it current: the CPU, or the GPU of its local rank."""
    if backend == "host":
        return torch.device("cpu")
    index = dist.get_node_local_rank(fallback_rank=group.rank())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
