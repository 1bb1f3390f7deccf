"""Fused operators on CPUs: the kernels themselves, several ranks at once, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.fused import Fp8, schedules, tensor_maps
from moecomm.overlap import gpu
from moecomm.overlap.reference import in_float64
from moecomm.overlap.sizes import FP8
from moecomm.window.failures import error_of

from ..few import few
from .gemm_machine import encode
from .overlap_machine import EmulatedRanks, emulated


@pytest.fixture(autouse=True)
def emulated_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "encode", encode)


def use_schedule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(schedules, "choose", lambda *shape: name)
    monkeypatch.setattr(schedules, "choose_fp8", lambda *shape: name)


def matrices(
    ranks: int, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, of_w: bool = False
) -> list[Any]:
    """Small whole numbers, so that float32 sums are exact in any order; in FP8, with scales that are powers of two."""
    g = torch.Generator().manual_seed(seed)
    values = [torch.randint(-3, 4, shape, generator=g).to(dtype) for _ in range(ranks)]
    if dtype != FP8:
        return values
    of_scales = (*shape[:-2], -(-shape[-2] // 128) if of_w else shape[-2], shape[-1] // 128)
    return [Fp8(of, torch.exp2(torch.randint(-2, 3, of_scales, generator=g).float())) for of in values]


def inputs(
    ranks: int, x: tuple[int, ...], w: tuple[int, ...], dtype: torch.dtype, turn: int
) -> tuple[list[Any], list[Any]]:
    return matrices(ranks, *x, dtype=dtype, seed=turn), matrices(ranks, *w, dtype=dtype, seed=100 + turn, of_w=True)


def product(x: Any, w: Any) -> torch.Tensor:
    if isinstance(x, Fp8):
        wide_x, wide_w = in_float64(x, w)
        return (wide_x @ wide_w.mT).bfloat16()
    made: torch.Tensor = (x.double() @ w.double().mT).to(x.dtype)
    return made


def joined(parts: Sequence[Any]) -> Any:
    """Rows of all ranks."""
    return Fp8(*map(torch.cat, zip(*parts, strict=True))) if isinstance(parts[0], Fp8) else torch.cat(list(parts))


def same(a: Any, b: Any) -> bool:
    """Return whether the bits of two matrices are the same, with those of their scales."""
    pairs = zip(a if isinstance(a, Fp8) else (a,), b if isinstance(b, Fp8) else (b,), strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(parts[0].shape, dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


GATHERS = {
    "two ranks": (2, "64x8c1", (40, 136, 72), torch.bfloat16),
    "three ranks, ragged": (3, "64x8c1", (70, 72, 136), torch.float16),
    "a pair of blocks": (2, "64x8c2", (33, 264, 72), torch.bfloat16),
    "alone": (1, "64x8c1", (5, 8, 8), torch.bfloat16),
    "tall tiles": (2, "256x4c2u16", (200, 136, 328), torch.bfloat16),
    "FP8": (2, "64x5c1", (41, 264, 256), FP8),
    "FP8, three ranks": (3, "64x5c2", (70, 520, 128), FP8),
    "FP8, rows first": (2, "128x4c1r", (150, 136, 384), FP8),
    "FP8, a ring's slots": (2, "128x4c1", (7, 8, 768), FP8),
}


@pytest.mark.parametrize("name", few(GATHERS, "a pair of blocks", "FP8, three ranks", "FP8, rows first"))
def test_all_gather_matmul(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, schedule, (rows, columns, depth), dtype = GATHERS[name]
    use_schedule(monkeypatch, schedule)
    with emulated(ranks) as machine:
        for turn in range(3):  # both halves of staging, and the first one again
            x, w = inputs(ranks, (rows, depth), (columns, depth), dtype, turn)
            found = machine.call("all_gather_matmul", x, w, turn != 1)
            for rank, (y, gathered) in enumerate(found):
                assert torch.equal(y, product(joined(x), w[rank])), (turn, rank)
                assert gathered is None if turn == 1 else same(gathered, joined(x)), (turn, rank)
        assert all(_native.record(window._opened.peers.record) is None for window in machine.windows)


SENDS = {
    "two ranks": (2, "64x8c1", (80, 136, 72), torch.bfloat16),
    "three ranks, ragged": (3, "64x8c1", (210, 72, 136), torch.float16),
    "a pair of blocks": (2, "64x8c2", (132, 264, 72), torch.bfloat16),
    "alone": (1, "64x8c1", (5, 8, 8), torch.bfloat16),
    "tall tiles": (2, "256x4c2u16", (400, 136, 264), torch.bfloat16),
    "FP8": (2, "64x5c2", (132, 520, 256), FP8),
    "FP8, three ranks": (3, "64x5c1", (210, 72, 128), FP8),
    "FP8, rows first": (2, "128x4c1r", (300, 264, 384), FP8),
    "eight ranks": (8, "64x8c1", (64, 136, 8), torch.bfloat16),
}


@pytest.mark.parametrize("name", few(SENDS, "a pair of blocks", "FP8", "FP8, rows first"))
@pytest.mark.parametrize("operator", ["reduce_scatter", "all_reduce"])
def test_matmul_and_reduce(operator: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, schedule, (rows, columns, depth), dtype = SENDS[name]
    use_schedule(monkeypatch, schedule)
    with emulated(ranks) as machine:
        for turn in range(3):
            x, w = inputs(ranks, (rows, depth), (columns, depth), dtype, turn)
            found = machine.call(f"matmul_{operator}", x, w)
            wanted = summed([product(*pair) for pair in zip(x, w, strict=True)])
            for rank, y in enumerate(found):
                part = wanted.view(ranks, -1, columns)[rank] if operator == "reduce_scatter" else wanted
                assert torch.equal(y, part), (turn, rank, (y != part).nonzero()[:4].tolist())


def of_rank(x: Any, rank: int) -> Any:
    """Rows of all experts for a rank."""
    return Fp8(x.data[:, rank], x.scales[:, rank]) if isinstance(x, Fp8) else x[:, rank]


SPLITS = {
    "one tile": (2, (40, 72, 264), torch.bfloat16),
    "three ranks, tall": (3, (75, 128, 136), torch.float16),
    "several tiles": (2, (150, 264, 520), torch.bfloat16),
    "fewer steps than blocks": (2, (17, 136, 8), torch.bfloat16),
}


@pytest.mark.parametrize("name", few(SPLITS, "several tiles", "fewer steps than blocks"))
def test_all_reduce_of_a_split_depth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks share the depth of each tile."""
    ranks, (rows, columns, depth), dtype = SPLITS[name]
    schedule = gpu.SPLIT_SCHEDULES[64 if rows <= 64 else 128]
    monkeypatch.setattr(gpu, "choose_split", lambda *shape: (2, schedule))
    with emulated(ranks) as machine:
        for turn in range(3):
            x, w = inputs(ranks, (rows, depth), (columns, depth), dtype, turn)
            wanted = summed([product(*pair) for pair in zip(x, w, strict=True)])
            for rank, y in enumerate(machine.call("matmul_all_reduce", x, w)):
                assert torch.equal(y, wanted), (turn, rank, (y != wanted).nonzero()[:4].tolist())


@pytest.mark.parametrize("units", [132, 114, 66, 33, 2])
def test_split_products_run_at_once(units: int) -> None:
    splits = set()
    for rows in (17, 32, 64, 65, 128, 129, 512, 1000):
        for columns in (8, 1024, 4096, 8192, 16384):
            split, schedule = gpu.choose_split(rows, columns, units)
            tiles = -(-rows // schedule.most_rows) * -(-columns // 128)
            splits.add(split)
            assert split == 1 or split * tiles <= units
            assert 4 * tiles > units - 16 or split == 4
    assert units < 33 or splits == {1, 2, 4}


EXPERTS = {
    "two ranks": (2, "64x8c1", (3, 40, 136, 72), torch.bfloat16),
    "three ranks, ragged": (3, "64x8c1", (2, 70, 72, 136), torch.float16),
    "a pair of blocks": (2, "64x8c2", (2, 33, 264, 72), torch.bfloat16),
    "alone": (1, "64x8c1", (2, 5, 8, 8), torch.bfloat16),
    "FP8": (2, "64x5c1", (3, 41, 136, 256), FP8),
    "FP8, rows first": (3, "128x4c1r", (2, 130, 264, 128), FP8),
}


@pytest.mark.parametrize("name", few(EXPERTS, "two ranks", "FP8, rows first"))
def test_matmul_all_to_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, schedule, (experts, rows, columns, depth), dtype = EXPERTS[name]
    use_schedule(monkeypatch, schedule)
    with emulated(ranks) as machine:
        for turn in range(3):
            x, w = inputs(ranks, (experts, ranks, rows, depth), (experts, columns, depth), dtype, turn)
            for rank, y in enumerate(machine.call("matmul_all_to_all", x, w)):
                wanted = torch.stack([product(of_rank(of, rank), by) for of, by in zip(x, w, strict=True)])
                assert torch.equal(y, wanted), (turn, rank, (y != wanted).nonzero()[:4].tolist())


GEMVS = {
    "one row": (2, (1, 264, 328), torch.bfloat16),
    "sixteen rows": (3, (16, 136, 72), torch.float16),
    "nine rows": (1, (9, 8, 2056), torch.bfloat16),
    "eight ranks": (8, (5, 160, 8), torch.bfloat16),
}


@pytest.mark.parametrize("name", few(GEMVS, "sixteen rows"))
def test_all_reduce_of_few_rows(name: str) -> None:
    ranks, (rows, columns, depth), dtype = GEMVS[name]
    with emulated(ranks) as machine:
        for turn in range(3):
            x, w = inputs(ranks, (rows, depth), (columns, depth), dtype, turn)
            wanted = summed([product(*pair) for pair in zip(x, w, strict=True)])
            for rank, y in enumerate(machine.call("matmul_all_reduce", x, w)):
                assert torch.equal(y, wanted), (turn, rank, (y != wanted).nonzero()[:4].tolist())


SUMS = {
    "two ranks": (2, 2000, torch.bfloat16),
    "three ranks, the last part not full": (3, 3 * 240 + 36, torch.float16),
    "less than a part": (4, 8, torch.bfloat16),
    "alone": (1, 500, torch.float16),
    "eight ranks": (8, 240 * 50, torch.bfloat16),
}


@pytest.mark.parametrize("name", few(SUMS, "three ranks, the last part not full"))
def test_all_reduce(name: str) -> None:
    """Values of any size: the sum is in rank order, and rounded once."""
    ranks, count, dtype = SUMS[name]
    g = torch.Generator().manual_seed(0)
    with emulated(ranks) as machine:
        for turn in range(3):
            y = [(torch.randn(count, generator=g) * 8**rank).to(dtype) for rank in range(ranks)]
            made = [executor.all_reduce(mine) for executor, mine in zip(machine.executors, y, strict=True)]
            machine.run()
            for rank, found in enumerate(made):
                assert found is not None and torch.equal(found, summed(y)), (turn, rank)


def test_all_reduce_takes_what_packets_have_room_for() -> None:
    with emulated(2) as machine:
        executor = machine.executors[0]
        most = (
            executor.packet_bytes // 2048 * 2 * 240
        )  # of two parts, each rank owns one, and receives both and the sums
        assert executor.all_reduce(torch.zeros(most, dtype=torch.bfloat16)) is not None
        assert executor.all_reduce(torch.zeros(most + 480, dtype=torch.bfloat16)) is None
        assert executor.all_reduce(torch.zeros(6, dtype=torch.bfloat16)) is None
        assert executor.all_reduce(torch.zeros(8)) is None
        found = executor.all_reduce(torch.zeros(0, 8, dtype=torch.bfloat16))
        assert found is not None and found.shape == (0, 8)


BAGS = {
    "two ranks": (2, (3, 20, 8), (3, 10, 5), torch.float32),
    "three ranks": (3, (2, 9, 264), (2, 21, 3), torch.bfloat16),
    "wide rows": (2, (1, 9, 264), (1, 6, 1), torch.float32),
    "alone": (1, (2, 9, 16), (2, 7, 9), torch.float16),
}


@pytest.mark.parametrize("name", few(BAGS, "three ranks"))
@pytest.mark.parametrize("by_offsets", [False, True])
def test_embedding_all_to_all(name: str, by_offsets: bool) -> None:
    ranks, shape, of_indices, dtype = BAGS[name]
    g = torch.Generator().manual_seed(0)
    with emulated(ranks) as machine:
        for turn in range(3):
            tables = matrices(ranks, *shape, dtype=dtype, seed=turn)
            indices = [torch.randint(-1, shape[1] + 1, of_indices, generator=g) for _ in range(ranks)]
            bags = of_indices[0] * of_indices[1]
            offsets = torch.arange(bags + 1) * of_indices[2]
            if by_offsets:  # of any lengths, and the last bag is empty
                offsets[1:-1] = torch.randint(0, int(offsets[-1]) + 1, (bags - 1,), generator=g).sort().values
                offsets[-2] = offsets[-1]
            given = [of.flatten() for of in indices] if by_offsets else indices
            found = machine.call("embedding_all_to_all", tables, given, offsets if by_offsets else None)
            for rank, y in enumerate(found):
                for table, of, part in zip(tables, indices, y, strict=True):
                    wanted = bags_of(table, of.flatten(), offsets).view(shape[0], ranks, -1, shape[2])[:, rank]
                    assert torch.equal(part, wanted), (turn, rank)


def bags_of(tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums of whole numbers: exact in any order."""
    bags = len(offsets) - 1
    found = torch.zeros(bags, tables.shape[2])
    for bag in range(bags):
        table = tables[bag // (bags // len(tables))].float()
        of = indices[offsets[bag] : offsets[bag + 1]]
        found[bag] = table[of[(of >= 0) & (of < len(table))]].sum(dim=0)
    return found.to(tables.dtype)


def in_a_row(machine: EmulatedRanks, operator: str, turn: int, kept: list[Any]) -> tuple[list[Any], list[Any]]:
    """Enqueue a call; return its results, by rank, and what they must be.  Inputs live in `kept`."""
    ranks = len(machine.windows)
    x, w = (matrices(ranks, rows, 40, seed=turn) for rows in (12 * ranks, 72))
    if operator == "matmul_all_to_all":
        x, w = [mine.view(2, ranks, 6, 40) for mine in x], [mine[:64].view(2, 32, 40) for mine in w]
    if operator == "embedding_all_to_all":
        x, w = [mine[None] for mine in x], [torch.full((1, 2 * ranks, 1), turn + rank) for rank in range(ranks)]
    if operator == "few rows":
        x = [mine[:3].contiguous() for mine in x]
    kept.append((x, w))
    if operator == "all_gather_matmul":
        made = [y for y, _ in machine.enqueue(operator, x, w, False)]
        return made, [product(torch.cat(x), by) for by in w]
    if operator == "matmul_all_to_all":
        made = machine.enqueue(operator, x, w)
        sent = [[product(of[:, rank], by) for of, by in zip(x, w, strict=True)] for rank in range(ranks)]
        return made, [torch.stack(parts) for parts in sent]
    if operator == "embedding_all_to_all":
        rows = torch.stack([mine[:, turn + rank].expand(1, 2, 40) for rank, mine in enumerate(x)])
        return machine.enqueue(operator, x, w, None), [rows] * ranks
    total = summed([product(*pair) for pair in zip(x, w, strict=True)])
    if operator == "all_reduce":
        y = [product(*pair) for pair in zip(x, w, strict=True)]
        kept.append(y)
        return [of.all_reduce(mine) for of, mine in zip(machine.executors, y, strict=True)], [total] * ranks
    if operator == "matmul_reduce_scatter":
        return machine.enqueue(operator, x, w), list(total.chunk(ranks))
    return machine.enqueue("matmul_all_reduce", x, w), [total] * ranks


OPERATORS = (
    *("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "few rows"),
    *("all_reduce", "matmul_all_to_all", "embedding_all_to_all"),
)


@pytest.mark.parametrize("ranks", few([2, 3], 2))
def test_rounds_in_a_row(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits between them but the kernels themselves: ranks are apart by parts of a round."""
    use_schedule(monkeypatch, "64x8c1")
    kept: list[Any] = []
    with emulated(ranks) as machine:
        made = [in_a_row(machine, operator, turn, kept) for operator in OPERATORS for turn in range(4)]
        machine.run()
        for nth, (found, wanted) in enumerate(made):
            for rank, (y, right) in enumerate(zip(found, wanted, strict=True)):
                assert torch.equal(y, right), (nth, rank)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_schedule(monkeypatch, "64x8c1")
    w = torch.ones(128, 64).bfloat16()
    operators = (
        ("all_gather_matmul", 16),
        ("matmul_reduce_scatter", 16),
        ("matmul_all_reduce", 32),
        ("matmul_all_reduce", 3),
        ("all_reduce", 32),
    )
    for operator, rows in operators:
        x = torch.ones(rows, 64).bfloat16()
        with emulated(2) as machine:
            machine.executors[0]._overlap.window.timeout_ns = 2_000_000  # 2000 passes of the machine
            more = (False,) if operator == "all_gather_matmul" else ()
            if operator == "all_reduce":
                machine.executors[0].all_reduce(x)
                machine.run()
            else:
                machine.call(operator, [x], [w], *more)
            record = _native.record(machine.windows[0]._opened.peers.record)
            assert record is not None
            error = error_of(record, {})
            assert isinstance(error, moecomm.Timeout) and error.peer == 1, error
