"""fused=None: the first layer of a kind measures both forms, and all ranks take one.  On CPU ranks with two forms.

What tables say of layers is in test_fused_from.py.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.fused import forms
from moecomm.gpu import tuning
from moecomm.gpu.tuning import Table
from moecomm.gpu.tuning.layers import Kind
from moecomm.testing import LayerCase, random_layer

from ..backends.conftest import all_ranks, run_ranks
from ..conftest import Ranks
from ..few import few
from ..live import ROOM_S
from .two_forms import Costs, TwoForms

SIZES: dict[str, Any] = {"hidden": 32, "num_experts": 6, "topk": 2, "max_tokens": 24}
OPTIONS: dict[str, Any] = {"backend": "host", "timeout_s": 20}
INNER, ONCE = 16, 29  # layers of each form in a measurement: a first one, and seven runs of four
FAST, SLOW = {"fused": 1.0, "unfused": 2.0}, {"fused": 2.0, "unfused": 1.0}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path / "cache"))
    tuning.forget()
    yield
    tuning.forget()


def case_of(seed: int, ranks: int, inner: int = INNER) -> LayerCase:
    return random_layer(seed, ranks=ranks, intermediate=inner, **SIZES, dtype=torch.bfloat16)


def call(buffer: moecomm.Buffer, case: LayerCase, **options: Any) -> torch.Tensor:
    """Call a layer, and compare it with float64."""
    out: torch.Tensor = buffer.moe(**{**case.call(buffer.rank), **options})
    case.check(buffer.rank, out)
    return out


@pytest.mark.parametrize(
    ("first", "second", "form"),
    [
        (FAST, {"fused": 5.0, "unfused": 4.0}, "unfused"),
        ({"fused": 4.0, "unfused": 1.0}, {"fused": 1.0, "unfused": 5.0}, "fused"),
        ({"fused": 2.0, "unfused": 2.0}, FAST, "unfused"),  # the tables know no CPU
        ({"fused": 2.0, "unfused": 2.01}, FAST, "fused"),
    ],
)
def test_the_slowest_rank_decides_for_all(
    first: Costs, second: Costs, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = TwoForms(monkeypatch.setattr, lambda rank: (first, second)[rank])
    us = {name: max(first[name], second[name]) for name in first}

    def body(group: Any) -> tuple[list[list[str]], int]:
        made = []
        with moecomm.Buffer(group, **SIZES, **OPTIONS) as buffer:
            want = call(buffer, case_of(0, 2), fused=False)
            two.forms_of(group.rank)
            for _ in range(3):
                assert torch.equal(call(buffer, case_of(0, 2)), want)
                made.append(two.forms_of(group.rank))
            return made, buffer.rounds.flight.rounds

    (made, rounds), other = all_ranks(2, body)
    assert other == (made, rounds), "as many rounds on each rank"
    assert made[0][0] == "unfused" and sorted(made[0][1:]) == sorted(("fused", "unfused") * ONCE)
    assert made[1:] == [[form]] * 2
    (kept,) = tuning.users("a GPU").forms
    assert (kept.fused, kept.us) == (form == "fused", us)
    assert kept.kind == Kind("0.1.0", "host", "bfloat16", "bfloat16", 2, 6, 2, 32, 16, 32)._asdict()


def test_each_kind_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have different numbers of tokens, some none, and other kinds of tensors each time."""
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, **OPTIONS) as buffer:
            for seed in range(8):
                call(buffer, case_of(seed, 3))
            call(buffer, case_of(9, 3, inner=24))
            assert len(buffer.rounds.layer_forms) == 2
        with moecomm.Buffer(group, **{**SIZES, "max_tokens": 12}, **OPTIONS) as buffer:
            case = case_of(0, 3)
            tokens = {name: case.call(group.rank)[name][:12] for name in ("x", "topk_idx")}
            buffer.moe(**tokens, topk_weights=None, w13=case.call(group.rank)["w13"], w2=case.call(group.rank)["w2"])

    all_ranks(3, body)
    assert sorted(two.measurements) == [0] * 3 + [1] * 3 + [2] * 3
    assert [line.kind["intermediate"] for line in tuning.users("a GPU").forms] == [16, 24, 16]


def test_one_rank_measures_for_the_tokens_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)
    case = case_of(0, 1).call(0)
    with moecomm.Buffer("self", **SIZES, **OPTIONS) as buffer:
        for tokens in (1, 3, 4, 0, 20, 24):
            for _ in range(2):
                x, ids = torch.zeros(tokens, 32).bfloat16(), torch.zeros(tokens, 2, dtype=torch.int64)
                buffer.moe(x, ids, None, case["w13"], case["w2"])
    assert [line.kind["tokens"] for line in tuning.users("a GPU").forms] == [1, 4, 32]
    assert len(two.measurements) == 3


def test_a_capture_takes_what_is_known_or_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)
    found = []
    with moecomm.Buffer("self", **SIZES, **OPTIONS) as buffer:
        case = case_of(0, 1)
        for two.capturing in (True, True, False, True):
            call(buffer, case)
            found.append(two.forms_of(0)[-1])
            assert bool(two.measurements) == (len(found) > 2)
        buffer.rounds.layer_forms.clear()
        buffer.rounds.origin = buffer.rounds.origin._replace(fused_weights={torch.bfloat16: True})
        case = case_of(1, 1)
        call(buffer, case)
        found.append(two.forms_of(0)[-1])
    assert found == ["unfused", "unfused", "fused", "fused", "fused"] and len(two.measurements) == 1


@pytest.mark.parametrize("other", [{"fused": False}, {"fused": True}])
def test_ranks_that_pass_another_fused_are_told(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)

    def body(group: Any) -> Any:
        with moecomm.Buffer(group, **SIZES, **OPTIONS) as buffer:
            call(buffer, case_of(0, 2), **(other if group.rank else {}))

    found = run_ranks(2, body)
    assert [type(error) for error in found] == [moecomm.Mismatch] * 2 and not two.measurements
    assert [error.field for error in found] == ["call"] * 2 and found[0].mine == "moe that measures"


def test_a_rank_without_room_for_a_full_batch_keeps_all_from_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)
    two.full = {1}

    def body(group: Any) -> list[str]:
        with moecomm.Buffer(group, **SIZES, **OPTIONS) as buffer:
            for _ in range(3):
                call(buffer, case_of(0, 2))
            return two.forms_of(group.rank)

    assert all_ranks(2, body) == [["unfused"] * 3] * 2
    assert sorted(two.measurements) == [0, 1] and tuning.users("a GPU") == Table()


def test_a_buffer_with_less_room_than_even_routing_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer goes in parts, or has room; a full batch has none."""
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, **OPTIONS, capacity_factor=0.3) as buffer:
            for seed in range(6):
                call(buffer, case_of(seed, 3))
            assert set(buffer.rounds.layer_forms.values()) <= {False}

    all_ranks(3, body)
    assert len(two.measurements) <= 3 and tuning.users("a GPU") == Table()


def test_a_buffer_with_room_for_even_routing_alone_measures_that(monkeypatch: pytest.MonkeyPatch) -> None:
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)
    sizes = {**SIZES, "max_tokens": 240}
    case = random_layer(0, ranks=2, intermediate=INNER, **{**sizes, "max_tokens": 9}, dtype=torch.bfloat16)

    def body(group: Any) -> list[str]:
        with moecomm.Buffer(group, **sizes, **OPTIONS, capacity_factor=1.0) as buffer:
            for _ in range(2):
                call(buffer, case)
            assert set(buffer.rounds.layer_forms.values()) == {True}
            return two.forms_of(group.rank)

    for made in all_ranks(2, body):
        assert made[0] == "unfused" and made[-1] == "fused" and made.count("fused") == ONCE + 1
    assert sorted(two.measurements) == sorted(two.even) == [0, 1]


def test_rows_without_room_are_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, **OPTIONS) as buffer:
            given = case_of(0, 2).call(group.rank) | {"x": torch.zeros(24, 32).bfloat16(), "bias": None}
            given |= {"topk_idx": torch.zeros(24, 2, dtype=torch.int64), "topk_weights": None}
            with pytest.raises(moecomm.TooManyRows):
                buffer.moe(**given, overflow="error", max_rows=4)
            assert not two.measurements
            given["overflow"] = "drop"
            dropped = torch.zeros(1, dtype=torch.int32)
            buffer.moe(**given, max_rows=4, dropped=dropped)
            assert dropped > 0 and len(buffer.rounds.layer_forms) == 1
            call(buffer, case_of(1, 2))

    all_ranks(2, body)
    assert sorted(two.measurements) == [0, 1]


def test_an_error_of_one_rank_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(rank: int) -> Costs:
        if rank == 1:
            raise RuntimeError("an error of torch")
        return FAST

    TwoForms(monkeypatch.setattr, costs)

    def body(group: Any) -> list[str]:
        found = []
        with moecomm.Buffer(group, **SIZES, **OPTIONS) as buffer:
            for _ in range(2):
                with pytest.raises((RuntimeError, moecomm.MoecommError)) as caught:
                    call(buffer, case_of(0, 2))
                found.append(caught.type.__name__)
        return found

    assert all_ranks(2, body) == [["OutOfStep", "OutOfStep"], ["RuntimeError", "OutOfStep"]]


def test_an_interrupt_ends_the_waits_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(rank: int) -> Costs:
        if rank == 1:
            raise KeyboardInterrupt
        return FAST

    TwoForms(monkeypatch.setattr, costs)

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES, **OPTIONS) as buffer:
            call(buffer, case_of(0, 2))

    begun = time.monotonic()
    assert [type(error) for error in run_ranks(2, body)] == [moecomm.Aborted, KeyboardInterrupt]
    assert time.monotonic() - begun < ROOM_S


def test_the_callers_random_numbers_and_modes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    TwoForms(monkeypatch.setattr, lambda rank: FAST)
    with moecomm.Buffer("self", **SIZES, **OPTIONS) as buffer:
        torch.manual_seed(1)
        want = torch.rand(3)
        torch.manual_seed(1)
        call(buffer, case_of(0, 1))
        assert torch.equal(torch.rand(3), want)
        with torch.inference_mode():
            call(buffer, case_of(0, 1, inner=24))
        with torch.autocast("cpu", torch.float16):
            call(buffer, case_of(0, 1, inner=8))
        assert len(buffer.rounds.layer_forms) == 3


def test_gradients_verified_rounds_placements_and_kept_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)
    placement = moecomm.Placement([[0, 1, 2, 5], [3, 4, 5, 0]])

    def body(group: Any) -> int:
        kept: list[Any] = []
        for options in ({"verify_every": 1}, {"placement": placement}, {"verify_every": 3}):
            two.forms_of(group.rank)
            with moecomm.Buffer(group, **SIZES, **OPTIONS, **options) as buffer:
                held = list(range(3 * group.rank, 3 * group.rank + 3))
                if "placement" in options:
                    held = list(placement.held[group.rank])
                case = case_of(0, 2)
                w13, w2 = (w[held].clone().requires_grad_() for w in (case.w13, case.w2))
                given = {name: case.call(group.rank)[name] for name in ("x", "topk_idx", "topk_weights")}
                for _ in range(3):
                    out = moecomm.ops.moe(buffer, **given, w13=w13, w2=w2)
                    out.float().sum().backward()
                    kept.append(buffer.dispatch(given["x"], given["topk_idx"]))
                buffer.check()
                assert set(two.forms_of(group.rank)[-2:]) == {"fused"}
                assert len(buffer.rounds.layer_forms) == 1
        return len(kept)

    assert all_ranks(2, body) == [9, 9]


def test_fewer_ranks_measure_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    two = TwoForms(monkeypatch.setattr, lambda rank: FAST)

    def body(group: Any) -> list[int]:
        buffer = moecomm.Buffer(group, **SIZES, **{**OPTIONS, "timeout_s": 2})
        call(buffer, case_of(0, 3))
        if group.rank == 2:
            buffer.close()
            return []
        buffer.shrink()
        call(buffer, case_of(0, 2))
        found = [kind.ranks for kind in buffer.rounds.layer_forms]
        buffer.close()
        return found

    assert all_ranks(3, body) == [[2], [2], []]
    assert sorted(two.measurements) == [0, 0, 1, 1, 2]
    assert [line.kind["ranks"] for line in tuning.users("a GPU").forms] == [3, 2]


def _killed(rank: int, group: Any, moment: str, masks: bool) -> Any:
    """Rank 1 is killed in a measurement; return what another rank raised, and when, and forms of its layers."""

    def costs(_: int) -> Costs:
        if rank == 1 and moment == "rounds":
            os.kill(os.getpid(), signal.SIGKILL)
        return FAST

    def exchange(rounds: Any, mine: bytes, before: Any = forms._exchange) -> Any:
        if rank == 1 and moment == ("room" if len(mine) == 1 else "times"):
            os.kill(os.getpid(), signal.SIGKILL)
        return before(rounds, mine)

    two = TwoForms(setattr, costs)
    forms._exchange = exchange
    options = {**OPTIONS, "on_timeout": "mask"} if masks else OPTIONS
    begun = time.monotonic()
    with moecomm.Buffer(group, **SIZES, **options) as buffer:
        raised = []
        try:
            buffer.moe(**case_of(0, 3).call(rank))
        except moecomm.PeerLost as error:
            raised.append((error.peer, error.rank))
        took = time.monotonic() - begun
        if not masks:
            buffer.shrink()
        two.made.clear()
        case = case_of(3, 3 if masks else 2).call(rank if masks else min(rank, 1))
        buffer.moe(**case)
        return raised, took < ROOM_S, two.forms_of(buffer.rank), buffer.masked


@pytest.mark.parametrize(
    ("moment", "masks"), few(itertools.product(("room", "rounds", "times"), (False, True)), ("rounds", True))
)
def test_survivors_of_a_measurement_name_the_rank_and_go_on(computing_ranks: Ranks, moment: str, masks: bool) -> None:
    computing_ranks.start(3, _killed, moment, masks)
    found = computing_ranks.results(2)
    assert sorted(found) == [0, 2]
    for rank, result in found.items():
        raised, in_time, made, masked = result
        assert in_time and made[0] == "unfused", result
        assert masked == ((1,) if masks else ())
        if not masks or raised:
            assert raised == [(1, rank)]
    if masks:
        assert bool(found[0][0]) == bool(found[2][0]), "all raise, or none"


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(("ranks", "topk", "experts"), [(1, 2, 5), (3, 4, 12), (2, 7, 7)])
def test_a_full_batch_is_even_or_random(ranks: int, topk: int, experts: int, even: bool) -> None:
    for rank in range(ranks):
        rounds: Any = SimpleNamespace(
            rank=rank,
            max_tokens=60,
            device=torch.device("cpu"),
            placement=None,
            topk=topk,
            num_experts=experts,
            hidden=8,
            dtype=torch.bfloat16,
        )
        x, ids, weights = forms.full_batch(rounds, Kind("", "", "", "", ranks, experts, topk, 8, 8, 64), even)
        assert x.shape == (60, 8) and weights.shape == ids.shape == (60, topk) and ids.dtype == torch.int64
        assert all(len(set(row)) == topk for row in ids.tolist())
        counts = torch.bincount(ids.flatten(), minlength=experts)
        assert len(counts) == experts
        assert (counts.max() - counts.min() <= 1) == (even or topk == experts)
