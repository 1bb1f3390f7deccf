"""Errors as values: what they say, and that they come through a process border whole."""

from __future__ import annotations

import copy

import pytest

from moecomm import errors

KNOWN = {"rank": 2, "peer": 1, "phase": "payload", "op": "dispatch", "round": 7}
ERRORS = [
    errors.BadInput("x", 3, "4", rank=1),
    errors.Mismatch("hidden", 64, 128, 3),
    errors.Timeout("rank 2 waited for rank 1", **KNOWN),
    errors.PeerLost("rank 1 is gone", **KNOWN),
    errors.Aborted("told to stop", **KNOWN),
    errors.Closed(),
    errors.Unsupported("no GPU"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_can_be_copied_and_sent(error: errors.MoecommError) -> None:
    again = copy.copy(error)  # by __reduce_ex__, as other processes get them
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert str(error)
