"""Random calls of CPU ranks (threads) against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from moecomm import overlap

from ..few import few
from .cases import FP8, MOST_RANKS, OPERATORS, PRODUCTS, on_ranks, random_case, same

FEW, MANY = 32, 400  # cases of an operator, over all numbers of ranks; `--seed` 0 to 24: 10,000
CASES = 100  # drawn at once


def run_cases(operator: str, ranks: int, seeds: range, dtype: torch.dtype | None = None) -> None:
    """Run cases on one Workspace."""
    cases = [random_case(operator, ranks, seed, dtype=dtype) for seed in seeds]
    wanted = [case.want() for case in cases]

    def body(workspace: overlap.Workspace) -> list[str]:
        wrong = []
        for seed, case, want in zip(seeds, cases, wanted, strict=True):
            if not same(case.run(workspace), want[workspace.rank], case.dtype):
                wrong.append(f"{operator} on rank {workspace.rank} of {ranks}, seed {seed}")
        return wrong

    assert on_ranks(ranks, body) == [[]] * ranks


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", few((FEW, MANY), FEW))
@pytest.mark.parametrize(
    ("operator", "dtype"), [*((name, None) for name in OPERATORS), *((name, FP8) for name in PRODUCTS)]
)
def test_random_calls_have_the_bits_of_the_reference(
    operator: str, dtype: torch.dtype | None, cases: int, request: pytest.FixtureRequest
) -> None:
    each = cases // MOST_RANKS
    for ranks in range(1, MOST_RANKS + 1):
        begin = request.config.getoption("--seed") * MANY + (ranks - 1) * each
        for first in range(begin, begin + each, CASES):
            run_cases(operator, ranks, range(first, min(first + CASES, begin + each)), dtype)


@pytest.mark.parametrize(
    ("operator", "dtype"), [*((name, None) for name in OPERATORS), *((name, FP8) for name in PRODUCTS)]
)
def test_numbers_with_fractions_are_off_by_the_roundings_alone(operator: str, dtype: torch.dtype | None) -> None:
    for seed in range(20):
        ranks = 1 + seed % 4
        case = random_case(operator, ranks, seed, exact=False, dtype=dtype)
        found = on_ranks(ranks, case.run)
        eps = 0 if case.dtype is torch.float32 else torch.finfo(case.dtype).eps  # two roundings, of half of it each
        bound = eps + case.terms * 2.0**-24
        sizes = case.want(rounded=False, magnitude=True)
        smallest = torch.finfo(case.dtype).smallest_normal  # below it roundings are absolute
        for got, want, size in zip(found, case.want(rounded=False), sizes, strict=True):
            assert ((got.double() - want).abs() <= bound * (size + smallest)).all(), f"seed {seed}"


def test_calls_alternate_on_one_workspace() -> None:
    """Shapes and operators change from call to call, and results of earlier calls stay as they are."""
    cases = [random_case(OPERATORS[seed * 3 % 5], 3, seed) for seed in range(40)]

    def body(workspace: overlap.Workspace) -> list[torch.Tensor]:
        return [case.run(workspace) for case in cases]

    found = on_ranks(3, body)
    for number, case in enumerate(cases):
        for rank, want in enumerate(case.want()):
            assert same(found[rank][number], want, case.dtype), f"call {number} on rank {rank}"


def test_bits_do_not_depend_on_the_call() -> None:
    """The same call again and again, between others, while ranks come in any order."""
    case = random_case("matmul_all_reduce", 5, 3, exact=False)

    def body(workspace: overlap.Workspace) -> list[torch.Tensor]:
        return [case.run(workspace) for _ in range(30)]

    first, *others = [result for results in on_ranks(5, body) for result in results]
    assert first.numel() and all(torch.equal(first, other) for other in others)
