"""Memory of a GPU for expert layers: the weights of its experts, and the window of the Buffer that layers share."""

from __future__ import annotations

from typing import Any

import torch

from moecomm import backends
from moecomm.base.protocol import MAX_RANKS
from moecomm.dispatch.reference import GROUP
from moecomm.ranks.settings import Settings

GIB = 1 << 30
_BACKEND = "lsa"


def expert_bytes(payload: str, hidden: int, intermediate: int) -> int:
    """Return the bytes of an expert's weights, in bfloat16, or in FP8 with a float32 scale for each 128x128 block."""
    values = 3 * hidden * intermediate
    if payload == "bf16":
        return 2 * values
    across, inside = -(-hidden // GROUP), -(-intermediate // GROUP)
    return values + 4 * across * (-(-2 * intermediate // GROUP) + inside)


def memory(asked: Any, tokens: int) -> dict[str, float | None]:
    """Return {weights_gib, window_gib} of a GPU for a SimulatedCase with one number of domains.

    The window is that of a Buffer for so many tokens, opened without arguments about memory; None where a Buffer does
    not open: on more GPUs than 64, or than there are experts.
    """
    (domains,) = asked.domains
    gpus, experts = domains * asked.ranks, asked.gate.experts
    weights = asked.layers * -(-experts // gpus) * expert_bytes(asked.payload, asked.hidden, asked.intermediate)
    gib: dict[str, float | None] = {"weights_gib": round(weights / GIB, 4), "window_gib": None}
    if gpus <= min(MAX_RANKS, experts):
        sizes = gpus, asked.hidden, experts, asked.gate.topk, max(1, tokens), torch.bfloat16, _BACKEND, None
        settings = Settings(*sizes, domain_ranks=asked.ranks if domains > 1 else None)
        gib["window_gib"] = round(settings.total_bytes(backends.load(_BACKEND)) / GIB, 4)
    return gib


def fewest(rows: list[dict[str, Any]], memory_gib: float, target_us: float) -> list[str]:
    """Return, for each number of tokens, the fewest GPUs whose rows are within memory and time; 0 is no bound."""
    said = []
    bounds = " and ".join([f"{memory_gib:g} GiB"] * bool(memory_gib) + [f"{target_us:g} us a layer"] * bool(target_us))
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        enough = [row["gpus"] for row in rows if row["tokens"] == tokens and _within(row, memory_gib, target_us)]
        least = f"{min(enough)} GPUs are the fewest" if enough else "no number of GPUs in the table is"
        said.append(f"{tokens} tokens a rank: {least} within {bounds}")
    return said


def _within(row: dict[str, Any], memory_gib: float, target_us: float) -> bool:
    needed, window = row["memory"]["weights_gib"], row["memory"]["window_gib"]
    fits = not memory_gib or (window is not None and needed + window <= memory_gib)
    return fits and (not target_us or row["layer"]["serial_us"] <= target_us)
