"""Blocks of a launch: as asked for, or from the table in the package."""

from __future__ import annotations

from functools import lru_cache

from moecomm.backends.lsa_kernels import scaleout_blocks
from moecomm.gpu import tuning
from moecomm_bench.simulate.domain import Operation


@lru_cache(maxsize=1024)
def blocks_of(gpu: str, ranks: int, operation: Operation, tokens: int) -> int:
    """Return the blocks that the shipped table gives to so many tokens of a rank; a user's own table is not read."""
    lines = [e for e in tuning.shipped(gpu).entries if (e.op, e.layout) == (operation.what, operation.layout)]
    nearest = min((entry.ranks for entry in lines), key=lambda n: (abs(n - ranks), -n))
    lines = sorted((e for e in lines if e.ranks == nearest), key=lambda entry: entry.tokens)
    return next((entry.blocks for entry in lines if tokens <= entry.tokens), lines[-1].blocks)


def direct_blocks_of(gpu: str, ranks: int, operation: Operation, tokens: int) -> int:
    """Return the blocks of a launch over several domains whose tokens have places of their own."""
    return scaleout_blocks(operation.what, blocks_of(gpu, ranks, operation, tokens), tokens, tokens)
