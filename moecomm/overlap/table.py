"""Calls whose unfused form is the default: the meaning of `fused=None`.

A fused kernel is the default wherever it takes the sizes, on any GPU and with any number of ranks, because it hides
communication that the unfused form adds.  One rank alone has nothing to hide; among several, two kinds of calls are
the exception.
"""

from __future__ import annotations

from moecomm.overlap.sizes import Sizes

COLUMNS = 8  # depths and numbers of columns of fused products are multiples of it
# The product of so few rows is bound by w.  torch's takes half to four fifths of the fused kernel's time, which is more
# than the kernel hides (bench/results/overlap-matmul-all-reduce-h100-2.json); up to 16 rows there is one of their own.
FEW_ROWS = range(17, 257)
# Elements of w from which an all-gather is a small part of the call, and the product decides: 2048 x 7168 x 8192 takes
# 515 us fused, 435 us unfused and 429 us with NCCL on 4 H200s; 8192^3 takes 1911, 1909 and 1933 us.
LARGE_WEIGHT = 1 << 25


def is_slower(num_ranks: int, sizes: Sizes) -> bool:
    """Return whether the fused form of a call is slower than the unfused one, or does not exist."""
    dims = sizes.dims
    if num_ranks == 1 or any(dims.get(name, 0) % COLUMNS for name in ("N", "K")):
        return True
    if sizes.operator == "matmul_all_reduce":
        return dims["M"] in FEW_ROWS
    return sizes.operator == "all_gather_matmul" and dims["N"] * dims["K"] >= LARGE_WEIGHT
