"""Choice of the rounds that are verified."""

from __future__ import annotations

from collections import Counter

from moecomm.ranks.session import RowTables

_SPREAD = 0x9E3779B9  # 2^32 over the golden ratio


class Sampling:
    """Choice of one of each `every` rounds of an operation, the same on every rank, as all count the same rounds.

    Its place among the rounds changes, so that a model of some number of layers has rounds of all layers verified.

    Attributes:
        tables: hashes of the rows that combines of CPU ranks move; None on GPUs.
    """

    def __init__(self, every: int, tables: RowTables | None = None) -> None:
        self._every, self.tables = every, tables
        self._counts: Counter[str] = Counter()

    def due(self, op: str, capturing: bool) -> bool:
        """Count a round, and return whether it is verified.

        A replay can't count: captured rounds are verified if all are.
        """
        turn, place = divmod(self._counts[op], self._every)
        self._counts[op] += 1
        if capturing:
            return self._every == 1
        return place == ((turn + 1) * _SPREAD % (1 << 32)) * self._every >> 32

    def forget(self, op: str) -> None:
        """Take back the count of a round that is not made after all."""
        self._counts[op] -= 1

    def restart(self) -> None:
        """Count from the start: ranks that have made other rounds go on together."""
        self._counts.clear()
