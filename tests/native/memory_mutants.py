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
        "host/rank_set.h",
        "if (words_[word] != 0) return",
        "if (word == kMaxHostRanks / kBits - 1 || words_[word] != 0) return",
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
