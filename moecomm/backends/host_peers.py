"""Memory of CPU ranks of one machine: memfd windows that every rank maps, and a watch on their processes."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from moecomm import _native
from moecomm.backends.presence import Presence
from moecomm.errors import Unsupported
from moecomm.ranks.collective import MappedWindow, open_windows
from moecomm.ranks.group import Rendezvous

_ABORT = 64  # offset of the abort word in the control memory, behind the FailureRecord


class HostPeers:
    """The Peers of CPU ranks.  Opening is collective.

    Attributes:
        more: bytes of addresses behind the memory: those asked for, or 0 where some rank can't have as many.  They
            take memory where they are written.

    Raises:
        Unsupported: there is no such memory on some rank, or it can't be passed on.
        Timeout, PeerLost, Aborted: the opening has failed on all ranks.
    """

    name = "host"
    device = torch.device("cpu")

    def __init__(self, ranks: Rendezvous, nbytes: int, timeout_s: float, more: int = 0) -> None:
        self.rank, self.in_process = ranks.rank, ranks.in_process
        with ExitStack() as undo:
            try:
                window, mapped = open_windows(ranks, nbytes + more, timeout_s)
            except Unsupported:  # `ulimit -v`, for instance
                if more == 0:
                    raise
                more = 0
                window, mapped = open_windows(ranks, nbytes, timeout_s)
            for peer in mapped:
                undo.callback(peer.close)
            self._control = _native.host_alloc(2 * _ABORT)
            self.record, self.abort_host = self._control.address, self._control.address + _ABORT
            self._presence = None if ranks.in_process else Presence(ranks, self.abort_host, timeout_s)
            undo.pop_all()
        self.pages = None if self._presence is None else self._presence.pages
        self.window: _native.HostWindow | None = window
        self._mapped: list[MappedWindow] = mapped
        self.addresses = [peer.address for peer in mapped]
        self.nbytes, self.more = nbytes, more

    def owner(self, rank: int) -> object:
        return self._mapped[rank]

    def abort(self, cause: int, culprit: int) -> None:
        _native.set_abort(self.abort_host, cause, culprit)

    def ignore(self, rank: int, ignored: bool) -> None:
        """Stop ending waits when the process of this rank ends; False: end them again."""
        if self._presence is not None:
            self._presence.ignore(rank, ignored)

    def dead_peers(self) -> dict[int, str]:
        """Return why processes of peers are lost.  Threads end with this process."""
        return {} if self._presence is None else self._presence.dead_peers()

    def close(self) -> None:
        """Leave.  Memory is unmapped with the last object that refers to its owner."""
        if self._presence is not None:
            self._presence.leave()
        self._mapped, self.window = [], None
