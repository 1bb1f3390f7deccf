"""The specification of the operators, for all ranks at once, in plain torch and float64.

Lists have an entry for each rank.  Matrices in FP8 are values times scales: see in_float64().  `dtype`: results, and
each rank's part of a sum over ranks, are rounded to it; None: nothing is rounded.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from moecomm.fused.fp8 import Fp8, widen
from moecomm.overlap.sizes import GROUP


def in_float64(x: Fp8, w: Fp8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices that rows and weights in FP8 stand for."""
    return widen(x.data.double(), x.scales.double(), 1), widen(w.data.double(), w.scales.double(), GROUP)


def all_gather_matmul(
    x: list[torch.Tensor], w: list[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Compute moecomm.overlap.all_gather_matmul."""
    gathered = torch.cat(x).double()
    return [_rounded(gathered @ weight.double().T, dtype) for weight in w]


def matmul_reduce_scatter(
    x: list[torch.Tensor], w: list[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Compute moecomm.overlap.matmul_reduce_scatter."""
    total = matmul_all_reduce(x, w, dtype)[0]
    rows = len(total) // len(x)
    return [total[rank * rows : (rank + 1) * rows] for rank in range(len(x))]


def matmul_all_reduce(
    x: list[torch.Tensor], w: list[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Compute moecomm.overlap.matmul_all_reduce."""
    parts = [_rounded(rows.double() @ weight.double().T, dtype) for rows, weight in zip(x, w, strict=True)]
    return [_rounded(torch.stack(parts).sum(dim=0), dtype)] * len(x)


def matmul_all_to_all(
    x: list[torch.Tensor], w: list[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Compute moecomm.overlap.matmul_all_to_all."""
    products = [
        torch.einsum("erck,enk->recn", rows.double(), weight.double()) for rows, weight in zip(x, w, strict=True)
    ]
    return [_rounded(torch.stack([part[rank] for part in products]), dtype) for rank in range(len(x))]


def embedding_all_to_all(
    tables: list[torch.Tensor],
    indices: list[torch.Tensor],
    offsets: list[torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Compute moecomm.overlap.embedding_all_to_all, bag by bag."""
    ranks, found = len(tables), []
    for owner, (rank_tables, rank_indices) in enumerate(zip(tables, indices, strict=True)):
        count, _, width = rank_tables.shape
        bags = list(rank_indices.flatten(0, 1)) if offsets is None else _cut(rank_indices, offsets[owner])
        batch = rank_indices.shape[1] if offsets is None else len(bags) // max(count, 1)
        sums = torch.zeros(count, batch, width, dtype=torch.float64)
        for bag, rows in enumerate(bags):
            for row in rows[rows >= 0].tolist():
                sums[bag // batch, bag % batch] += rank_tables[bag // batch, row].double()
        found.append(sums.view(count, ranks, batch // ranks, width).transpose(0, 1))
    return [_rounded(torch.stack([part[rank] for part in found]), dtype) for rank in range(ranks)]


def _cut(indices: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    return [indices[begin:end] for begin, end in pairwise(offsets.tolist())]


def _rounded(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return value if dtype is None else value.to(dtype).double()
