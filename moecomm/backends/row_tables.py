"""Tables of the hashes of the rows that combines of CPU ranks move, in memory outside of the windows."""

from __future__ import annotations

from contextlib import ExitStack

from moecomm import _native
from moecomm.ranks.collective import MappedWindow, all_or_none, map_windows
from moecomm.ranks.group import Rendezvous


class RowTables:
    """The tables of all ranks.  Opening is collective.

    Attributes:
        checks: what combines compare rows with.

    Raises:
        Unsupported: there is no such memory on some rank, or it can't be passed on.
        Timeout, PeerLost, Aborted: the opening has failed on all ranks.
    """

    def __init__(self, ranks: Rendezvous, shape: _native.Shape, timeout_s: float) -> None:
        with ExitStack() as undo:
            with all_or_none(ranks):
                mine = _native.HostWindow(_native.RowChecks.table_bytes(shape))
                undo.callback(mine.close)
            self._mapped: list[MappedWindow] = map_windows(ranks, mine, timeout_s)
            undo.pop_all()
        self.checks = _native.RowChecks(shape, ranks.rank, [table.address for table in self._mapped])
