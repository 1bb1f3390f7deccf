"""Bytes of rows on the wire, inside a domain and between domains, and their packets."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from moecomm.base import packets
from moecomm_bench import stored
from moecomm_bench.case import RoundsCase
from moecomm_bench.ours import FP32_WIRE
from moecomm_bench.simulate.domain import Operation
from moecomm_bench.simulate.routing import Spread

_HEAD, _ENTRY, _LANES = 16, 8, 4  # csrc/protocol/domains.h: ReceivedHead, Entry, a flat row for each rank of the domain
HEADER_WORDS = 24  # of 8 bytes: a RoundHeader as tagged words
_PADDING = 16


def bytes_of(operation: Operation, payload: str, hidden: int, single: float = 0.0) -> int:
    """Return the mean bytes of a row inside a domain, scales included, without its metadata (RoundsCase.beside_bytes).

    `exact` rows: a rank's only row of a token as it is, a sum of several in float32. `single` is the fraction of the
    former (`Spread.single`).
    """
    if operation.what == "combine":
        return round((2 - single if operation.variant == FP32_WIRE else 1) * 2 * hidden)
    return RoundsCase("", hidden, 1, 1, 1, "host", [], [], [], [], "").row_bytes(payload)


def slow_bytes_of(operation: Operation, payload: str, hidden: int, wire: str = "bf16") -> int:
    """Return the bytes of a row that a forwarder puts to another domain.

    A domain's sums have the dtype of y (`wire` bf16), or are float32 however many rows they add.
    """
    if operation.what == "combine":
        exact = operation.variant == FP32_WIRE or (operation.layout == "flat" and wire == "fp32")
        return (4 if exact else 2) * hidden
    return bytes_of(operation, payload, hidden)


def head_bytes(topk: int, domain_ranks: int) -> int:
    """Return the bytes beside a token that is put to another domain."""
    return _HEAD + -(-(topk * _ENTRY + domain_ranks * _LANES) // _PADDING) * _PADDING


def header_bytes(operation: Operation, spread: Spread) -> int:
    """Return the bytes of the tagged words that a rank puts to one rank of another domain."""
    return 8 * (HEADER_WORDS + (words_of(operation, spread) // len(spread.ranks)))


def words_of(operation: Operation, spread: Spread) -> int:
    """Return the tagged words that every block reads: in a dispatch the counts of all ranks by expert and by rank, in a
    combine a header of each rank.
    """
    ranks = len(spread.ranks)
    return ranks * (spread.experts + ranks) if operation.what == "dispatch" else ranks


class Lines(NamedTuple):
    """The packets of a row, and the mean bytes that kernels store for it: its lines of 128 bytes."""

    cut: packets.Packets
    nbytes: float

    def carry(self, tokens: float, topk: int, ranks: int) -> bool:
        """Return whether so many tokens of a rank travel in packets inside one domain of so many ranks."""
        # A Buffer for many tokens: its room is bounded by packets.room alone.
        return self.cut.carry(int(tokens), topk, packets.room(ranks, 1 << 20, 4 * self.cut.token_bytes))


@lru_cache(maxsize=1024)
def lines_of(
    operation: Operation, payload: str, hidden: int, topk: int, single: float = 0.0, *, whole: bool = False
) -> Lines | None:
    """Return the lines of a row inside a domain; None if it can't be cut into packets.

    `single`: see bytes_of().  `whole`: as before commit c60f014f, when all packets of a row were equally long.
    """
    flat = operation.layout == "flat"
    if operation.what == "dispatch":
        if (row := stored.row_of(payload, hidden, topk)) is None:
            return None
        return Lines(row.cut, row.cut.token_bytes if whole else stored.dispatch_bytes(*row, topk, flat=flat))
    exact = operation.variant == FP32_WIRE and not flat
    row_bytes = (4 if exact else 2) * hidden
    cut = packets.of_combine(row_bytes)
    sums = cut.token_bytes if whole else stored.combine_bytes(cut, row_bytes, exact=exact)
    return Lines(cut, single * stored.single_bytes(cut) + (1 - single) * sums if exact else sums)


def runs(tokens: float, chunk_tokens: float, wanted: float) -> float:
    """Return the expected puts of a rank to one forwarder: runs of consecutive tokens that want its domain.

    A chunk ends a run. `wanted` is the probability that a token wants the domain.
    """
    chunks = max(1.0, tokens / chunk_tokens) if tokens else 0.0
    return chunks * wanted + (tokens - chunks) * wanted * (1 - wanted)
