"""The tiles of a grouped GEMM: csrc/gemm/tiles.h and lagged.h, compiled for the host."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moecomm.fused.reference import groups_of
from moecomm.gpu.structs import struct

ROOT = Path(__file__).parents[2]
ROOM = 1 << 14
Grouping = struct("Grouping")


class Tile(NamedTuple):
    group: int
    row: int
    rows: int
    padded: int
    column: int
    only_row_tile: int
    nth: int


Walk = Callable[[ctypes.Structure, list[int], int, int], list[Tile]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("tiles") / "tiles.so"
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'csrc'}")
    sources = [str(Path(__file__).with_name(name)) for name in ("tiles.cpp", "lagged_waits.cpp")]
    subprocess.run(["g++", *flags, *sources, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def walk(library: ctypes.CDLL) -> Walk:
    def tiles(grouping: ctypes.Structure, counts: list[int], walker: int, walkers: int) -> list[Tile]:
        room = (ctypes.c_int32 * (7 * ROOM))()
        found = library.tiles_of(
            ctypes.byref(grouping), (ctypes.c_int32 * len(counts))(*counts), walker, walkers, room, ROOM
        )
        assert found < ROOM
        return [Tile(*room[7 * i : 7 * i + 7]) for i in range(found)]

    return tiles


def drawn(rng: random.Random) -> tuple[ctypes.Structure, list[int]]:
    groups, unit = rng.randint(1, 12), rng.choice((16, 32))
    counts = [rng.choice((0, 1, rng.randint(0, 40), rng.randint(0, 900), -3)) for _ in range(groups)]
    alignment, group_rows = rng.choice((1, 8, 128)), rng.choice((0, 0, 64, 500))
    rows = groups * group_rows or max(
        0, sum(-(-max(c, 0) // alignment) * alignment for c in counts) - rng.choice((0, 0, 300))
    )
    most_rows = unit * rng.randint(1, 8)
    grouping = Grouping(groups, alignment, group_rows, rows, rng.randint(1, 9), rng.randint(1, 5), unit, most_rows)
    return grouping, counts


def test_every_row_and_column_is_in_one_tile(walk: Walk) -> None:
    rng = random.Random(1)
    for _ in range(300):
        grouping, counts = drawn(rng)
        walkers = rng.choice((1, 3, 66))
        by_walker = [walk(grouping, counts, walker, walkers) for walker in range(walkers)]
        assert max(map(len, by_walker)) - min(map(len, by_walker)) <= 1
        tiles = [tile for mine in by_walker for tile in mine]
        made = Counter((row, tile.column) for tile in tiles for row in range(tile.row, tile.row + tile.rows))
        shape = (grouping.groups, grouping.group_rows) if grouping.group_rows else (grouping.rows,)
        groups = groups_of(torch.empty(*shape, 1), counts, grouping.alignment)
        wanted = {(row, c) for g in groups for row in range(g.start, g.stop) for c in range(grouping.column_tiles)}
        assert set(made) == wanted and set(made.values()) <= {1}
        for tile in tiles:
            group = groups[tile.group]
            assert group.start <= tile.row and tile.row + tile.rows <= group.stop and tile.rows > 0
            assert tile.padded % grouping.unit == 0 and tile.padded - grouping.unit < tile.rows <= tile.padded
            assert tile.padded <= grouping.most_rows
            assert tile.only_row_tile == (group.stop - group.start <= grouping.most_rows)

        rows = sorted({(tile.nth, tile.row) for tile in tiles})
        assert [nth for nth, _ in rows] == list(range(len(rows))) and rows == sorted(rows, key=lambda pair: pair[1])


def test_tiles_of_a_group_are_few_and_even(walk: Walk) -> None:
    for count in (1, 16, 17, 256, 257, 260, 1030, 5000):
        grouping = Grouping(1, 1, 0, count, 1, 8, 16, 256)
        padded = [tile.padded for tile in walk(grouping, [count], 0, 1)]
        assert len(padded) == -(-count // 256) and max(padded) - min(padded) <= 16
        assert sum(padded) == -(-count // 16) * 16


def test_row_tiles_of_a_band_are_innermost_and_groups_follow_each_other(walk: Walk) -> None:
    grouping = Grouping(2, 1, 0, 700, 3, 2, 16, 128)
    tiles = walk(grouping, [300, 400], 0, 1)
    order = [(tile.group, tile.row, tile.column) for tile in tiles[:9]]
    assert order == [(0, row, column) for rows in ((0, 112), (208,)) for column in range(3) for row in rows]
    assert [tile.group for tile in tiles] == [0] * 9 + [1] * 12


def drawn_pair(rng: random.Random) -> tuple[ctypes.Structure, ctypes.Structure, list[int]]:
    """Groupings of two products of the same rows."""
    first, counts = drawn(rng)
    second = Grouping.from_buffer_copy(first)
    first.column_tiles, second.column_tiles = rng.choice(((16, 28), (12, 16), (1, 1), (7, 1), (1, 9), (5, 5), (12, 8)))
    return first, second, counts


def pairs(first: ctypes.Structure, second: ctypes.Structure, counts: list[int]) -> tuple[Any, ...]:
    return ctypes.byref(first), ctypes.byref(second), (ctypes.c_int32 * len(counts))(*counts)


def test_two_products_take_turns_and_the_second_lags(library: ctypes.CDLL, walk: Walk) -> None:
    rng = random.Random(4)
    mixed = 0
    for _ in range(300):
        first, second, counts = drawn_pair(rng)
        lag, step, room = rng.choice((0, 1, 8, 132)), rng.choice((1, 2, 7, 64)), (ctypes.c_int32 * (8 * ROOM))()
        found = library.lagged(*pairs(first, second, counts), lag, step, room, ROOM)
        assert found < ROOM
        order = [(room[8 * i], Tile(*room[8 * i + 1 : 8 * i + 8])) for i in range(found)]
        # Each once, and each product in its own order.
        mine = [[tile for which, tile in order if which == product] for product in (0, 1)]
        assert mine == [walk(first, counts, 0, 1), walk(second, counts, 0, 1)]
        # A tile of the second comes after all that make its rows, by `lag` tiles of the first or when there are none.
        all_of_first, made = len(mine[0]), 0
        last = {tile.nth: number for number, tile in enumerate(mine[0], 1)}
        behind = []
        for which, tile in order:
            made += which == 0
            if which == 1:
                assert made >= min(last[tile.nth] + lag, all_of_first)
                behind.append(made - last[tile.nth])
        # But not by much more: what makes two bands of rows, and what is taken in one turn.
        row_tiles = Counter(tile.group for tile in mine[0] if tile.column == 0)
        widest = min(first.band, max(row_tiles.values(), default=0))
        assert max(behind, default=0) <= lag + (2 * widest + step) * first.column_tiles
        # Whole turns, from the first tile of the second product to the last of the first.
        turns = [which for which, _ in order]
        begin, end = (turns.index(1), len(turns) - turns[::-1].index(0)) if 1 in turns else (0, 0)
        one = [1] * (step * second.column_tiles) + [0] * (step * first.column_tiles)
        for at in range(begin, end):
            assert turns[at] == one[(at - begin) % len(one)]
            mixed += 1
    assert mixed > 1000


def test_tiles_that_wait_for_tiles_are_all_made_and_none_too_early(library: ctypes.CDLL) -> None:
    """However few run at once, as long as those that fetch begin first; they take tiles when they are through."""
    rng = random.Random(5)
    for _ in range(60):
        first, second, _ = drawn_pair(rng)
        counts = [rng.choice((0, 1, rng.randint(0, 40), rng.randint(0, 900))) for _ in range(first.groups)]
        first.alignment = second.alignment = 1
        first.group_rows = second.group_rows = 0
        rows = sum(counts)
        first.rows = second.rows = rows + rng.choice((0, 500))
        clusters = rng.randint(2, 24)
        fetchers = rng.randint(1, clusters)
        resident, lag, step = rng.randint(fetchers, clusters), rng.choice((0, 1, 2 * clusters)), rng.choice((1, 3, 64))
        together, counted = rng.choice((0, 1, 40, 700)), rng.choice((32, 128))
        launch = (rows, lag, step, clusters, fetchers, together, rng.randint(1, 12), counted, resident)
        assert library.launched_at_once(*pairs(first, second, counts), *launch) == 0
