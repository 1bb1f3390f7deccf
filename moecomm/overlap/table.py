"""Ranges of sizes in which the fused form was measured to be faster than the unfused one: the meaning of `fused=None`.

A call that no row covers is unfused.
"""

from __future__ import annotations

from typing import NamedTuple

from moecomm.overlap.sizes import Sizes


class Row(NamedTuple):
    """A range of sizes in which the fused form was measured to be faster.

    Attributes:
        gpu: name of the GPU, as torch has it.
        operator: name of the operator.
        num_ranks: number of ranks.
        least: smallest value of each size, by the names of the operator's docstring.
        most: largest value of each size; both have the same names, and sizes without a name may have any value.
        fp8: of matrices in FP8, and of no others.
    """

    gpu: str
    operator: str
    num_ranks: int
    least: dict[str, int]
    most: dict[str, int]
    fp8: bool = False

    def covers(self, gpu: str, num_ranks: int, sizes: Sizes) -> bool:
        """Return whether a call is in the range."""
        return (
            (self.gpu, self.operator, self.num_ranks, self.fp8) == (gpu, sizes.operator, num_ranks, sizes.fp8)
            and all(sizes.dims[name] >= value for name, value in self.least.items())
            and all(sizes.dims[name] <= value for name, value in self.most.items())
        )


_H100 = "NVIDIA H100 80GB HBM3"
# bench/results/overlap-*-h100-2.json: faster there than a product of cuBLAS with NCCL, one after the other.
MEASURED = (
    Row(_H100, "all_gather_matmul", 2, {"M": 512, "N": 1024, "K": 1024}, {"M": 2048, "N": 4096, "K": 4096}),
    Row(_H100, "matmul_reduce_scatter", 2, {"M": 2048, "N": 8192, "K": 4096}, {"M": 8192, "N": 16384, "K": 26624}),
    Row(_H100, "all_gather_matmul", 2, {"M": 512, "N": 1024, "K": 1024}, {"M": 4096, "N": 8192, "K": 8192}, fp8=True),
    Row(
        _H100,
        "matmul_reduce_scatter",
        2,
        {"M": 2048, "N": 8192, "K": 4096},
        {"M": 8192, "N": 16384, "K": 26624},
        fp8=True,
    ),
    Row(_H100, "matmul_all_reduce", 2, {"M": 1, "N": 4096, "K": 2048}, {"M": 16, "N": 16384, "K": 8192}),
    Row(_H100, "matmul_all_reduce", 2, {"M": 256, "N": 4096, "K": 3584}, {"M": 8192, "N": 8192, "K": 14336}),
    Row(
        _H100,
        "matmul_all_reduce",
        2,
        {"M": 256, "N": 4096, "K": 3584},
        {"M": 8192, "N": 8192, "K": 14336},
        fp8=True,
    ),
    Row(
        _H100,
        "matmul_all_to_all",
        2,
        {"E": 1, "C": 512, "N": 4096, "K": 2048},
        {"E": 8, "C": 4096, "N": 7168, "K": 4096},
    ),
    Row(
        _H100,
        "matmul_all_to_all",
        2,
        {"E": 1, "C": 512, "N": 4096, "K": 2048},
        {"E": 8, "C": 4096, "N": 7168, "K": 14336},
        fp8=True,
    ),
    Row(_H100, "embedding_all_to_all", 2, {"T": 16, "B": 2048, "D": 64}, {"T": 64, "B": 4096, "D": 256}),
)
_COLUMNS = 8  # depths and numbers of columns of fused products are multiples of it


def is_faster(gpu: str, num_ranks: int, sizes: Sizes) -> bool:
    """Return whether the fused form of a call was measured to be faster."""
    if any(sizes.dims.get(name, 0) % _COLUMNS for name in ("N", "K")):
        return False
    return any(row.covers(gpu, num_ranks, sizes) for row in MEASURED)
