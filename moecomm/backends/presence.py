"""Who is there: a peer's process that dies ends our waits for it, unless it had said that it leaves."""

from __future__ import annotations

import os
import time

from moecomm import _native
from moecomm.backends.collective import all_or_none, map_windows
from moecomm.rendezvous import Rendezvous

_NAP_S = 1e-3


class Presence:
    """Watches the processes of the other ranks, all on this host.  Collective to make.

    A rank that closes its Buffer and ends may be done with a round that others are still in, with all they need of it
    in windows that outlive it.  So every rank has a page that all see, and says there that it leaves.
    """

    def __init__(self, ranks: Rendezvous, abort_address: int, timeout_s: float) -> None:
        with all_or_none(ranks):
            self._page = _native.HostWindow(4096)
        self._pages = map_windows(ranks, self._page, timeout_s)
        pids = [int.from_bytes(pid, "little") for pid in ranks.all_gather(os.getpid().to_bytes(8, "little"))]
        left = [page.address for page in self._pages]
        self._watcher = _native.Watcher(pids, ranks.rank, abort_address, left=left)

    def dead_peers(self) -> dict[int, str]:
        """Ranks whose process has ended without a word, and that it has."""
        return dict.fromkeys(self._watcher.dead(), "its process has ended")

    def leave(self, linger_s: float = 0) -> None:
        """Our process may end from now on, and we watch no longer.

        `linger_s`: how long to wait until all others have left, too, or died.
        """
        _native.store_word(self._page.address, 1)
        deadline = time.monotonic() + linger_s
        while time.monotonic() < deadline and not self._alone():
            time.sleep(_NAP_S)
        self._watcher.close()
        for page in self._pages:
            page.close()

    def _alone(self) -> bool:
        dead = self.dead_peers()
        return all(rank in dead or _native.read_word(page.address) != 0 for rank, page in enumerate(self._pages))
