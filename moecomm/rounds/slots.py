"""Slots: the placement that rounds follow, and the state of each slot of this rank."""

from __future__ import annotations

from collections.abc import Collection

from moecomm.base.placement import NONE, Placement, Table, table
from moecomm.base.protocol import BALANCED, BY_TABLE, DIGEST_BITS
from moecomm.ranks.session import Session


class Slots:
    """The slots of a Buffer with a placement.

    Attributes:
        placement: that rounds follow from now on.
        generation: number of the placement, from 1; round headers carry it.
        filled: by slot of this rank, the generation from which on its weights are those of its expert: see
            moecomm.membership.placing.left().
        reserved: empty slots that get no copies, because they are being filled.
        copied: layers copy experts to empty slots, also in replays of captured graphs.

    Args:
        session: of this rank.
        domain_ranks: neighbouring ranks that load from each other and store to each other.
        placement: at first.
    """

    def __init__(self, session: Session, domain_ranks: int, placement: Placement) -> None:
        self._session, self._rank, self._domain_ranks = session, session.context.rank, domain_ranks
        self.placement, self.generation = placement, 1
        self.filled: dict[int, int] = {}
        self.reserved: frozenset[int] = frozenset()
        self.copied = False
        session.context.placed = BALANCED if placement.choice == "balanced" else BY_TABLE
        self.place(placement)
        session.synchronize()

    def table_of(self, placement: Placement) -> Table:
        """Return the table by which rounds follow a placement while no rank is masked and no slot reserved."""
        return table(placement, self._rank, self._domain_ranks, ())

    def place(self, placement: Placement, masked: Collection[int] = (), made: Table | None = None) -> None:
        """Write the table of a placement, for rounds from now on.  Does not wait for the device.

        Args:
            placement: of the present generation.
            masked: ranks that take no part.
            made: see table_of().
        """
        empty, words = made or table(placement, self._rank, self._domain_ranks, masked, self.reserved)
        self.placement = placement
        head = self.generation, placement.num_experts, placement.digest % (1 << DIGEST_BITS), empty
        self._session.place([*head, *words])

    def reserve(self, slots: Collection[int], masked: Collection[int]) -> None:
        """Let no layer copy experts to these slots from now on, also in replays of graphs.

        A change of generation, so that ranks which reserve them between other rounds raise Mismatch.
        """
        if not self.reserved.issuperset(slots):
            self.reserved, self.generation = self.reserved.union(slots), self.generation + 1
            self.place(self.placement, masked)

    def note_copies(self) -> None:
        """Note that layers write slots that are empty in this generation, where older placements had weights."""
        self.copied = True
        for slot, expert in enumerate(self.placement.held[self._rank]):
            if expert == NONE:
                self.filled[slot] = self.generation
