"""Verified rounds: a row that is not as sent is named on every rank, and no other row is."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.combine import verify as combine_verify
from moecomm.dispatch import verify as dispatch_verify
from moecomm.dispatch.row_hash import hash_rows
from moecomm.rounds.sampling import Sampling
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing.check import check_case_on_rank

from . import flips
from .backends.conftest import run_ranks
from .conftest import Ranks

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 8, "device": "cpu"}


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_found_and_named(seed: int) -> None:
    found = flips.check(seed)
    assert len(found.flips) == flips.FLIPS


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(100, 200, 10))
def test_more_flipped_bits_are_found_and_named(first: int) -> None:
    for seed in range(first, first + 10):
        flips.check(seed)


def flipped_anywhere(seed: int, flips_made: int = 24) -> Counter[str]:
    """Flip bits of all that dispatches write.  Return how often each output differs and no rank raises an error."""
    draw = random.Random(seed)
    cluster = flips.Cluster(flips.Case.of(draw), draw)
    try:
        return Counter(name for number in range(flips_made) for name in cluster.flip_anywhere(number))
    finally:
        cluster.close()


@pytest.mark.parametrize(("first", "last"), [(0, 10), pytest.param(100, 200, marks=pytest.mark.long)])
def test_a_flip_that_goes_unseen_is_in_weights_ids_or_counts(first: int, last: int) -> None:
    """Those are not verified; a wrong weight makes the sum of a combine wrong, too."""
    unseen = sum((flipped_anywhere(seed) for seed in range(first, last)), Counter[str]())
    assert set(unseen) <= {*flips.COUNTS, *flips.ROUTING, "combine"}
    assert unseen["combine"] <= unseen["row_weights"] + unseen["topk_weights"]


def test_rows_that_arrive_as_sent_raise_nothing() -> None:
    assert flips.more_clean_rounds(6, 200) == 200


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_false_alarm_in_ten_thousand_rounds() -> None:
    assert sum(flips.more_clean_rounds(seed, 500) for seed in range(1000, 1020)) == 10_000


@pytest.mark.parametrize("domain_ranks", [2, 4])
def test_verified_rounds_match_the_reference(domain_ranks: int) -> None:
    sizes: dict[str, Any] = {"ranks": 4, "hidden": 64, "num_experts": 10, "topk": 3, "max_tokens": 20}
    sizes["dtype"] = torch.bfloat16
    with LocalBuffers(**sizes, domain_ranks=domain_ranks, device="cpu", verify_every=1) as ranks:
        for seed in range(20):
            check_case(ranks, random_case(seed, **sizes))


def test_nothing_is_kept_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python's collector of cycles does not come, room in the windows is free again all the same."""
    checks: list[weakref.ref[Any]] = []
    for module in (dispatch_verify, combine_verify):

        def checked(*given: Any, make: Callable[..., Any] = module.checked) -> Any:
            check = make(*given)
            checks.append(weakref.ref(check))
            return check

        monkeypatch.setattr(module, "checked", checked)
    gc.collect()
    gc.disable()
    try:
        with moecomm.Buffer("self", **SIZES, dtype=torch.bfloat16, verify_every=1) as buffer:
            x, ids = torch.randn(8, 64).bfloat16(), torch.randint(4, (8, 2))
            routed = buffer.dispatch(x, ids, layout="expert")
            buffer.combine(routed.x, routed.handle)
            assert [check() for check in checks] == [None, None]
    finally:
        gc.enable()


def case(ranks: int = 2, **changes: Any) -> flips.Case:
    how = {"layout": "expert", "quantize": None, "scale_format": "fp32", "scale_layout": "row"}
    settings = {**SIZES, "dtype": torch.bfloat16, "domain_ranks": ranks} | changes
    del settings["device"]
    return flips.Case(ranks, settings, how, {"wire": None}, None, False, False, False)


def test_rounds_that_are_not_sampled_are_not_verified() -> None:
    draw = random.Random(1)
    cluster = flips.Cluster(case(), draw, verify_every=3)
    try:
        found, made = [], []
        for number in range(9):
            with flips.flipping(0, draw, made):
                found.append(type(cluster.dispatch(number)[1]))
            made.clear()
        assert found.count(moecomm.CorruptRow) == 3 == 9 - found.count(moecomm.Routed)
        assert all(found[first : first + 3].count(moecomm.CorruptRow) == 1 for first in (0, 3, 6))
    finally:
        cluster.close()


def test_samples_are_of_every_layer() -> None:
    """Each layer has its rounds verified as often as the others, whatever the number of layers."""
    for every, layers in ((100, 4), (10, 5), (7, 7)):
        sampling = Sampling(every)
        due = [number % layers for number in range(every * 1000) if sampling.due("dispatch", False)]
        counts = [due.count(layer) for layer in range(layers)]
        assert len(due) == 1000 and min(counts) > 0.6 * 1000 / layers
    sampling = Sampling(2)
    assert not sampling.due("dispatch", True), "a replay can't count"


def test_a_buffer_goes_on_after_a_corrupt_row() -> None:
    draw = random.Random(2)
    cluster = flips.Cluster(case(3, num_experts=6), draw)
    try:
        made: list[flips.Row] = []
        with flips.flipping(1, draw, made):
            errors = cluster.dispatch(0)
        assert all(type(error) is moecomm.CorruptRow for error in errors) and len(made) == 1
        assert not any(buffer.failed for buffer in cluster.buffers)
        routed = cluster.dispatch(1)
        for buffer, out in zip(cluster.buffers, cluster.combine(routed), strict=True):
            assert out.shape == (routed[buffer.rank].handle.num_tokens, 64)
    finally:
        cluster.close()


Call = Callable[[moecomm.Buffer, torch.Tensor, torch.Tensor], Any]


def _repeat(buffer: moecomm.Buffer, x: torch.Tensor, ids: torch.Tensor) -> Any:
    routed = buffer.dispatch(x, ids, layout="flat")
    return buffer.dispatch(x, handle=routed.handle)


def _layer(buffer: moecomm.Buffer, x: torch.Tensor, ids: torch.Tensor) -> Any:
    weights = torch.zeros(2, 32, 64, dtype=x.dtype), torch.zeros(2, 64, 16, dtype=x.dtype)
    return buffer.moe(x, ids, torch.ones(ids.shape), *weights)


def _operator(buffer: moecomm.Buffer, x: torch.Tensor, ids: torch.Tensor) -> Any:
    rows, handle = moecomm.ops.dispatch(buffer, x, ids, torch.ones(ids.shape))[:2]
    return rows, handle


def _in_chunks(buffer: moecomm.Buffer, x: torch.Tensor, ids: torch.Tensor) -> Any:
    return buffer.dispatch(x, torch.zeros_like(ids) + torch.tensor([0, 1]))  # all rows to one rank


@pytest.mark.parametrize("call", [_repeat, _layer, _operator, _in_chunks], ids=lambda call: call.__name__[1:])
@pytest.mark.parametrize("flipped", [False, True])
def test_every_way_to_dispatch_is_verified(call: Call, flipped: bool) -> None:
    draw = random.Random(3)
    cluster = flips.Cluster(case(capacity_factor=0.6), draw)
    x, ids = torch.randn(8, 64).bfloat16(), torch.tensor([[0, 2], [1, 3]] * 4)
    try:
        made: list[flips.Row] = [] if flipped else [flips.Row("", 0, 0, 0, 0)]
        with flips.flipping(0, draw, made):
            found = cluster.on_all(lambda buffer: call(buffer, x, ids))
        assert [type(one) is moecomm.CorruptRow for one in found] == [flipped] * 2, found
    finally:
        cluster.close()


def test_a_changed_hash_is_another() -> None:
    draw = random.Random(4)
    rows = torch.randint(0, 256, (64, 48), dtype=torch.uint8)
    scales = torch.randint(0, 256, (64, 3), dtype=torch.uint8)
    before = hash_rows(rows, scales)
    for row in range(len(rows)):
        part = rows if draw.random() < 0.5 else scales
        part[row, draw.randrange(part.shape[1])] ^= 1 << draw.randrange(8)
    assert bool((hash_rows(rows, scales) != before).all())
    swapped = rows[:, torch.randperm(48)]
    assert bool((hash_rows(swapped, scales) != hash_rows(rows, scales)).all())


def test_the_environment_sets_what_no_argument_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_VERIFY_EVERY", "5")
    with moecomm.Buffer("self", **SIZES) as buffer:
        assert buffer.rounds.settings.verify_every == 5
    with moecomm.Buffer("self", **SIZES, verify_every=0) as buffer:
        assert buffer.rounds.settings.verify_every == 0 and buffer.rounds.sampling is None
    monkeypatch.setenv("MOECOMM_VERIFY_EVERY", "often")
    with pytest.raises(moecomm.BadInput, match="MOECOMM_VERIFY_EVERY"):
        moecomm.Buffer("self", **SIZES)


def _flip_between_processes(rank: int, group: Any) -> list[tuple[Any, ...]]:
    ids = torch.tensor([[0, 2]] * 4)  # one expert of each rank
    found = []
    with moecomm.Buffer(group, **SIZES, verify_every=1, timeout_s=20) as buffer:
        x = torch.randn(4, 64).bfloat16()
        routed = buffer.dispatch(x, ids)
        assert buffer.rounds.sampling.tables is not None
        if rank == 0:
            buffer.rounds.sampling.tables.checks.flip_later(1, 0, 3, 77)
        try:
            buffer.combine(routed.x.clone(), routed.handle)
        except moecomm.CorruptRow as error:
            found.append((error.op, error.source, error.destination, error.token_rank, error.token))
        made: list[flips.Row] = []
        with flips.flipping(1, random.Random(0), made):
            try:
                buffer.dispatch(x, ids)
            except moecomm.CorruptRow as error:
                found.append((error.op, error.destination, error.path))
        buffer.combine(buffer.dispatch(x, ids).x, routed.handle)
    return found


def test_processes_name_the_row_alike(ranks: Ranks) -> None:
    expected = [("combine", 1, 0, 0, 3), ("dispatch", 1, "shared memory")]
    assert ranks.run(2, _flip_between_processes) == [expected] * 2


def test_shrunk_ranks_verify_as_before() -> None:
    with moecomm.Buffer("self", **SIZES, verify_every=1) as buffer:
        buffer.shrink()
        routed = buffer.dispatch(torch.randn(4, 64).bfloat16(), torch.tensor([[0, 2]] * 4))
        assert buffer.rounds.sampling.tables is not None
        buffer.rounds.sampling.tables.checks.flip_later(0, 0, 1, 5)
        with pytest.raises(moecomm.CorruptRow, match="combine, round 4: the row of token 1 of rank 0"):
            buffer.combine(routed.x, routed.handle)


@pytest.mark.parametrize("every", [1, 2])
def test_a_combine_between_the_halves_of_a_dispatch_disturbs_none_of_them(every: int) -> None:
    """Rounds that verified it would take the places of the dispatch that has begun."""
    sizes: dict[str, Any] = {"hidden": 64, "num_experts": 10, "topk": 3, "max_tokens": 16, "dtype": torch.bfloat16}
    cases = [case for seed in range(40) if (case := random_case(seed, ranks=4, **sizes)).begin]
    assert len(cases) > 3

    def body(buffer: moecomm.Buffer) -> int:
        for case in cases:
            check_case_on_rank(buffer, case)
        return sum(entry["profiling_name"] == "moecomm:verify" for entry in buffer.flight_record()["entries"])

    with (
        LocalBuffers(4, **sizes, backend="host", timeout_s=20.0, verify_every=every) as ranks,
        ThreadPoolExecutor(4) as pool,
    ):
        assert min(pool.map(body, ranks.buffers)) > len(cases)


def test_the_first_of_several_corrupt_rows_is_named() -> None:
    """To rank 0 all rows of rank 1, of tokens 2 to 7, look changed: their hashes are not where it looks for them."""
    with LocalBuffers(2, **SIZES, verify_every=1) as ranks:
        x, ids = torch.ones(8, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2 + [[0, 2]] * 6)
        routed = ranks.dispatch([{"x": x, "topk_idx": ids}] * 2)
        rounds = ranks.buffers[0].rounds
        assert rounds.sampling.tables is not None
        shape = rounds.session.context.shape
        blank = [torch.zeros(_native.RowChecks.table_bytes(shape), dtype=torch.uint8) for _ in range(2)]
        rounds.sampling.tables.checks = _native.RowChecks(shape, 0, [table.data_ptr() for table in blank])
        with pytest.raises(moecomm.CorruptRow) as caught:
            ranks.combine([{"y": one.x, "handle": one.handle} for one in routed])
        assert (caught.value.source, caught.value.token_rank, caught.value.token) == (1, 0, 2)


def test_ranks_of_one_thread_verify_combines_as_well() -> None:
    with LocalBuffers(2, **SIZES, verify_every=1) as ranks:
        x, ids = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 2], [1, 3]])
        routed = ranks.dispatch([{"x": x, "topk_idx": ids}] * 2)
        before = ranks.buffers[0].rounds.flight.rounds
        ranks.combine([{"y": one.x, "handle": one.handle} for one in routed])
        assert ranks.buffers[0].rounds.flight.rounds == before + 2  # and the one that tells the result


def run_rounds(buffer: moecomm.Buffer, count: int) -> list[str]:
    """Make rounds; return "right", "wrong" or the name of the error of each."""
    x, ids = torch.randn(8, 64), torch.arange(16).view(8, 2) % buffer.num_experts
    found = []
    for _ in range(count):
        try:
            routed = buffer.dispatch(x, ids)
            right = torch.equal(buffer.combine(routed.x, routed.handle), 2 * x)
            found.append("right" if right else "wrong")
        except moecomm.MoecommError as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_a_rank_that_is_taken_in_again_verifies_the_rounds_of_the_others(every: int) -> None:
    meet = threading.Barrier(3)

    def body(group: Any) -> list[str]:
        sizes = {**SIZES, "num_experts": 6, "dtype": torch.float32}
        with moecomm.Buffer(group, **sizes, verify_every=every, timeout_s=20) as buffer:
            found = run_rounds(buffer, 2)
            meet.wait(60)
            if group.rank < 2:
                buffer.mask([2])
                for _ in range(3):
                    buffer.dispatch(torch.ones(8, 64), torch.zeros(8, 2, dtype=torch.int64))
            meet.wait(60)
            buffer.unmask([2])
            found += run_rounds(buffer, 2 * every + 2)
            meet.wait(60)
            return found

    assert run_ranks(3, body) == [["right"] * (2 * every + 4)] * 3


@pytest.mark.parametrize("every", [1, 2])
def test_memory_is_released_although_rounds_are_verified(every: int) -> None:
    def body(group: Any) -> list[str]:
        with moecomm.Buffer(group, **SIZES, dtype=torch.float32, verify_every=every, timeout_s=20) as buffer:
            found = []
            for _ in range(2):
                found += run_rounds(buffer, 4)
                buffer.release_memory()
                buffer.restore()
            routed = buffer.dispatch(torch.ones(8, 64), torch.zeros(8, 2, dtype=torch.int64))
            with pytest.raises(moecomm.BadInput, match="still referenced"):
                buffer.release_memory()
            del routed
            return found

    assert run_ranks(2, body) == [["right"] * 8] * 2


def test_a_call_that_fails_alike_leaves_the_samples_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has counted the round when it fails, and another has not."""

    def body(group: Any) -> list[str]:
        with moecomm.Buffer(group, **SIZES, dtype=torch.float32, verify_every=2, timeout_s=20) as buffer:
            run_rounds(buffer, 1)
            x, ids = torch.ones(8, 64), torch.zeros(8, 2, dtype=torch.int64)
            for _ in range(3):
                if group.rank == 0:
                    with pytest.raises(moecomm.BadInput):
                        buffer.dispatch(x.double(), ids)
                    continue
                memory = buffer.rounds.memory
                scratch = memory.scratch  # which only verified rounds take

                def fails(nbytes: int) -> Any:
                    raise moecomm.BadInput("window_bytes", "no room", "more")

                memory.scratch = fails  # type: ignore[method-assign]
                try:
                    buffer.dispatch(x, ids)
                except moecomm.BadInput:
                    pass
                else:
                    raise AssertionError("the round is verified")
                finally:
                    memory.scratch = scratch  # type: ignore[method-assign]
            return run_rounds(buffer, 6)

    assert run_ranks(2, body) == [["right"] * 6] * 2
