"""How the ranks of a Buffer find each other once, when it opens: an all-gather of bytes, over whatever group the
caller has.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from moecomm.errors import BadInput
from moecomm.whole import check_whole

if TYPE_CHECKING:
    import torch.distributed as dist

MAX_RANKS = 64  # of a Buffer


@runtime_checkable
class Rendezvous(Protocol):
    """The ranks of one Buffer.  `in_process`: all ranks are threads of this process."""

    rank: int
    ranks: int
    in_process: bool

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everybody's data, by rank.  All ranks must pass the same number of bytes."""
        ...


class Alone:
    """One rank: group=None."""

    rank, ranks, in_process = 0, 1, True

    def all_gather(self, data: bytes) -> list[bytes]:
        """Our own data."""
        return [data]


class ProcessGroup:
    """A torch.distributed group of any backend, or a sub-group."""

    in_process = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.ranks = group.rank(), group.size()
        # NCCL groups move device tensors only; every other backend moves CPU tensors.
        backends = {str(kind) for kind in getattr(group, "_device_types", [torch.device("cpu")])}
        self._device = torch.device("cpu") if "cpu" in backends else torch.device("cuda", torch.cuda.current_device())

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gathers over the group, as uint8 tensors of one length; no pickle."""
        import torch.distributed as dist

        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        theirs = [torch.empty(len(data), dtype=torch.uint8, device=self._device) for _ in range(self.ranks)]
        dist.all_gather(theirs, mine, group=self._group)
        return [bytes(t.cpu().tolist()) for t in theirs]


class LocalRank:
    """One of several ranks that are threads of this process: see local_ranks()."""

    in_process = True

    def __init__(self, rank: int, shared: _Meeting) -> None:
        self.rank, self.ranks, self._shared = rank, shared.ranks, shared

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gathers over the threads; all of them must be in this call."""
        return self._shared.all_gather(self.rank, data)


class _Meeting:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks)
        self._data: list[bytes] = [b""] * ranks

    def all_gather(self, rank: int, data: bytes) -> list[bytes]:
        self._data[rank] = data
        self._barrier.wait(timeout=60)
        everybody = list(self._data)
        self._barrier.wait(timeout=60)
        return everybody


def local_ranks(ranks: int) -> list[LocalRank]:
    """`ranks` groups for Buffers of one process, one a thread: ranks on CPU threads, or several virtual ranks on one
    GPU.

    Buffers must be opened at the same time, each from its own thread: opening is collective.
    """
    check_whole("ranks", ranks, 1, MAX_RANKS)
    meeting = _Meeting(ranks)
    return [LocalRank(rank, meeting) for rank in range(ranks)]


def rendezvous(group: object) -> Rendezvous:
    """The Rendezvous of what a caller passed as `group`: None, a ProcessGroup, a one-dimensional DeviceMesh, or a
    LocalRank.
    """
    if group is None:
        return Alone()
    if isinstance(group, (Alone, ProcessGroup, LocalRank)):
        return group
    if hasattr(group, "get_group") and hasattr(group, "ndim"):  # DeviceMesh
        if group.ndim != 1:
            raise BadInput("group", f"a DeviceMesh of {group.ndim} dimensions", 'one dimension of it, as in mesh["ep"]')
        group = group.get_group()
    if hasattr(group, "rank") and hasattr(group, "size") and callable(group.size):
        return ProcessGroup(group)  # type: ignore[arg-type]
    raise BadInput(
        "group", type(group).__name__, "None, a torch.distributed ProcessGroup, a DeviceMesh dimension or a LocalRank"
    )
