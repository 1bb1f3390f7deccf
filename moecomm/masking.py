"""Masks of a Buffer: ranks that take no part in its rounds, which go on in the same windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moecomm.base.integers import is_integer
from moecomm.errors import BadInput, RoundFailed
from moecomm.membership import masking
from moecomm.membership.suspension import Members
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import CollectiveCall
from moecomm.routed import Handle


class MaskableRanks:
    """The part of a Buffer that masks ranks."""

    rounds: Rounds
    _members: Members

    def mask(self, ranks: Iterable[int] | None = None, *, replicas: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """Go on without some ranks, in the same windows.  Collective among the ranks that stay.

        Nobody waits for a masked rank.  Ids of its experts mean their replicas or, without one, count as -1: their part
        of the sums is missing.  Numbers of ranks and experts, shapes and addresses stay as they are.  Handles of
        earlier dispatches can't be used any more, and a dispatch_begin() without its end is forgotten.

        The masked rank raises Excluded at its next call.  If it and its whole domain are masked over a network, nobody
        can tell it: its next round raises Timeout.  A rank that is masked while it is in a round may write to the
        windows until it notices; shrink(), which opens others, has no such risk.

        Args:
            ranks: to mask, beside those that are masked already.  None: after PeerLost or Timeout, agree on who is lost
                as in shrink(), and mask these.  Empty: set `replicas` on this rank, and do nothing else.
            replicas: another expert for an expert id, used while the rank of the first is masked.  A replica whose rank
                is masked, too, is replaced by its own.  None: those given before.

        Returns:
            The ranks that are masked now.

        Raises:
            Excluded: the others go on without this rank.
            BadInput: a call during a capture; ranks or replicas that can't be used.
            Mismatch: another rank calls shrink(); nothing has changed.
            MemoryReleased: restore() comes first; after a loss only shrink() goes on.
            Timeout, PeerLost: there is nothing over which the ranks could agree.
            Closed, ConcurrentCall: as everywhere.
        """
        rounds = self.rounds
        named = None if ranks is None else _checked(rounds, ranks)
        if named is not None and rounds.rank in named:
            raise BadInput("ranks", f"this rank, {rounds.rank}", "others: the ranks that stay call mask()")
        with CollectiveCall(rounds, 0):
            if replicas is not None:
                rounds.replicas = masking.checked_replicas(rounds, replicas)
            if named is not None and not named:
                masking.update_experts(rounds)
            else:
                masking.Masking(rounds, self._members, "mask()", named or ()).hold()
        return self.masked

    def unmask(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Take masked ranks in again.  Collective among the ranks that take part and these, which call it, too.

        The experts of these ranks are there again; their weights are the caller's business.  Handles are as in mask().

        Args:
            ranks: to take in; alike on all ranks.

        Returns:
            The ranks that are masked now.

        Raises:
            PeerLost, Timeout: one of the ranks did not come, and stays masked; the Buffer can be used.  On a masked
                rank: no other one called unmask().
            Excluded, BadInput, Mismatch, MemoryReleased, Closed, ConcurrentCall: see mask().
        """
        rounds = self.rounds
        joining = _checked(rounds, ranks)
        with CollectiveCall(rounds, 0):
            agreement = masking.Masking(rounds, self._members, "unmask()", joining=joining)
            agreement.hold()
            agreement.require_joined()
        return self.masked

    @property
    def masked(self) -> tuple[int, ...]:
        """The ranks that take no part in rounds."""
        return tuple(sorted(self.rounds.masked))


def is_masked(buffer: MaskableRanks, rank: int) -> bool:
    """Return whether a rank takes no part in the rounds of a Buffer.  Of this one, its window says so: reads memory of
    the device.
    """
    if rank != buffer.rounds.rank:
        return rank in buffer.rounds.masked
    return buffer.rounds.session.excluded()


def require_repeats(error: RoundFailed, handle: Handle | None = None) -> None:
    """Raise the error of a call, unless all ranks that are left make it again: Buffer(on_timeout="mask").

    `handle`: of the call, which can't be used after a mask.
    """
    if not error.repeats or handle is not None:
        raise error


def _checked(rounds: Rounds, ranks: Iterable[int]) -> set[int]:
    want = f"ranks, 0 to {rounds.num_ranks - 1}"
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, Mapping)):
        raise BadInput("ranks", type(ranks).__name__, want)
    try:
        found = list(ranks)
    except TypeError as error:  # a tensor without dimensions
        raise BadInput("ranks", type(ranks).__name__, want) from error
    if wrong := [rank for rank in found if not (is_integer(rank) and 0 <= rank < rounds.num_ranks)]:
        raise BadInput("ranks", wrong[0], want)
    return {int(rank) for rank in found}
