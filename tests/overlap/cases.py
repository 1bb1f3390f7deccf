"""Calls of the operators for all ranks: drawn from a seed, run on a rank, and their results by the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moecomm import overlap
from moecomm.overlap import reference

from ..backends.conftest import run_ranks
from ..window.test_threads import HOST

OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "embedding_all_to_all",
)
PRODUCTS = OPERATORS[:4]
MOST_RANKS = 8


@dataclass
class Case:
    """`given[rank]`: the tensors of a call by argument; None stands for an argument that is not there."""

    operator: str
    dtype: torch.dtype
    given: list[dict[str, torch.Tensor]]

    def run(self, workspace: overlap.Workspace, **changed: Any) -> torch.Tensor:
        """The call of a rank."""
        function: Callable[..., torch.Tensor] = getattr(overlap, self.operator)
        return function(**{**self.given[workspace.rank], **changed}, workspace=workspace)

    def want(self, *, rounded: bool = True, magnitude: bool = False) -> list[torch.Tensor]:
        """Results of all ranks in float64.  `magnitude`: of the same call without signs."""
        columns: dict[str, list[torch.Tensor]] = {}
        for given in self.given:
            for name, tensor in given.items():
                value = tensor.abs() if magnitude and tensor.is_floating_point() else tensor
                columns.setdefault(name, []).append(value)
        dtype = self.dtype if rounded else None
        found: list[torch.Tensor] = getattr(reference, self.operator)(**columns, dtype=dtype)
        return found

    @property
    def terms(self) -> int:
        """The most additions and roundings in float32 on the way to a result."""
        given = self.given[0]
        if "x" in given:
            return max(g["x"].shape[-1] for g in self.given) + len(self.given) + 4
        return max(g["indices"].shape[-1] for g in self.given) + 4


def random_case(operator: str, ranks: int, seed: int, *, exact: bool = True, dtype: torch.dtype | None = None) -> Case:
    """Draw a call: no rows, odd sizes, ranks with their own N, K or V.

    exact: small integers, whose float32 sums have no rounding, so that all roundings are those of the specification.
    """
    g = torch.Generator().manual_seed(seed)

    def size(most: int, least: int = 0) -> int:
        few = int(torch.randint(3, (), generator=g)) == 0  # the ends often
        return int(torch.randint(least, (min(least + 2, most) if few else most) + 1, (), generator=g))

    def draw(*shape: int) -> torch.Tensor:
        if exact:
            return torch.randint(-15, 16, shape, generator=g).to(chosen)
        return torch.randn(shape, generator=g).to(chosen)

    dtypes = (torch.bfloat16, torch.float16) + ((torch.float32,) if operator == "embedding_all_to_all" else ())
    chosen = dtype or dtypes[int(torch.randint(len(dtypes), (), generator=g))]
    if operator == "embedding_all_to_all":
        return Case(operator, chosen, _bags(ranks, size, draw, g))
    m, n, k, e = size(9), size(40), size(70), size(3)
    if operator == "matmul_reduce_scatter":
        m *= ranks
    given = []
    for _ in range(ranks):
        if operator == "all_gather_matmul":
            n = size(40)
        else:
            k = size(70)
        if operator == "matmul_all_to_all":
            given.append({"x": draw(e, ranks, m, k), "w": draw(e, n, k)})
        else:
            given.append({"x": draw(m, k), "w": draw(n, k)})
    return Case(operator, chosen, given)


def _bags(
    ranks: int, size: Callable[..., int], draw: Callable[..., torch.Tensor], g: torch.Generator
) -> list[dict[str, torch.Tensor]]:
    tables, batch, width, longest = size(3), ranks * size(4), size(9), size(6)
    ragged = bool(torch.randint(2, (), generator=g))
    given = []
    for _ in range(ranks):
        rows = size(12)
        one = {"tables": draw(tables, rows, width)}
        if ragged:
            lengths = torch.randint(longest + 1, (tables * batch,), generator=g)
            one["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            one["indices"] = torch.randint(-1, max(rows, 0), (int(lengths.sum()),), generator=g)
        else:
            one["indices"] = torch.randint(-1, max(rows, 0), (tables, batch, longest), generator=g)
        given.append(one)
    return given


def on_ranks(ranks: int, body: Callable[[overlap.Workspace], Any], nbytes: int = 1 << 20, **given: Any) -> list[Any]:
    """Return what body(workspace) returned on each rank; raise the first error."""

    def run(group: Any) -> Any:
        with overlap.Workspace(group, nbytes, **{**HOST, **given}) as workspace:
            return body(workspace)

    found = run_ranks(ranks, run)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def same(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a result has the dtype, shape and bits of the reference."""
    return got.dtype is dtype and got.shape == want.shape and torch.equal(got.double(), want)
