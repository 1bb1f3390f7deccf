from __future__ import annotations

import itertools
import random
import threading

import pytest

from moecomm import _native

UNIT = 256


def units(nbytes: int) -> int:
    return max(1, -(-nbytes // UNIT)) * UNIT


class Model:
    """First fit, from some offset on if it fits there, over a sorted list of what is taken."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self.begin, self.end = -(-offset // UNIT) * UNIT, (offset + nbytes) // UNIT * UNIT
        self.taken: dict[int, int] = {}

    def gaps(self) -> list[tuple[int, int]]:
        edges = [(self.begin, 0), *sorted(self.taken.items()), (self.end, 0)]
        gaps = [(a + size, b - a - size) for (a, size), (b, _) in itertools.pairwise(edges)]
        return [(at, size) for at, size in gaps if size > 0]

    def first_fit(self, nbytes: int, at_least: int) -> int | None:
        at_least = min(-(-at_least // UNIT) * UNIT, self.end)
        for first in (at_least, 0):
            above = ((max(at, first), at + size) for at, size in self.gaps())
            if (found := next((at for at, end in above if at + units(nbytes) <= end), None)) is not None:
                return found
        return None


def check(arena: _native.Arena, model: Model) -> None:
    assert arena.used == sum(model.taken.values())
    assert arena.largest_free == max((size for _, size in model.gaps()), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_against_a_model(seed: int) -> None:
    rng = random.Random(seed)
    offset, nbytes = rng.randrange(0, 5000), rng.randrange(20_000, 200_000)
    arena, model = _native.Arena(offset, nbytes), Model(offset, nbytes)
    assert (arena.begin, arena.end) == (model.begin, model.end)
    live: list[_native.Block] = []
    for _ in range(2000):
        action = rng.random()
        if action < 0.5 or not live:
            size = rng.choice([0, 1, 255, 256, 257, rng.randrange(20_000)])
            at_least = rng.choice([0, 0, rng.randrange(offset + nbytes + UNIT), 1 << 63])
            expected = model.first_fit(size, at_least)
            block = arena.allocate(size, at_least)
            assert (block.offset if block else None) == expected
            if block:
                assert (block.nbytes, block.end) == (size, block.offset + size)
                assert block.offset % UNIT == 0
                model.taken[block.offset] = units(size)
                live.append(block)
        elif action < 0.9:
            block = live.pop(rng.randrange(len(live)))
            del model.taken[block.offset]
        else:
            block = rng.choice(live)
            size = rng.randint(0, block.nbytes)
            block.shrink(size)
            assert block.nbytes == size
            model.taken[block.offset] = units(size)
        block = None  # the last reference to one that was popped
        check(arena, model)
    rng.shuffle(live)
    while live:
        del model.taken[live.pop().offset]
        check(arena, model)
    assert (arena.used, arena.largest_free) == (0, model.end - model.begin)


def test_a_block_does_not_grow() -> None:
    arena = _native.Arena(0, 4096)
    block = arena.allocate(1000)
    assert block is not None
    with pytest.raises(ValueError, match="1000 bytes cannot shrink to 1001"):
        block.shrink(1001)
    assert (block.nbytes, arena.used) == (1000, 1024)


def test_block_outlives_arena() -> None:
    block = _native.Arena(512, 4096).allocate(4096)
    assert block is not None
    assert (block.offset, block.nbytes) == (512, 4096)
    del block


def test_extremes() -> None:
    arena = _native.Arena(1, 300)  # no whole unit inside
    assert (arena.allocate(0), arena.largest_free, arena.used) == (None, 0, 0)
    arena = _native.Arena(0, 1 << 40)
    assert arena.allocate((1 << 64) - 1) is None
    assert arena.allocate((1 << 40) + 1) is None
    assert arena.allocate(1 << 40) is not None
    with pytest.raises(ValueError, match="wraps"):
        _native.Arena((1 << 64) - 256, 1024)
    with pytest.raises(TypeError):
        arena.allocate(-1)


def test_from_many_threads() -> None:
    arena = _native.Arena(256, 1 << 20)
    overlaps: list[str] = []
    owner = [-1] * (1 << 12)  # by unit

    def mark(block: _native.Block, thread: int, expected: int) -> None:
        for unit in range(block.offset // UNIT - 1, (block.offset + units(block.nbytes)) // UNIT - 1):
            if owner[unit] != expected:
                overlaps.append(f"unit {unit} of {owner[unit]} instead of {expected}")
            owner[unit] = thread

    def work(thread: int) -> None:
        rng = random.Random(thread)
        live: list[_native.Block] = []
        for _ in range(3000):
            block = arena.allocate(rng.randrange(1, 8000)) if rng.random() < 0.6 else None
            if block is not None:
                mark(block, thread, -1)
                live.append(block)
            elif live:
                mark(live[0], -1, thread)
                live.pop(0)
        for block in live:
            mark(block, -1, thread)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlaps
    assert (arena.used, arena.largest_free) == (0, 1 << 20)
