"""The unfused forms, which GPUs use, over Windows of CPU ranks: by copies, by collectives, and by a kernel for sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm.overlap import exchanges, local, sizes
from moecomm.overlap.agreement import BYTES, FirstCalls
from moecomm.overlap.exchanges import Copies, collectives_of
from moecomm.overlap.unfused import UnfusedExecutor

from ..backends.conftest import all_ranks
from ..conftest import Ranks
from .cases import FP8, HOST, OPERATORS, PRODUCTS, Case, gathers, random_case, same

BEGIN, ROOM = 512, 1 << 16


def on_windows(ranks: int, body: Any) -> list[Any]:
    def run(group: Any) -> Any:
        with moecomm.Window(group, ROOM + BYTES, **HOST) as window:
            return body(window)

    return all_ranks(ranks, run)


def run(executor: UnfusedExecutor, case: Case, rank: int) -> torch.Tensor:
    given = dict(case.given[rank])
    if case.operator == "all_gather_matmul":
        y, gathered = executor.all_gather_matmul(**given, gather=True)
        assert gathered is not None and gathers(gathered, case)
        alone, nothing = executor.all_gather_matmul(**given, gather=False)
        assert torch.equal(alone, y) and nothing is None
        return y
    if case.operator == "embedding_all_to_all":
        given.setdefault("offsets", None)  # type: ignore[arg-type]
    found: torch.Tensor = getattr(executor, case.operator)(**given)
    return found


@pytest.mark.parametrize("one_shot_bytes", [1 << 20, 0])
@pytest.mark.parametrize(
    ("operator", "dtype"), [*((name, None) for name in OPERATORS), *((name, FP8) for name in PRODUCTS)]
)
def test_the_unfused_form_has_the_bits_of_the_reference(
    operator: str, dtype: torch.dtype | None, one_shot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "_ONE_SHOT_BYTES", one_shot_bytes)  # of all-reduces
    for ranks in (1, 2, 5):
        cases = [random_case(operator, ranks, seed, dtype=dtype) for seed in range(12)]
        wanted = [case.want() for case in cases]

        def body(window: moecomm.Window, cases: list[Case] = cases) -> list[torch.Tensor]:
            executor = UnfusedExecutor(Copies(window, range(BEGIN, ROOM)))
            return [run(executor, case, window.rank) for case in cases]

        for rank, found in enumerate(on_windows(ranks, body)):
            for seed, (got, want, case) in enumerate(zip(found, wanted, cases, strict=True)):
                assert same(got, want[rank], case.dtype), f"rank {rank} of {ranks}, seed {seed}"


def _by_collectives(rank: int, group: Any) -> list[str]:
    """Run random calls by the collectives of gloo; return those with other bits than the reference."""
    exchanges._LIBRARIES["cpu"] = "gloo"
    wrong = []
    with moecomm.Window(group, 4096, **HOST) as window:
        exchange = collectives_of(window)
        assert exchange is not None
        executor = UnfusedExecutor(exchange)
        for operator in OPERATORS:
            if window.num_ranks > 2 and operator in SUMS:
                continue  # a sum of three has the order of the library
            for seed in range(12):
                for dtype in (None, FP8) if operator in PRODUCTS else (None,):
                    case = random_case(operator, window.num_ranks, seed, dtype=dtype)
                    if not same(run(executor, case, rank), case.want()[rank], case.dtype):
                        wrong.append(f"{operator}, {dtype}, seed {seed}")
        window.close()
        with pytest.raises(moecomm.Closed):
            executor.all_to_all(torch.ones(window.num_ranks, 3))
    return wrong


SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")


@pytest.mark.parametrize("count", [2, 3])
def test_collectives_have_the_bits_of_the_reference(ranks: Ranks, count: int) -> None:
    assert ranks.run(count, _by_collectives) == [[]] * count


def _which_groups(rank: int, group: Any) -> list[bool]:
    found = []
    for library in ("nccl", "gloo"):
        exchanges._LIBRARIES["cpu"] = library
        with moecomm.Window(group, 4096, **HOST) as window:
            found.append(collectives_of(window) is not None)
    with moecomm.Window("self", 4096, **HOST) as window:
        found.append(collectives_of(window) is not None)
    return found


def test_collectives_are_those_of_the_library_for_the_device(ranks: Ranks) -> None:
    """On GPUs that is NCCL; threads and a rank alone have no process group."""
    assert set(exchanges._LIBRARIES) == {"cuda"}
    assert ranks.run(2, _which_groups) == [[False, True, False]] * 2
    assert on_windows(2, collectives_of) == [None, None]


def test_no_room_names_the_bytes() -> None:
    def body(window: moecomm.Window) -> None:
        executor = UnfusedExecutor(Copies(window, range(4096 - BYTES)))
        with pytest.raises(moecomm.BadInput, match="nbytes: got 65664; want at least 65792"):
            executor.all_to_all(torch.zeros(2, 1000, dtype=torch.bfloat16))
        executor.all_to_all(torch.zeros(2, 992, dtype=torch.bfloat16))

    on_windows(2, body)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_rank_alone_needs_no_memory(operator: str) -> None:
    for seed in range(8):
        case = random_case(operator, 1, seed)
        with moecomm.Window("self", 4096, **HOST) as window:
            executor = UnfusedExecutor(Copies(window, range(0)))
            assert same(run(executor, case, 0), case.want()[0], case.dtype), f"seed {seed}"


def test_an_all_reduce_of_its_own_is_used_where_it_takes_the_sum() -> None:
    case = random_case("matmul_all_reduce", 2, 0)

    def body(window: moecomm.Window) -> list[torch.Tensor]:
        given: list[torch.Tensor] = []
        for takes in (True, False):
            executor = UnfusedExecutor(Copies(window, range(BEGIN, ROOM)), sums := Sums(takes))
            found = run(executor, case, window.rank)
            assert takes or same(found, case.want()[window.rank], case.dtype)
            assert not takes or found is sums.given[0]
            given += sums.given
        return given

    assert len(on_windows(2, body)[0]) == 2


class Sums:
    """Stands for the all-reduce of a GPU; it returns its argument, or takes none."""

    def __init__(self, takes: bool) -> None:
        self.takes, self.given = takes, list[torch.Tensor]()

    def __call__(self, y: torch.Tensor) -> torch.Tensor | None:
        self.given.append(y)
        return y if self.takes else None


def test_first_calls_are_compared() -> None:
    """Each kind of call once.  What a rank has compared it does not compare again, so it meets the next call of others:
    the second of rank 0 meets the third of rank 1, and differs; its third meets the fourth.
    """
    x, w = torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(5, 3, dtype=torch.bfloat16)
    one, two = sizes.all_gather_matmul(2, x, w), sizes.matmul_all_reduce(2, x, w)
    wide = sizes.matmul_all_reduce(2, x, torch.zeros(6, 3, dtype=torch.bfloat16))

    def body(window: moecomm.Window) -> list[Any]:
        calls, said = FirstCalls(window, ROOM), []
        for mine in (one, (two, one)[window.rank], (two, wide)[window.rank], two):
            try:
                calls.check(mine, 0)
            except moecomm.Mismatch as error:
                said.append((error.field, error.mine, error.rank))
        if window.rank == 0:
            calls.check(two, 0)
        with pytest.raises(moecomm.OutOfStep):
            calls.check(wide, window.rank)
        return said

    assert on_windows(2, body) == [[("N", 5, 1)], [("N", 6, 0)]]


def test_whether_a_call_is_fused_is_compared() -> None:
    """N decides it and need not be agreed on, except where a call may be fused."""
    x = torch.zeros(4, 8, dtype=torch.bfloat16)

    def body(window: moecomm.Window) -> list[Any]:
        calls, said = FirstCalls(window, ROOM), []
        w = torch.zeros(8 + window.rank, 8, dtype=torch.bfloat16)
        own, another = sizes.all_gather_matmul(2, x, w), sizes.all_gather_matmul(2, x[:3], w)
        calls.check(own, 0, fused=False)
        for call, fused in ((own, (None, None)), (own, (True, True)), (another, (True, False))):
            try:
                calls.check(call, 0, fused=fused[window.rank])
            except moecomm.Mismatch as error:
                said.append((error.field, error.mine))
        return said

    first, second = on_windows(2, body)
    assert first == [("N", 8), ("N", 8), ("fused", True)]
    assert second == [("N", 9), ("N", 9), ("fused", False)]


@pytest.mark.parametrize("dtype", sizes.TABLE_DTYPES)
def test_bags_by_embedding_bag_are_those_of_sums(dtype: torch.dtype) -> None:
    """Add integers whose sums have no rounding.  The path of GPUs, with indices of no row."""
    for seed in range(30):
        given = random_case("embedding_all_to_all", 1, seed, dtype=dtype).given[0]
        tables, indices, offsets = given["tables"], given["indices"], given.get("offsets")
        batch = indices.shape[1] if offsets is None else (len(offsets) - 1) // max(len(tables), 1)
        if not (tables.shape[1] and indices.numel() and tables.numel()):
            continue
        indices = torch.where(indices == 0, tables.shape[1] + 3, indices)
        want = local.bag_sums(tables, indices, offsets, batch)
        assert torch.equal(local.bag_sums_by_torch(tables, indices, offsets, batch), want), f"seed {seed}"
