"""Bytes of rows on the wire, inside a domain and between domains, and their packets."""

from __future__ import annotations

from functools import lru_cache

from moecomm.base import packets
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


@lru_cache(maxsize=1024)
def packets_of(operation: Operation, row_bytes: int, topk: int) -> packets.Packets | None:
    """Return how a row is cut into packets."""
    if operation.what == "combine":
        return packets.of_combine(row_bytes)
    return packets.of_dispatch(-(-row_bytes // _PADDING) * _PADDING, 0, topk)


def carries(operation: Operation, row_bytes: int, tokens: float, topk: int, ranks: int) -> bool:
    """Return True if so many tokens of a rank travel in packets inside one domain of so many ranks."""
    cut = packets_of(operation, row_bytes, topk)
    # A Buffer for many tokens: its room is bounded by packets.room alone.
    return cut is not None and cut.carry(int(tokens), topk, packets.room(ranks, 1 << 20, 4 * row_bytes))


def runs(tokens: float, chunk_tokens: float, wanted: float) -> float:
    """Return the expected puts of a rank to one forwarder: runs of consecutive tokens that want its domain.

    A chunk ends a run. `wanted` is the probability that a token wants the domain.
    """
    chunks = max(1.0, tokens / chunk_tokens) if tokens else 0.0
    return chunks * wanted + (tokens - chunks) * wanted * (1 - wanted)
