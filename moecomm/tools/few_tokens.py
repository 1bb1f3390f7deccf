"""Tables of the most tokens of a rank that travel in packets inside a domain, and direct between domains.

`moecomm doctor` and docs/performance.md show them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moecomm import _native, backends
from moecomm.base import packets
from moecomm.ranks.settings import Settings

RANKS = (4, 8, 16, 32, 64)
HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 7168, 256, 8, 4096  # DeepSeek-V3
MOST_DOMAIN_RANKS = 8  # in each of several domains
_BF16, _FP32 = HIDDEN * 2, HIDDEN * 4
# Packets of a token, by operation: the same in all layouts that have the operation.  Sums of `flat` are never exact;
# rows of float16 are as large as those of bf16, and sums of float32 rows are float32 with either wire.
_PACKETS = {
    "dispatch bf16": packets.of_dispatch(_BF16, 0, TOPK),
    "dispatch fp32": packets.of_dispatch(_FP32, 0, TOPK),
    "dispatch FP8": packets.of_dispatch(HIDDEN, HIDDEN // 32, TOPK, scale_size=4),
    "dispatch FP8, UE8M0": packets.of_dispatch(HIDDEN, HIDDEN // 128, TOPK, scale_size=1),
    "combine bf16": packets.of_combine(_BF16),
    "combine bf16, exact": packets.of_combine(_FP32),
    "combine fp32": packets.of_combine(_FP32),
    "combine FP8 or INT8 wire": packets.of_combine(HIDDEN, scaled=True),
}
# Rounds whose rows go direct: the same for both operations, all layouts, all payloads and all wires.
_DIRECT = {"rounds bf16": torch.bfloat16, "rounds fp32": torch.float32}


@dataclass(frozen=True)
class FewTokens:
    """Few tokens of a Buffer for DeepSeek-V3.

    Attributes:
        ranks: ranks of the Buffer.
        nbytes: window memory of each rank for packets, where all ranks are in one NVLink domain.
        tokens: by operation, the most tokens of a rank that travel in packets.  More tokens wait for counts.
        domain_ranks: ranks of a domain, of two or more domains.
        direct_nbytes: window memory of each rank for direct rows between domains.
        direct: by the Buffer's dtype, the most tokens whose rows go direct.  Rows of more tokens pass forwarders.
    """

    ranks: int
    nbytes: int
    tokens: dict[str, int]
    domain_ranks: int
    direct_nbytes: int
    direct: dict[str, int]


def few_tokens() -> list[FewTokens]:
    """Return the most tokens that travel in packets, for each number of RANKS."""
    return [_few_tokens(ranks) for ranks in RANKS]


def _few_tokens(ranks: int) -> FewTokens:
    domain_ranks = min(MOST_DOMAIN_RANKS, ranks // 2)
    one, several = (_shape(ranks, torch.bfloat16, domain) for domain in (None, domain_ranks))
    tokens = {
        name: packet.most_tokens(TOPK, one.packet_bytes) for name, packet in _PACKETS.items() if packet is not None
    }
    direct = {name: _most_direct(_shape(ranks, dtype, domain_ranks)) for name, dtype in _DIRECT.items()}
    nbytes, direct_nbytes = (2 * ranks * shape.packet_bytes for shape in (one, several))  # of either parity
    return FewTokens(ranks, nbytes, tokens, domain_ranks, direct_nbytes, direct)


def _shape(ranks: int, dtype: torch.dtype, domain_ranks: int | None) -> _native.Shape:
    settings = Settings(ranks, HIDDEN, EXPERTS, TOPK, MAX_TOKENS, dtype, "lsa", None, domain_ranks)
    return settings.shape(backends.load("lsa"))


def _most_direct(shape: _native.Shape) -> int:
    return next(most for most in range(MAX_TOKENS) if not _native.goes_direct(shape, most + 1))


def lines(rows: list[FewTokens]) -> list[str]:
    """Return the rows as lines of text, below titles."""
    sizes = f"{HIDDEN} columns, {TOPK} experts a token; float16 as bf16"
    shown = [f"most tokens of a rank in packets (one NVLink domain, every layout, {sizes}):"]
    shown += [f"  {row.ranks:>2} ranks, {row.nbytes >> 20:>3} MiB: {_listed(row.tokens)}" for row in rows]
    shown.append(
        f"most tokens of a rank whose rows go direct between domains (every layout, payload and wire, {sizes}):"
    )
    for row in rows:
        where = f"{row.ranks:>2} ranks, {row.domain_ranks} a domain, {row.direct_nbytes >> 20:>3} MiB"
        shown.append(f"  {where}: {_listed(row.direct)}")
    return shown


def _listed(tokens: dict[str, int]) -> str:
    return "; ".join(f"{name} {most}" for name, most in tokens.items())
