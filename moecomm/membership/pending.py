"""Pending masks: ranks that one rank alone wants masked or taken in again, until all agree on that.

Engines change masks on each rank alone, between two steps.  The rank's own view changes at once.  Its next dispatch
begins an agreement, as Buffer.mask() and unmask() hold it.  Ranks that want nothing meet it in that dispatch: they are
interrupted there, agree, and dispatch again.
"""

from __future__ import annotations

from moecomm.errors import Aborted
from moecomm.membership.masking import Masking, is_masked
from moecomm.membership.meeting import ALONE
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import CollectiveCall


class PendingMasks:
    """The masks of one rank of a Buffer that masks by itself.

    Args:
        rounds: of the Buffer.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._wanted: dict[int, bool] = {}  # by rank: masked or not

    def want(self, rank: int, masked: bool) -> None:
        """Mask a rank, or take it in again, in this rank's view.  Repeats change nothing; the last word counts.

        This rank comes back only if it is masked now: others may mask it before its next dispatch, and mean that.
        """
        if rank != self._rounds.rank or self._rounds.session.excluded():
            self._wanted[rank] = masked

    def want_all(self) -> None:
        """Take all ranks in again, this one as well."""
        for rank in range(self._rounds.num_ranks):
            self.want(rank, False)

    def view(self) -> set[int]:
        """Return the ranks that are masked in this rank's view."""
        kept = self._rounds.masked - self._wanted.keys()
        return set(kept).union(rank for rank, masked in self._wanted.items() if masked)

    def is_apart(self) -> bool:
        """Return whether this rank masks all others in its view, of which some take part and live."""
        rounds = self._rounds
        others = set(range(rounds.num_ranks)) - {rounds.rank}
        if not self._wanted or not others <= self.view():
            return False
        pages = rounds.session.pages
        return bool(others - rounds.masked - rounds.session.dead_peers().keys() - (pages.left() if pages else set()))

    def agree(self) -> None:
        """Agree on this rank's view ahead of a dispatch.  Collective among the ranks that take part and come back.

        A rank that does not come back within the Buffer's `timeout_s` stays masked, with a warning.  Nothing happens
        in a capture, or if this rank wants nothing else than what ranks have agreed on.

        Raises:
            Aborted: other ranks have failed in other calls.  The next call works.
            As Masking.hold().
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
