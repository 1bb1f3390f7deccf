"""Groups: the ranks of a Buffer, made from the group that the caller has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moecomm import config
from moecomm.base.protocol import MAX_HOST_RANKS
from moecomm.base.validation import check_integer
from moecomm.errors import BadInput
from moecomm.ranks import strays
from moecomm.ranks.board import Board, LocalBoard, SharedValues, StoreBoard
from moecomm.ranks.group import Group
from moecomm.ranks.opening import gather

if TYPE_CHECKING:
    import torch.distributed as dist


class Alone:
    """One rank: group="self"."""

    rank, ranks, in_process = 0, 1, True

    def board(self, prefix: str = "") -> Board:
        return LocalBoard(SharedValues(), prefix)

    def global_ranks(self) -> list[int]:
        return []

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]


class ProcessGroup:
    """A torch.distributed group of any backend, or a sub-group."""

    in_process = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.process_group = group
        self.rank, self.ranks = group.rank(), group.size()

    def board(self, prefix: str = "") -> Board:
        """Make a board over the store.  Collectives of the group have its timeout, and end in its errors."""
        try:
            store = self.process_group.get_group_store()
        except (AttributeError, RuntimeError) as error:
            raise BadInput("group", f"a process group without a store ({error})", "one with a store") from error
        return StoreBoard(store, f"moecomm/{prefix}")

    def global_ranks(self) -> list[int]:
        import torch.distributed as dist

        try:
            return list(dist.get_process_group_ranks(self.process_group))
        except (KeyError, ValueError):  # a group that is not registered with the default group
            return []

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gather over the group, as uint8 tensors of one length; no pickle."""
        import torch.distributed as dist

        # NCCL groups move device tensors only; every other backend moves CPU tensors.
        backends = {str(kind) for kind in getattr(self.process_group, "_device_types", [torch.device("cpu")])}
        device = torch.device("cpu") if "cpu" in backends else torch.device("cuda", torch.cuda.current_device())
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        theirs = [torch.empty(len(data), dtype=torch.uint8, device=device) for _ in range(self.ranks)]
        dist.all_gather(theirs, mine, group=self.process_group)
        return [bytes(t.cpu().tolist()) for t in theirs]


_LOCAL_TIMEOUT_S = 60.0


class LocalRank:
    """One of several ranks that are threads of this process; see local_ranks()."""

    in_process = True

    def __init__(self, rank: int, ranks: int, shared: SharedValues) -> None:
        self.rank, self.ranks, self._shared = rank, ranks, shared

    def board(self, prefix: str = "") -> Board:
        return LocalBoard(self._shared, prefix)

    def global_ranks(self) -> list[int]:
        return []

    def as_rank(self, rank: int) -> LocalRank:
        """Return the group as another of its ranks has it."""
        return LocalRank(rank, self.ranks, self._shared)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gather over the threads; all of them must be in this call."""
        return gather(self, data, _LOCAL_TIMEOUT_S)


def local_ranks(ranks: int) -> list[LocalRank]:
    """Make `ranks` groups for Buffers of one process: ranks on CPU threads, or several virtual ranks on one GPU.

    Opening is collective: the Buffers must be opened at the same time, each from its own thread.
    """
    check_integer("ranks", ranks, 1, MAX_HOST_RANKS)
    shared = SharedValues()
    return [LocalRank(rank, ranks, shared) for rank in range(ranks)]


def rendezvous(group: object) -> Group:
    """Make the Group of the `group` that a caller passed.

    That is a ProcessGroup, a one-dimensional DeviceMesh, a LocalRank, "self", or None, which is "self" in a program of
    one process.  A Group, such as the ranks that a shrink() left, stays as it is.

    Raises:
        BadInput: anything else.  Ranks that wait for this process to open a Buffer raise it, too.
    """
    try:
        found = _group_of(group)
    except BadInput as error:
        strays.announce(error)
        raise
    return found


def _group_of(group: object) -> Group:
    if group is None:
        _check_alone()
    if group is None or (isinstance(group, str) and group == "self"):
        return Alone()
    if isinstance(group, Group):
        return group
    if hasattr(group, "get_group") and hasattr(group, "ndim"):  # DeviceMesh
        if group.ndim != 1:
            raise BadInput("group", f"a DeviceMesh of {group.ndim} dimensions", 'one dimension of it, as in mesh["ep"]')
        group = group.get_group()
    if hasattr(group, "rank") and hasattr(group, "size") and callable(group.size):
        _check_not_destroyed(group)
        return ProcessGroup(group)  # type: ignore[arg-type]
    got = repr(group) if isinstance(group, str) else type(group).__name__
    raise BadInput("group", got, 'a torch.distributed ProcessGroup, a DeviceMesh dimension, a LocalRank or "self"')


def _check_not_destroyed(group: Any) -> None:
    """Raise BadInput after destroy_process_group(): another process may have the store, or nobody."""
    import torch.distributed as dist

    try:
        group.group_name  # noqa: B018 - raises where no name has been set: the caller has made the group himself
    except (AttributeError, RuntimeError):
        return
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        raise BadInput("group", "a process group that has been destroyed", "one that is there") from None


def _check_alone() -> None:
    """Raise BadInput where None may be the default group before init_process_group(): each process would run alone."""
    import torch.distributed as dist

    alone = 'or "self" if each process is to run alone'
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1:
            got = f"None, in a job of {dist.get_world_size()} processes"
            raise BadInput("group", got, f"a process group, torch.distributed.group.WORLD for all of them, {alone}")
    elif (ranks := config.launched_ranks()) > 1:
        raise BadInput(
            "group",
            f"None, in a job of {ranks} processes (WORLD_SIZE) without a process group",
            f"torch.distributed.group.WORLD, after a call of torch.distributed.init_process_group(), {alone}",
        )
