"""The form of counters in files (Stats.lists), which may come from anywhere."""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch

from moecomm.base.protocol import MAX_HOST_RANKS
from moecomm.observe.stats.counters import WAITS, Stats

Whole = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_HOST_RANKS)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_HOST_RANKS)]
_ByRank = list[Whole]


class Counters(msgspec.Struct):
    """The counters of a rank as numbers and lists; see Stats."""

    rounds: Whole
    retries: Whole
    dropped: Whole
    masked: Whole
    rows_from: _ByRank
    rows_to: _ByRank
    bytes_from: _ByRank
    bytes_to: _ByRank
    rows_per_expert: list[Whole]
    wait_ns: list[_ByRank]

    def stats(self, ranks: int) -> Stats:
        """Return the counters of a rank of so many.  Raises ValueError for those of another number."""
        for name in ("rows_from", "rows_to", "bytes_from", "bytes_to"):
            if len(getattr(self, name)) != ranks:
                raise ValueError(f"{name} is not of {ranks} ranks")
        if [len(waits) for waits in self.wait_ns] != [ranks] * len(WAITS):
            raise ValueError(f"wait_ns is not of {len(WAITS)} phases and {ranks} ranks")
        found = msgspec.structs.asdict(self)
        tensors = {n: torch.tensor(v, dtype=torch.int64) for n, v in found.items() if isinstance(v, list)}
        return Stats(**{**found, **tensors})


class Sample(msgspec.Struct):
    """Counters at one moment, wall clock."""

    time_ns: Whole
    stats: Counters
