"""The counters of a rank, and those of all ranks side by side: csrc/protocol/counters.h in tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from moecomm.base.protocol import DROPPED, PEER_COUNTERS, ROUNDS, SCALAR_COUNTERS

WAITS = ("header", "dispatch", "combine")  # phases of `wait_ns`
_PEERS = ("rows_from", "rows_to", "bytes_from", "bytes_to")  # before the waits
_NUMBERS = ("rounds", "retries", "dropped", "masked")


class Beside(NamedTuple):
    """Counters of a rank that are not in its window; see Stats."""

    retries: int
    masked: int


@dataclass(frozen=True)
class Stats:
    """The counters of one rank since its Buffer was opened, or since they were reset.  Tensors are int64 on the CPU.

    Attributes:
        rounds: dispatches and combines that this rank has begun, replays of graphs included.
        retries: rounds of dispatches whose rows had no room in one round and went in several.
        dropped: entries of `topk_idx` that `overflow="drop"` left out.
        masked: entries of `topk_idx` without an expert, because its rank is masked and it has no replica, or is lost
            (`shrink(keep_ids=True)`).  A call that is made again counts them again.
        rows_from: `[R]`: rows of dispatches that came from each rank, this one included: one for each of its tokens
            with an expert here.
        rows_to: `[R]`: rows that this rank sent to each rank.
        bytes_from, bytes_to: `[R]`: bytes of these rows, scales included; of a fused layer: of its tokens' rows.
        rows_per_expert: `[E/R]`: rows of each expert of this rank, without padding.
        wait_ns: `[3, R]`: nanoseconds that this rank waited for each peer, by phase (WAITS): for the peer's round
            header, for its last rows in a dispatch, for its rows in a combine.  A wait lasts from the first look at the
            peer's word that was in vain to the arrival of the word, in the clock of this rank; words that are there
            already count nothing.  A rank does not wait for itself.
    """

    rounds: int
    retries: int
    dropped: int
    masked: int
    rows_from: torch.Tensor
    rows_to: torch.Tensor
    bytes_from: torch.Tensor
    bytes_to: torch.Tensor
    rows_per_expert: torch.Tensor
    wait_ns: torch.Tensor

    @classmethod
    def of_words(cls, words: bytes, ranks: int, experts: int, beside: Beside) -> Stats:
        """Read a rank's counters.

        Args:
            words: as Session.read_counters() returns them.
            ranks: of the Buffer.
            experts: of this rank.
            beside: counters that are not in the window.
        """
        found = torch.frombuffer(bytearray(words), dtype=torch.int64)
        at_experts = SCALAR_COUNTERS + PEER_COUNTERS * ranks
        peers = found[SCALAR_COUNTERS:at_experts].view(PEER_COUNTERS, ranks)
        counts: dict[str, Any] = dict(zip(_PEERS, peers, strict=False))
        counts |= {"rows_per_expert": found[at_experts : at_experts + experts], "wait_ns": peers[len(_PEERS) :]}
        return cls(rounds=int(found[ROUNDS]), dropped=int(found[DROPPED]), **beside._asdict(), **counts)

    def lists(self) -> dict[str, Any]:
        """Return the counters as numbers and lists, for JSON; moecomm.observe.stats.reading reads them back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}

    def since(self, before: Stats) -> Stats:
        """Return what has been counted since `before`; all of it if the counters have been reset meanwhile."""
        if before.rounds > self.rounds:
            return self
        names = [field.name for field in fields(self)]
        return Stats(**{name: getattr(self, name) - getattr(before, name) for name in names})


@dataclass(frozen=True)
class JobStats:
    """The counters of all ranks of a Buffer.  Tensors are int64 on the CPU.

    Attributes:
        rounds, retries, dropped, masked: `[R]`, by rank.
        rows: `[R, R]`: rows from a source rank (first) to a destination.
        nbytes: `[R, R]`: bytes of these rows.
        rows_per_expert: `[E]`.
        wait_ns: `[3, R, R]`: by phase (WAITS), the rank that waited, and the peer that it waited for; see Stats.
        by_rank: the counters of each rank.
    """

    rounds: torch.Tensor
    retries: torch.Tensor
    dropped: torch.Tensor
    masked: torch.Tensor
    rows: torch.Tensor
    nbytes: torch.Tensor
    rows_per_expert: torch.Tensor
    wait_ns: torch.Tensor
    by_rank: tuple[Stats, ...]

    @classmethod
    def of_ranks(cls, ranks: Sequence[Stats]) -> JobStats:
        """Put the counters of all ranks side by side, in order of ranks."""
        return cls(
            **{name: torch.tensor([getattr(stats, name) for stats in ranks]) for name in _NUMBERS},
            rows=torch.stack([stats.rows_to for stats in ranks]),
            nbytes=torch.stack([stats.bytes_to for stats in ranks]),
            rows_per_expert=torch.cat([stats.rows_per_expert for stats in ranks]),
            wait_ns=torch.stack([stats.wait_ns for stats in ranks], dim=1),
            by_rank=tuple(ranks),
        )
