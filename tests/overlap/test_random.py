"""Random calls of CPU ranks (threads) against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from moecomm import overlap

from ..few import few
from .cases import OPERATORS, on_ranks, random_case, same
from .many import KINDS, run_many

FEW, MANY = 32, 400  # cases of an operator, over all numbers of ranks; kept: `python -m tests.overlap.many 10000`


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", few((FEW, MANY), FEW))
@pytest.mark.parametrize(("operator", "dtype"), KINDS)
def test_random_calls_have_the_bits_of_the_reference(
    operator: str, dtype: torch.dtype | None, cases: int, request: pytest.FixtureRequest
) -> None:
    begin = request.config.getoption("--seed") * MANY
    run_many(operator, dtype, range(begin, begin + cases))


@pytest.mark.parametrize(("operator", "dtype"), KINDS)
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
