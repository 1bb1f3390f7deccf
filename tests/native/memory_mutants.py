"""Bugs that need not change any result.  A sanitizer must report each."""

from __future__ import annotations

from .mutants import Mutant

MEMORY_MUTANTS = [
    Mutant(
        "one column too few",
        "host/plan.cpp",
        "total_.assign(columns_, 0)",
        "total_.assign(columns_ - 1, 0)",
        "asan",
    ),
    Mutant(
        "trailing zeros of zero",
        "host/plan.cpp",
        "for (; ranks_seen != 0; ranks_seen &= ranks_seen - 1) ++counts[shape_.experts + __builtin_ctzll(ranks_seen)];",
        """for (i32 rank = __builtin_ctzll(ranks_seen); ranks_seen != 0; rank = __builtin_ctzll(ranks_seen)) {
            ++counts[shape_.experts + rank];
            ranks_seen &= ranks_seen - 1;
        }""",
        "asan",
    ),
    Mutant(
        "no room for scales in what crosses",
        "host/send.cpp",
        "send_slot_.resize(received_token_bytes(shape, a.row_bytes, a.scale_bytes))",
        "send_slot_.resize(received_token_bytes(shape, a.row_bytes, 0))",
        "domains asan",
    ),
]
