"""Placements of an open Buffer: its next one, and the one with which ranks go on after a loss.

Ranks do not meet for a change: each makes it between the same two of its rounds, and the header of a dispatch says
which placement its rank has.  A rank that is ahead has made changes that others have not come to.  After a loss, all
go back to the oldest placement that any of them has: weights of a later one may be missing somewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moecomm.base.placement import NONE, Placement, Table, of_ranks, successor, unchecked
from moecomm.errors import BadInput
from moecomm.membership.suspension import refuse_capture
from moecomm.ranks import messages
from moecomm.ranks.messages import Placed
from moecomm.ranks.opening import Opening
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.slots import Slots
from moecomm.rounds.state import collective


@collective(rounds=0)
def set_placement(rounds: Rounds, placement: Placement, table: Table | None = None) -> None:
    """Replace the placement: Buffer.set_placement().  `table`: that of Slots.table_of(), if it has been made."""
    rounds.require_usable()
    if (slots := rounds.slots) is None:
        raise BadInput("placement", "one for a Buffer without", "a Buffer that was opened with a placement")
    placed = successor("placement", slots.placement, placement)
    if rounds.masked:
        raise BadInput("set_placement", f"masked ranks {sorted(rounds.masked)}", "no masked rank: all take part")
    refuse_capture(rounds, "set_placement")
    slots.generation += 1
    slots.place(placed, made=table)
    if slots.copied:
        slots.note_copies()
    _make_room(rounds, placed)


def _make_room(rounds: Rounds, placed: Placement) -> None:
    """Let rounds make room for rows on ranks that had no expert.

    All ranks decide alike: overflow="drop" works out the room of every rank.

    Other changes leave the room as it is, so that compiled layers keep their shapes.
    """
    if all(rounds.settings.held):
        return
    settings = replace(rounds.settings, placement=placed)
    if any(held and not before for held, before in zip(settings.held, rounds.settings.held, strict=True)):
        rounds.settings = settings
        rounds.plans.clear()


def left(ranks: Opening, slots: Slots, stay: Sequence[int]) -> Placement:
    """Return the placement of the remaining ranks, by the oldest placement that any of them has.  Collective.

    Experts whose ranks are all lost have no slot in it, nor has one whose weights a rank ahead may have replaced.

    Args:
        ranks: that are left.
        slots: of the Buffer so far.
        stay: the numbers of `ranks` so far.
    """
    placement, own = slots.placement, slots.generation.to_bytes(8, "little")
    found = [int.from_bytes(data, "little") for data in ranks.all_gather(own)]
    oldest = min(found)
    if max(found) == oldest:
        return of_ranks(placement, stay)
    mine = Placed([], placement.choice, sorted(slot for slot, since in slots.filled.items() if since > oldest))
    if ranks.rank == found.index(oldest):
        mine = mine._replace(experts=[list(one) for one in placement.held])
    everybody = [messages.unpack(data, Placed) for data in ranks.all_gather(messages.pack(mine))]
    of_oldest = everybody[found.index(oldest)]
    held = [
        [NONE if slot in one.replaced else expert for slot, expert in enumerate(of_oldest.experts[rank])]
        for rank, one in zip(stay, everybody, strict=True)
    ]
    return unchecked(placement, held, of_oldest.choice)
