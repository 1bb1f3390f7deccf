"""Calls that are known, and others that are like them and must not be taken for them."""

from __future__ import annotations

import pytest

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
