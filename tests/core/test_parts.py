"""Parts that other rooms add to the rounds of a Buffer."""

from __future__ import annotations

import pytest

import moecomm
from moecomm.errors import BadInput
from moecomm.rounds.rounds import Part

SIZES = {"hidden": 64, "num_experts": 2, "topk": 1, "max_tokens": 4}


class Noted(Part):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None

    def abort(self) -> None:
        self.calls.append("abort")

    def check(self, masked: bool) -> None:
        self.calls.append(f"check, masked={masked}")
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.calls.append("close")


class InMemory(Noted):
    ends_with_memory = True


def opened() -> moecomm.Buffer:
    return moecomm.Buffer("self", **SIZES, backend="host")  # type: ignore[arg-type]


def test_a_part_is_found_by_its_class() -> None:
    with opened() as buffer:
        rounds = buffer.rounds
        assert rounds.part(Noted) is None
        first, other = rounds.add(Noted()), rounds.add(InMemory())
        assert rounds.part(Noted) is first and rounds.part(InMemory) is other and rounds.part(Part) is None
        second = rounds.add(Noted())
        assert rounds.part(Noted) is second


def test_parts_are_checked_with_the_rounds_and_closed_with_them() -> None:
    buffer = opened()
    rounds = buffer.rounds
    part, other = rounds.add(Noted()), rounds.add(InMemory())
    buffer.check()
    part.error = BadInput("weights", 1, 2)
    with pytest.raises(BadInput, match="weights"):
        buffer.check()
    buffer.close()
    buffer.close()
    assert part.calls == ["check, masked=False"] * 2 + ["close"] and other.calls == ["check, masked=False", "close"]
    assert rounds.part(Noted) is None


def test_a_release_of_memory_closes_parts_that_end_with_it() -> None:
    with opened() as buffer:
        part, other = buffer.rounds.add(Noted()), buffer.rounds.add(InMemory())
        buffer.release_memory()
        assert part.calls == ["check, masked=False"] and other.calls == ["check, masked=False", "close"]
        assert buffer.rounds.part(Noted) is part and buffer.rounds.part(InMemory) is None
        buffer.restore()
        assert buffer.rounds.part(Noted) is part


def test_a_release_that_a_part_refuses_changes_nothing() -> None:
    with opened() as buffer:
        part = buffer.rounds.add(InMemory())
        part.error = BadInput("weights", 1, 2)
        with pytest.raises(BadInput, match="weights"):
            buffer.release_memory()
        assert not buffer.released and buffer.rounds.part(InMemory) is part and "close" not in part.calls


def test_abort_reaches_parts() -> None:
    with opened() as buffer:
        part = buffer.rounds.add(Noted())
        buffer.abort()
        assert part.calls == ["abort"]


def test_parts_of_rounds_that_are_left_are_closed() -> None:
    with opened() as buffer:
        part = buffer.rounds.add(Noted())
        buffer.shrink()
        assert part.calls == ["close"] and buffer.rounds.part(Noted) is None


def test_a_close_that_an_interrupt_ends_comes_again() -> None:
    class Interrupted(Noted):
        def close(self) -> None:
            super().close()
            if len(self.calls) == 1:
                raise KeyboardInterrupt

    buffer = opened()
    first, second = buffer.rounds.add(Interrupted()), buffer.rounds.add(Noted())
    with pytest.raises(KeyboardInterrupt):
        buffer.close()
    assert second.calls == []
    buffer.close()
    assert first.calls == ["close"] * 2 and second.calls == ["close"]
