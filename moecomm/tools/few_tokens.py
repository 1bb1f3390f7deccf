"""The most tokens that travel in packets between GPUs, by ranks: part of the doctor's report and of the documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moecomm import backends
from moecomm.core import packets
from moecomm.core.settings import Settings

RANKS = (4, 8, 16, 32, 64)
HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 7168, 256, 8, 4096  # DeepSeek-V3
_BF16, _FP32 = HIDDEN * 2, HIDDEN * 4
# Packets of a token, by operation: alike in all layouts that have the operation.  Sums of `flat` are never exact.
_PACKETS = {
    "dispatch bf16": packets.of_dispatch(_BF16, 0, TOPK),
    "dispatch FP8": packets.of_dispatch(HIDDEN, HIDDEN // 32, TOPK, scale_size=4),
    "dispatch FP8, UE8M0": packets.of_dispatch(HIDDEN, HIDDEN // 128, TOPK, scale_size=1),
    "combine bf16": packets.of_combine(_BF16),
    "combine bf16, exact": packets.of_combine(_FP32),
}


@dataclass(frozen=True)
class FewTokens:
    """Packets of a Buffer for DeepSeek-V3 in bf16, whose ranks are in one NVLink domain.

    Attributes:
        ranks: ranks of the Buffer.
        nbytes: window memory of each rank for packets.
        tokens: by operation, the most tokens of a rank that travel in packets.  More tokens wait for counts.
    """

    ranks: int
    nbytes: int
    tokens: dict[str, int]


def few_tokens() -> list[FewTokens]:
    """Return the most tokens that travel in packets, for each number of RANKS."""
    return [_few_tokens(ranks) for ranks in RANKS]


def _few_tokens(ranks: int) -> FewTokens:
    settings = Settings(ranks, HIDDEN, EXPERTS, TOPK, MAX_TOKENS, torch.bfloat16, "lsa", None)
    room = settings.packet_bytes(backends.load("lsa"))
    tokens = {name: packet.most_tokens(TOPK, room) for name, packet in _PACKETS.items() if packet is not None}
    return FewTokens(ranks, 2 * ranks * room, tokens)  # of either parity


def lines(rows: list[FewTokens]) -> list[str]:
    """Return the rows as lines of text, below a title."""
    title = f"most tokens of a rank in packets (one NVLink domain, {HIDDEN} columns, {TOPK} experts a token):"
    return [title, *(f"  {row.ranks:>2} ranks, {row.nbytes >> 20:>3} MiB: {_listed(row)}" for row in rows)]


def _listed(row: FewTokens) -> str:
    return "; ".join(f"{name} {most}" for name, most in row.tokens.items())
