"""The ranks of the examples: those that torchrun has started, or one alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def torchrun() -> bool:
    """Whether torchrun has started this process."""
    return dist.is_torchelastic_launched()


@contextmanager
def group() -> Iterator[Any]:
    """What moecomm.Buffer takes as its group; each rank gets the GPU of its local rank, where there is one."""
    if not torchrun():
        yield "self"
        return
    dist.init_process_group("gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    yield dist.group.WORLD
    dist.destroy_process_group()
