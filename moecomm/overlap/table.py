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
    """

    gpu: str
    operator: str
    num_ranks: int
    least: dict[str, int]
    most: dict[str, int]

    def covers(self, gpu: str, num_ranks: int, sizes: Sizes) -> bool:
        """Return whether a call is in the range."""
        return (
            (self.gpu, self.operator, self.num_ranks) == (gpu, sizes.operator, num_ranks)
            and all(sizes.dims[name] >= value for name, value in self.least.items())
            and all(sizes.dims[name] <= value for name, value in self.most.items())
        )


MEASURED: tuple[Row, ...] = ()
_COLUMNS = 8  # depths and numbers of columns of fused products are multiples of it


def is_faster(gpu: str, num_ranks: int, sizes: Sizes) -> bool:
    """Return whether the fused form of a call was measured to be faster."""
    if any(sizes.dims.get(name, 0) % _COLUMNS for name in ("N", "K")):
        return False
    return any(row.covers(gpu, num_ranks, sizes) for row in MEASURED)
