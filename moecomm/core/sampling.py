"""Which rounds are verified."""

from __future__ import annotations

from typing import Any, Protocol

from moecomm import _native


class RowTables(Protocol):
    """moecomm.backends.row_tables.RowTables."""

    checks: _native.RowChecks


class Sampling:
    """Chooses one of `every` rounds, the same on every rank, because all ranks make the same calls.

    Attributes:
        plans: the small dispatches that verify others, see moecomm/dispatch/small.py.
    """

    def __init__(self, every: int) -> None:
        self._every, self._count = every, 0
        self.plans: dict[tuple[str, bool], Any] = {}

    def due(self, capturing: bool) -> bool:
        """Count a round, and return whether it is verified.

        A replay can't count: captured rounds are verified if all are.
        """
        self._count += 1
        return self._every == 1 if capturing else self._count % self._every == 0
