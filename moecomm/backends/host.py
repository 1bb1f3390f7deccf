"""CPU ranks of one host: memfd windows that every rank maps, and the C++ executor.  The embedded default."""

from __future__ import annotations

import os

import torch

from moecomm import _native
from moecomm.backends.collective import share_descriptor
from moecomm.rendezvous import Rendezvous


def missing() -> str:
    """Nothing: every Linux machine has what this needs."""
    return "" if hasattr(os, "memfd_create") else "memfd_create; moecomm runs on Linux"


class HostSession:
    """See moecomm.backends.Session."""

    name = "host"
    device = torch.device("cpu")

    def __init__(self, ranks: Rendezvous, shape: _native.Shape, timeout_s: float) -> None:
        self._window: _native.HostWindow | None = _native.HostWindow(_native.window_layout(shape).bytes)
        self._peers = map_windows(ranks, self._window, timeout_s)
        self._control = _native.host_alloc(128)  # FailureRecord, then the abort word the host writes
        context = _native.Context()
        context.set_shape(shape)
        context.rank = ranks.rank
        context.peers = [peer.address for peer in self._peers]
        context.record = self._control.address
        context.abort_host = self._control.address + 64
        self.context = context
        self.arena = _native.Arena(context.window.heap, shape.heap_bytes)
        self.nbytes = self._window.nbytes
        pids = [int.from_bytes(p, "little") for p in ranks.all_gather(os.getpid().to_bytes(8, "little"))]
        self._watcher = _native.Watcher(pids, ranks.rank, context.abort_host)
        self._threads = max(1, len(os.sched_getaffinity(0)) // ranks.ranks)

    @property
    def owner(self) -> object:
        """What must outlive every tensor in the window."""
        return self._window

    def dispatch(self, args: _native.DispatchArgs) -> None:
        """Blocks until the round is over."""
        _native.host_dispatch(args)

    def combine(self, args: _native.CombineArgs) -> None:
        """Blocks until the round is over."""
        _native.host_combine(args)

    def synchronize(self) -> None:
        """Rounds are over when they return."""

    def workers(self, requested: int | None, num_tokens: int) -> int:
        """Threads of this rank: its share of the cores, fewer for small rounds."""
        return requested or max(1, min(self._threads, num_tokens // 8))

    def abort(self, cause: int, culprit: int) -> None:
        """Ends every wait of this rank."""
        _native.set_abort(self.context.abort_host, cause, culprit)

    def dead_peers(self) -> list[int]:
        """Ranks whose process has ended."""
        return self._watcher.dead()

    def close(self) -> None:
        """Drops our mappings; the memory goes when the last tensor and the last peer have let go."""
        self._watcher.close()
        if _native.record(self.context.record) is None:
            _native.leave(self.context)
        for peer in self._peers:
            if peer is not self._window:
                peer.close()
        self._peers = []
        self._window = None


def map_windows(ranks: Rendezvous, mine: _native.HostWindow, timeout_s: float) -> list[_native.HostWindow]:
    """Every rank's window, by rank.  Collective."""
    descriptors = share_descriptor(ranks, mine.fd, timeout_s)
    return [
        mine if rank == ranks.rank else _native.HostWindow.attach(fd, mine.nbytes)
        for rank, fd in enumerate(descriptors)
    ]


def open(ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float) -> HostSession:  # noqa: A001
    """Collective: see moecomm.backends.Backend."""
    return HostSession(ranks, shape, timeout_s)
