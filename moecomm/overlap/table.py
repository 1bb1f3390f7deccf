"""Calls whose unfused form is the default: the meaning of `fused=None`.

A fused kernel is the default wherever it takes the sizes, on any GPU and with any number of ranks, because it hides
communication that the unfused form adds.  One rank alone has nothing to hide; among several, two kinds of calls are
the exception.
"""

from __future__ import annotations

from collections.abc import Callable

from moecomm.overlap.sizes import Sizes

COLUMNS = 8  # depths and numbers of columns of fused products are multiples of it
# The product of so few rows is bound by w, and torch's is faster than the fused kernel's by more than that hides.  With
# a kernel that adds up the products it takes 0.66 to 0.93 of NCCL's time, and the fused kernel 0.82 to 1.27
# (bench/results/overlap-matmul-all-reduce-h200-2.json).  Up to 16 rows there is a fused kernel of their own.
FEW_ROWS = range(17, 257)
# Elements of w from which an all-gather is a small part of the call, and the product decides: 2048 x 7168 x 8192 takes
# 515 us fused, 435 us unfused and 429 us with NCCL on 4 H200s; 8192^3 takes 1911, 1909 and 1933 us.  On two H200s both
# forms take 0.90 to 1.02 of NCCL's time (bench/results/overlap-all-gather-matmul-h200-2.json).
LARGE_WEIGHT = 1 << 25


def is_slower(num_ranks: int, sizes: Sizes, can_sum: Callable[[int], bool]) -> bool:
    """Return whether the fused form of a call is slower than the unfused one, or does not exist.

    Args:
        num_ranks: number of ranks.
        sizes: of the call.
        can_sum: returns whether there is a kernel that adds up products of so many bytes.
    """
    dims = sizes.dims
    if num_ranks == 1 or any(dims.get(name, 0) % COLUMNS for name in ("N", "K")):
        return True
    if sizes.operator == "matmul_all_reduce":
        return dims["M"] in FEW_ROWS and can_sum(2 * dims["M"] * dims["N"])
    return sizes.operator == "all_gather_matmul" and dims["N"] * dims["K"] >= LARGE_WEIGHT
