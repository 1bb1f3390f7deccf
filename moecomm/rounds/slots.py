"""Slots: the placement that rounds follow, and the state of each slot of this rank."""

from __future__ import annotations

from collections.abc import Collection

from moecomm.base.placement import NONE, Placement, Table, table
from moecomm.base.protocol import BALANCED, BY_TABLE, DIGEST_BITS
from moecomm.ranks.session import Session


class Slots:
    """The slots of a Buffer with a placement.

    Attributes:
        placement: the placement that rounds follow from now on.
        generation: number of the placement, from 1; round headers carry it.
        filled: for each slot of this rank that was written, the first generation for which its weights are valid: see
            moecomm.membership.placing.left().
        reserved: empty slots that layers copy no experts to, because they are being filled.
        copied: True once layers copy experts to empty slots, which replays of captured graphs do, too.

    Args:
        session: of this rank.
        domain_ranks: number of ranks in a domain.
        placement: the first placement.
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
        """Return the table of a placement for rounds while no rank is masked and no slot is reserved."""
        return table(placement, self._rank, self._domain_ranks, ())

    def place(self, placement: Placement, masked: Collection[int] = (), made: Table | None = None) -> None:
        """Write the table of a placement, for rounds from now on.  Does not wait for the device.

        Args:
            placement: of the current generation.
            masked: ranks that take no part.
            made: the table from table_of(), if it has been made.
        """
        empty, words = made or table(placement, self._rank, self._domain_ranks, masked, self.reserved)
        self.placement = placement
        head = self.generation, placement.num_experts, placement.digest % (1 << DIGEST_BITS), empty
        self._session.place([*head, *words])

    def reserve(self, slots: Collection[int], masked: Collection[int]) -> None:
        """Keep layers from copying experts to these slots from now on, also in replays of graphs.

        Changes the generation, so ranks that reserve slots between different rounds raise Mismatch.
        """
        if not self.reserved.issuperset(slots):
            self.reserved, self.generation = self.reserved.union(slots), self.generation + 1
            self.place(self.placement, masked)

    def note_copies(self) -> None:
        """Record that layers write empty slots from now on: weights of older placements there are lost."""
        self.copied = True
        for slot, expert in enumerate(self.placement.held[self._rank]):
            if expert == NONE:
                self.filled[slot] = self.generation
