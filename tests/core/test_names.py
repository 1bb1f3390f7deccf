"""Names of Buffers: found while a Buffer is open, and told apart from what never was one."""

from __future__ import annotations

import gc

import pytest

import moecomm
from moecomm.rounds import names


def opened() -> moecomm.Buffer:
    return moecomm.Buffer(None, hidden=16, num_experts=2, topk=1, max_tokens=2, backend="host")


def test_a_name_finds_its_buffer_until_that_is_closed() -> None:
    first, second = opened(), opened()
    assert first.name != second.name
    assert names.find(first.name) is first.rounds and names.find(second.name) is second.rounds
    first.close()
    with pytest.raises(moecomm.Closed):
        names.find(first.name)
    assert names.find(second.name) is second.rounds
    gone, third = second.name, None
    del second
    gc.collect()
    third = opened()
    assert third.name != gone
    with pytest.raises(moecomm.Closed):
        names.find(gone)
    with pytest.raises(moecomm.BadInput, match="buffer"):
        names.find("no buffer's")
