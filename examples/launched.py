"""Ranks of the examples: those that torchrun has started, or a single one; and packages that an example may lack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def installed_by(command: str) -> Iterator[None]:
    """End the program with the command that installs a package whose import in this block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}; install it: {command}") from None


def torchrun() -> bool:
    """Return True if torchrun has started this process."""
    return dist.is_torchelastic_launched()


@contextmanager
def group() -> Iterator[Any]:
    """Yield the group for moecomm.Buffer: the world of torchrun, with the GPU of the local rank, or "self"."""
    if not torchrun():
        yield "self"
        return
    dist.init_process_group("gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    yield dist.group.WORLD
    dist.destroy_process_group()
