"""Errors as values: what they say, and that they come through a process border whole."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from moecomm import errors
from moecomm.rounds import failures

KNOWN = {"rank": 2, "peer": 1, "phase": "payload", "op": "dispatch", "round": 7}
ERRORS = [
    errors.BadInput("x", 3, "4", rank=1),
    errors.TooManyRows(9, 8, 7, 1),
    errors.Mismatch("hidden", 64, 128, 3),
    errors.Timeout("rank 2 waited for rank 1", **KNOWN),
    errors.PeerLost("rank 1 is gone", **KNOWN),
    errors.Aborted("told to stop", **KNOWN),
    errors.CorruptRow(op="combine", round=7, source=1, destination=2, token_rank=2, token=3, path="NVLink store"),
    errors.CorruptWeights(expert=3, name="w13", source=1, destination=2),
    errors.Closed(),
    errors.MemoryReleased(),
    errors.Unsupported("no GPU"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_can_be_copied_and_sent(error: errors.MoecommError) -> None:
    again = copy.copy(error)  # by __reduce_ex__, as other processes get them
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert str(error)


def record(code: int, peer: int) -> Any:
    about = {"op": 2, "round": 7, "phase": 1, "waited_ns": 10**9, "expected": 0, "seen": 0, "argument": 0}
    return SimpleNamespace(code=code, rank=2, peer=peer, **about)


def test_a_peer_that_is_known_to_be_gone_is_named_with_the_reason() -> None:
    why = "PeerLost: the connection to rank 1 was closed"
    for code in (failures.Failure.timeout, failures.Failure.peer_lost, failures.Failure.aborted):
        error = failures.error_of(record(code, 1), {1: why})
        assert type(error) is errors.PeerLost and error.peer == 1
        assert str(error) == f"rank 1 is gone (noticed by rank 2 in combine, round 7, phase payload): {why}"
    assert type(failures.error_of(record(failures.Failure.timeout, 1), {3: why})) is errors.Timeout
    assert str(failures.error_of(record(failures.Failure.peer_lost, 1), {})).endswith("phase payload)")
    broken = failures.error_of(record(failures.Failure.aborted, 2), {2: "Cuda: cuMemcpyAsync: 700"})
    assert type(broken) is errors.Aborted and str(broken).endswith(": Cuda: cuMemcpyAsync: 700")


def test_a_rank_that_others_have_given_up_did_not_wait_for_itself() -> None:
    error = failures.error_of(record(failures.Failure.timeout, 2), {})
    assert type(error) is errors.Timeout
    want = "another rank timed out waiting for rank 2 (noticed in combine, round 7, phase payload)"
    assert str(error) == want
