"""Calls of the operators for all ranks: drawn from a seed, run on a rank, and their results by the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moecomm import overlap
from moecomm.dispatch.reference import quantize
from moecomm.fused import Fp8, quantize_weights
from moecomm.overlap import reference
from moecomm.overlap.sizes import FP8, OF_FP8

from ..backends.conftest import all_ranks
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
    """`given[rank]`: the tensors of a call by argument, pairs in FP8; `dtype`: of the result."""

    operator: str
    dtype: torch.dtype
    given: list[dict[str, Any]]

    def run(self, workspace: overlap.Workspace, **changed: Any) -> torch.Tensor:
        """The call of a rank."""
        function: Callable[..., torch.Tensor] = getattr(overlap, self.operator)
        return function(**{**self.given[workspace.rank], **changed}, workspace=workspace)

    def want(self, *, rounded: bool = True, magnitude: bool = False) -> list[torch.Tensor]:
        """Results of all ranks in float64.  `magnitude`: of the same call without signs."""
        columns: dict[str, list[torch.Tensor]] = {}
        for given in self.given:
            if isinstance(given.get("x"), Fp8):
                given = dict(zip(("x", "w"), reference.in_float64(given["x"], given["w"]), strict=True))
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
        if isinstance(given.get("x"), Fp8):  # values are rounded when they are multiplied by their scales
            return max(g["x"].data.shape[-1] for g in self.given) + len(self.given) + 6
        if "x" in given:
            return max(g["x"].shape[-1] for g in self.given) + len(self.given) + 4
        return max(g["indices"].shape[-1] for g in self.given) + 4


def random_case(operator: str, ranks: int, seed: int, *, exact: bool = True, dtype: torch.dtype | None = None) -> Case:
    """Draw a call: no rows, odd sizes, ranks with their own N, K or V.

    exact: small integers, whose float32 sums have no rounding, so that all roundings are those of the specification;
        in FP8, with scales that are powers of two.
    dtype: of matrices or tables; drawn from those that are not FP8.
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
    fp8 = chosen == FP8

    def depth() -> int:
        return 128 * size(3) if fp8 else size(70)

    def columns() -> int:
        return size(40) + (128 if fp8 and int(torch.randint(3, (), generator=g)) == 0 else 0)

    def matrices(x: tuple[int, ...], w: tuple[int, ...]) -> dict[str, Any]:
        return _fp8(x, w, exact, g) if fp8 else {"x": draw(*x), "w": draw(*w)}

    m, n, k, e = size(9), columns(), depth(), size(3)
    if operator == "matmul_reduce_scatter":
        m *= ranks
    given = []
    for _ in range(ranks):
        if operator == "all_gather_matmul":
            n = columns()
        else:
            k = depth()
        if operator == "matmul_all_to_all":
            given.append(matrices((e, ranks, m, k), (e, n, k)))
        else:
            given.append(matrices((m, k), (n, k)))
    return Case(operator, OF_FP8 if fp8 else chosen, given)


def _fp8(x: tuple[int, ...], w: tuple[int, ...], exact: bool, g: torch.Generator) -> dict[str, Any]:
    """Draw rows and weights in FP8."""
    down, across = -(-w[-2] // 128), x[-1] // 128
    if not exact:
        data, scales = quantize(torch.randn(x, generator=g).flatten(0, -2))
        return {
            "x": Fp8(data.view(x), scales.view(*x[:-1], across)),
            "w": quantize_weights(torch.randn(w, generator=g)),
        }

    def draw(shape: tuple[int, ...], of_scales: tuple[int, ...]) -> Fp8:
        scales = torch.exp2(torch.randint(-1, 2, of_scales, generator=g).float())
        return Fp8(torch.randint(-15, 16, shape, generator=g).float().to(FP8), scales)

    return {"x": draw(x, (*x[:-1], across)), "w": draw(w, (*w[:-2], down, across))}


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

    return all_ranks(ranks, run)


def same(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a result has the dtype, shape and bits of the reference."""
    return got.dtype is dtype and got.shape == want.shape and torch.equal(got.double(), want)


def gathers(found: torch.Tensor | Fp8, case: Case) -> bool:
    """Return whether gathered rows, and their scales, are those of all ranks."""
    given = [one["x"] if isinstance(one["x"], Fp8) else (one["x"],) for one in case.given]
    wanted = [torch.cat([one.view(torch.uint8) for one in of]) for of in zip(*given, strict=True)]
    parts = found if isinstance(found, Fp8) else (found,)
    return all(torch.equal(got.view(torch.uint8), want) for got, want in zip(parts, wanted, strict=True))
