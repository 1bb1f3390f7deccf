"""Presence of peers: a peer's process that dies ends the waits for it, unless the peer has announced that it leaves."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack

from moecomm import _native
from moecomm.base.processes import exit_error, pid_namespace, pidfd
from moecomm.errors import Unsupported
from moecomm.ranks.collective import MappedWindow, open_windows, share_descriptor
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.pages import LEFT, PAGE_BYTES, Pages
from moecomm.rounds.flight import shown

log = logging.getLogger("moecomm")
_NAP_S = 1e-3
_NO_LATER_ROUND = (1 << 32) - 1


class Presence:
    """Watch the processes of the other ranks, all on this host.  Making one is collective.

    A rank that closes its Buffer and ends may have finished a round that peers are still in; all they need of it is in
    windows that outlive it.  So every rank has a page that all see, and announces there that it leaves.

    Attributes:
        pages: these pages, over which ranks that are left agree how to go on.
    """

    def __init__(self, ranks: Rendezvous, abort_address: int, timeout_s: float) -> None:
        self._left = False
        with ExitStack() as undo:
            self._page, self._mapped = open_windows(ranks, PAGE_BYTES, timeout_s)
            undo.callback(_close_all, self._mapped)
            pids, passed = _processes(ranks, timeout_s)
            addresses = [page.address for page in self._mapped]
            self.pages = Pages(addresses, ranks.rank)
            left = [address + LEFT for address in addresses]
            try:
                self._watcher = _native.Watcher(pids, ranks.rank, abort_address, left=left, passed=passed)
            except RuntimeError as error:
                raise Unsupported(f"a thread that watches the processes of the other ranks: {error}") from error
            undo.pop_all()

    def dead_peers(self) -> dict[int, str]:
        """Return the ranks whose process has ended without announcing it, and the reason."""
        return dict.fromkeys(self._watcher.dead(), "its process has ended")

    def ignore(self, rank: int, ignored: bool) -> None:
        """Stop ending waits when the process of this rank ends; False: end them again."""
        self._watcher.ignore(rank, ignored)

    def leave(self, linger_s: float = 0) -> None:
        """Announce that this process may end, and stop watching.

        `linger_s`: how long to wait until all peers have left, too, or died.
        """
        if not self._left:
            leave_exit_error(self.pages)
            _native.store_word(self._page.address + LEFT, 1)
            deadline = time.monotonic() + linger_s
            while time.monotonic() < deadline and not self._alone():
                time.sleep(_NAP_S)
            self._watcher.close()
            self._left = True  # an interrupt may come anywhere: from here on, pages may be gone
        _close_all(self._mapped)

    def _alone(self) -> bool:
        dead = self.dead_peers()
        return len(self.pages.left() | dead.keys()) == len(self._mapped)


def leave_exit_error(pages: Pages | None) -> None:
    """Leave the exception that ends this process in its page, before any word says that this rank has left."""
    if pages is not None and (error := exit_error()) is not None:
        pages.leave_error(shown(error), _NO_LATER_ROUND)


def _close_all(pages: list[MappedWindow]) -> None:
    for page in pages:
        page.close()


def _processes(ranks: Rendezvous, timeout_s: float) -> tuple[list[int], list[int]]:
    """Return process ids by rank, 0: invalid here; and pidfds by rank, -1: none.  Collective.

    Each rank passes a pidfd of itself, because its process id is different in another PID namespace.
    """
    own = pidfd(os.getpid())
    with ExitStack() as undo:
        if own is not None:
            undo.callback(os.close, own)
        here = pid_namespace()
        everybody = ranks.all_gather(bytes([own is not None]) + os.getpid().to_bytes(4, "little") + here)
        pids = [int.from_bytes(data[1:5], "little") if data[5:] == here else 0 for data in everybody]
        if own is not None and all(data[0] for data in everybody):
            return pids, share_descriptor(ranks, own, timeout_s)
    if unseen := [rank for rank, pid in enumerate(pids) if pid == 0]:
        log.warning(
            "rank %d: without pidfds on all ranks, the death of ranks %s, in other PID namespaces, is noticed at the "
            "deadline only",
            ranks.rank,
            unseen,
        )
    return pids, []
