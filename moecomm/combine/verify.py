"""Verified combines of CPU ranks.

The executor hashes each reduced row where it is stored, and again where it has arrived, before it is added up
(csrc/host/row_checks.h).  Hashes lie in memory outside of the windows.  A dispatch of one token then tells all ranks
what was found: see moecomm/core/corruption.py.
"""

from __future__ import annotations

from typing import cast

import torch

from moecomm.backends.host import HostSession
from moecomm.combine.plan import Combining
from moecomm.core import corruption
from moecomm.core.rounds import Rounds
from moecomm.core.sampling import RowTables
from moecomm.dispatch.verify import Verdict, failed


def checked(rounds: Rounds, combining: Combining) -> CombineCheck | None:
    """Return the check of a prepared combine that is verified; None for others, and on GPUs."""
    assert rounds.sampling is not None, "rounds are verified"
    if not rounds.sampling.due("combine", rounds.session.capturing()) or rounds.row_tables is None:
        return None
    return CombineCheck(rounds, combining, rounds.row_tables)


class CombineCheck:
    """The check of one combine."""

    def __init__(self, rounds: Rounds, combining: Combining, tables: RowTables) -> None:
        self._rounds, self._combining, self._checks = rounds, combining, tables.checks
        self._verdict = Verdict(rounds, "combine")

    def run(self) -> None:
        """Run the combine, and say what was found."""
        rounds, combining = self._rounds, self._combining
        record = combining.plan.record(combining.args)
        cast("HostSession", rounds.session).combine_checked(combining.args, self._checks)
        rounds.flight.end(record)
        if failed(rounds):
            return
        if (row := self._checks.take()) is not None:
            source, token_rank, token = row
            bits = corruption.row_bits(torch.tensor(source), torch.tensor(token_rank * rounds.max_tokens + token))
            self._verdict.say(torch.tensor(True), bits)
        self._verdict.run()
