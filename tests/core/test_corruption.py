"""Names of the rows that a failure record says are corrupt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.rounds import corruption

SHAPE = _native.Shape(6, 6, 2, 64, 64, 4096, 0, domain_ranks=3)
SESSION: Any = SimpleNamespace(context=SimpleNamespace(shape=SHAPE), name="lsa/vmm")
TOKEN = 17


def error_of(
    source: int, token_rank: int, peer: int, masked: set[int], forwarded: bool = False
) -> moecomm.CorruptRow | None:
    """Return the error of a combine that `peer` has said to be wrong."""
    flat = torch.tensor(token_rank * SHAPE.max_tokens + TOKEN)
    row = corruption.row_bits(torch.tensor(source), flat, torch.tensor(forwarded) if forwarded else None)
    record: Any = SimpleNamespace(
        code=_native.Failure.bad_input,
        argument=_native.Argument.topk_idx,
        seen=corruption.fixed_bits("combine", 0) | int(row),
        peer=peer,
        round=9,
    )
    return corruption.error_of(record, SESSION, masked)


def found(*row: Any, **named: Any) -> tuple[int, ...]:
    """Return source, destination, the token's rank and the token of error_of()."""
    error = error_of(*row, **named)
    assert error is not None and error.op == "combine" and error.round == 9
    return error.source, error.destination, error.token_rank, error.token


@pytest.mark.parametrize(("masked", "forwarder"), [(set(), 4), ({4}, 3), ({3, 4}, 5), ({0, 5}, 4)])
def test_a_sum_names_the_rank_that_stood_in_for_its_forwarder(masked: set[int], forwarder: int) -> None:
    """Rank 4 forwards for rank 1 in the other domain; living ranks of that domain stand in, in their order."""
    assert found(4, 1, 1, masked) == (forwarder, 1, 1, TOKEN)


@pytest.mark.parametrize(("masked", "forwarder"), [(set(), 4), ({4}, 3)])
def test_a_row_that_went_to_a_forwarder_names_the_rank_that_stood_in(masked: set[int], forwarder: int) -> None:
    """Rank 5 says that its row for a token of rank 1 differs, which the forwarder of that has told."""
    assert found(5, 1, 5, masked, forwarded=True) == (5, forwarder, 1, TOKEN)


def test_a_row_that_went_straight_to_its_rank_names_it_whoever_is_masked() -> None:
    assert found(5, 4, 5, {4}) == (5, 4, 4, TOKEN)


def test_bits_that_name_no_rank_are_of_another_error() -> None:
    assert error_of(SHAPE.ranks - 1, 1, 1, set()) is not None
    assert error_of(SHAPE.ranks, 1, 1, set()) is None
    assert error_of(1, SHAPE.ranks, 1, set()) is None


def test_nobody_stands_in_for_a_domain_without_living_ranks() -> None:
    assert _native.stand_in(SHAPE, [3, 4, 5], 4) == -1
    assert _native.stand_in(SHAPE, [], 4) == 4
    for masked, forwarder in (([], 6), ([], -1), ([6], 4), ([-1], 4)):
        with pytest.raises(ValueError, match="no such rank"):
            _native.stand_in(SHAPE, masked, forwarder)
