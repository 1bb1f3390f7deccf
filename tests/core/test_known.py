"""Calls that are known, and others that are like them and must not be taken for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm.base.known import Known, checked_once
from moecomm.base.validation import check_integer
from moecomm.errors import BadInput


def test_true_is_not_known_where_1_is() -> None:
    known: Known[str] = Known()
    known.add(("rows", 1), "one")
    assert known.get(("rows", 1)) == "one"
    assert known.get(("rows", True)) is None and known.get(("rows", 1.0)) is None
    checked_once(check_integer, "rows", 1, 0)
    with pytest.raises(BadInput, match="rows"):
        checked_once(check_integer, "rows", True, 0)


NUMBERS = {"num_sms": (1, True, 1.0), "max_rows": (16, 16.0), "check_weights": (True, 1.0), "sync": (True, 1.0)}
OF_CALLS: dict[str, dict[str, tuple[Any, ...]]] = {
    "dispatch": {**NUMBERS, "expert_alignment": (1, True, 1.0)},
    "dispatch_begin": {"num_sms": (1, True, 1.0), "expert_alignment": (4, 4.0), "check_weights": (False, 0.0)},
    "combine": {"num_sms": (1, True, 1.0), "weighted": (True, 1.0)},
    "moe": {"num_sms": (1, 1.0), "max_rows": (16, 16.0), "interleaved": (False, 0.0), "check_weights": (False, 0.0)},
}


@pytest.mark.parametrize(
    ("call", "option", "good", "bad"),
    [
        (call, option, good, bad)
        for call, options in OF_CALLS.items()
        for option, (good, *others) in options.items()
        for bad in others
    ],
)
def test_an_option_that_is_equal_to_a_known_one_is_refused_as_in_a_first_call(
    call: str, option: str, good: Any, bad: Any
) -> None:
    x, ids, weights = torch.ones(2, 64).bfloat16(), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
    w13, w2 = torch.ones(2, 64, 64).bfloat16(), torch.ones(2, 64, 32).bfloat16()

    def make(value: Any) -> None:
        given = {option: value}
        if call == "moe":
            buffer.moe(x, ids, weights, w13, w2, **given)
        elif call == "combine":
            routed = buffer.dispatch(x, ids, weights)
            buffer.combine(routed.x, routed.handle, **given)
        elif call == "dispatch":
            buffer.dispatch(x, ids, weights, **given)
        else:
            buffer.dispatch_end(buffer.dispatch_begin(x, ids, weights, **given))

    for calls_before in (0, 3):
        with moecomm.Buffer("self", hidden=64, num_experts=2, topk=2, max_tokens=8, device="cpu") as buffer:
            for _ in range(calls_before):
                make(good)
            with pytest.raises(BadInput, match=option):
                make(bad)


def test_what_cannot_be_hashed_is_not_known() -> None:
    known: Known[str] = Known()
    known.add(("rows", [1]), "one")
    assert known.get(("rows", [1])) is None
    with pytest.raises(BadInput, match="rows"):
        checked_once(check_integer, "rows", [1], 0)


def test_the_oldest_go() -> None:
    known: Known[int] = Known(most=4)
    for n in range(5):
        known.add((n,), n)
    assert [known.get((n,)) for n in range(5)] == [None, None, 2, 3, 4]
