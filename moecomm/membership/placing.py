"""Placements of an open Buffer: ranks agree on the next one, and on which of two goes on after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moecomm.base.placement import Placement, checked, of_ranks, with_slots
from moecomm.errors import BadInput
from moecomm.membership.suspension import agreement, refuse_capture
from moecomm.ranks.opening import Opening
from moecomm.ranks.settings import compare
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import collective


@collective(rounds=0)
def set_placement(rounds: Rounds, placement: Placement) -> None:
    """See Buffer.set_placement."""
    rounds.require_usable()
    given, before = checked(placement), rounds.placement
    if before is None:
        raise BadInput("placement", "one for a Buffer without", "a Buffer that was opened with a placement")
    if given is None:
        raise BadInput("placement", "None", "a moecomm.Placement")
    if (given.ranks, given.num_experts) != (before.ranks, before.num_experts):
        want = f"one of {before.num_experts} experts on {before.ranks} ranks"
        raise BadInput("placement", repr(given), want)
    if "balanced" in {given.choice, before.choice} and given.choice != before.choice:
        raise BadInput("placement", repr(given), f"choice={before.choice!r}, as the Buffer was opened")
    placed = with_slots(given, len(rounds.local_experts))
    if rounds.masked:
        raise BadInput("set_placement", f"masked ranks {sorted(rounds.masked)}", "no masked rank: all take part")
    refuse_capture(rounds, "set_placement")
    with agreement(rounds, "set_placement") as ranks:
        compare(ranks, {"placement": placed.digest}, rounds.settings.backend, lambda _, digest: f"{digest:#x}")
        rounds.next_placement = placed
        rounds.session.synchronize()
        rounds.raise_failure()
        ranks.all_gather(b"")  # no rank is in a round any more, and none begins one
        rounds.generation += 1
        rounds.place(placed)
        _make_room(rounds, placed)
        ranks.settle()
        rounds.next_placement = None


def _make_room(rounds: Rounds, placed: Placement) -> None:
    """Let rounds make room for rows on ranks that had no expert.  All ranks decide alike, as one drops for the others.

    Other changes leave the room as it is, so that compiled layers keep their shapes.
    """
    settings = replace(rounds.settings, placement=placed)
    if any(held and not before for held, before in zip(settings.held, rounds.settings.held, strict=True)):
        rounds.settings = settings
        rounds.plans.clear()


def left(ranks: Opening, rounds: Rounds, stay: Sequence[int]) -> Placement | None:
    """Return what ranks that are left hold, of the newest placement that any of them has.  Collective.

    Experts whose ranks are all lost have no slot in it.
    """
    if rounds.placement is None:
        return None
    found = [int.from_bytes(data, "little") for data in ranks.all_gather(rounds.generation.to_bytes(8, "little"))]
    newest = rounds.placement
    if rounds.generation < max(found):
        assert rounds.next_placement is not None, "no rank places one before all have agreed on it"
        newest = rounds.next_placement
    return of_ranks(newest, stay)
