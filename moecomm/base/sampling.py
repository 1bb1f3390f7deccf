"""Choice of the rounds that are verified."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from moecomm import _native

_SPREAD = 0x9E3779B9  # 2^32 over the golden ratio


def hash_words(ranks: int, domains: int) -> int:
    """Return the int64 of a token's hashes in a verified combine of GPUs: CombineCall::kHashWords."""
    words = ranks + (2 * domains if domains > 1 else 0)
    return words + words % 2


def told_bytes(domain_ranks: int) -> int:
    """Return the bytes of hashes beside a sum of a domain of so many ranks: CombineCall::kToldBytes."""
    return -(-8 * (1 + domain_ranks) // 16) * 16


class RowTables(Protocol):
    """Hashes of the rows that combines of CPU ranks move, of all ranks."""

    checks: _native.RowChecks

    def combine(self, args: _native.CombineArgs) -> None:
        """Run a combine whose rows are checked.  All ranks do."""
        ...


class Sampling:
    """Chooses one of each `every` rounds of an operation, the same on every rank, because all count the same rounds.

    Its place among them changes, so that a model of some number of layers has rounds of all layers verified.

    Attributes:
        plans: the small dispatches that verify others, see moecomm/dispatch/small.py.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._counts: Counter[str] = Counter()
        self.plans: dict[tuple[str, bool, int], Any] = {}

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
