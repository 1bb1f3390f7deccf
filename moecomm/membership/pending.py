"""Pending masks: ranks that one rank alone wants masked or taken in again, until all agree on that.

Each rank of an engine changes masks alone, between two steps.  Its own view changes at once.  Its next dispatch begins
an agreement like that of Buffer.mask() and unmask().  Ranks that want nothing are interrupted in that dispatch, and
agree.  CPU ranks then dispatch again; GPU ranks, which do not wait in a dispatch, raise an error in a later call.
"""

from __future__ import annotations

from moecomm.errors import Aborted
from moecomm.membership.masking import Masking, is_masked
from moecomm.membership.meeting import ALONE
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import CollectiveCall


class PendingMasks:
    """The pending masks of one rank, for a Buffer with on_timeout="mask".

    Args:
        rounds: of the Buffer.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._wanted: dict[int, bool] = {}  # by rank: True to mask it

    def want(self, rank: int, masked: bool) -> None:
        """Mask a rank, or take it in again, in this rank's view.  Idempotent; the last call for a rank counts.

        For this rank itself, a call counts only if it is masked now: a mask that others agree on later must stand.
        """
        if rank != self._rounds.rank or self._rounds.session.excluded():
            self._wanted[rank] = masked

    def want_all(self) -> None:
        """Take all ranks in again, this one too."""
        for rank in range(self._rounds.num_ranks):
            self.want(rank, False)

    def view(self) -> set[int]:
        """Return the ranks that are masked in this rank's view."""
        kept = self._rounds.masked - self._wanted.keys()
        return set(kept).union(rank for rank, masked in self._wanted.items() if masked)

    def is_apart(self) -> bool:
        """Return whether this rank's view masks all others, although some of them take part and are alive."""
        rounds = self._rounds
        others = set(range(rounds.num_ranks)) - {rounds.rank}
        if not self._wanted or not others <= self.view():
            return False
        pages = rounds.session.pages
        return bool(others - rounds.masked - rounds.session.dead_peers().keys() - (pages.left() if pages else set()))

    def agree(self) -> None:
        """Agree on this rank's view ahead of a dispatch.  Collective among the ranks that take part and come back.

        A rank that does not come back within the Buffer's `timeout_s` stays masked, with a warning.  Does nothing in a
        capture, or if this rank's view is what ranks have agreed on.

        Raises:
            Aborted: another rank has failed in another call.  The next call works.
            MemoryReleased, and others: as Masking and its hold().
        """
        if not self._wanted or self._rounds.session.capturing():
            return
        rounds = self._rounds
        with CollectiveCall(rounds, 0):
            wanted = self._wanted
            changes = {rank for rank, masked in wanted.items() if is_masked(rounds, rank) != masked}
            named = {rank for rank in changes if wanted[rank]}
            masking = Masking(rounds, ALONE, named, changes - named)
            self._wanted = {}
            if not changes:
                return
            agreed = masking.hold()
            if not agreed.repeats and rounds.rank not in changes:
                text = "ranks have agreed on masks, but another one has failed in another call; the next call works"
                raise Aborted(text, rank=rounds.rank, peer=-1, phase="agreement", op="mask", round=0)
