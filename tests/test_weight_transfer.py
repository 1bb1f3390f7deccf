"""Weights of experts move from the ranks that train them to those that serve them, all of them or none."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import moecomm
from moecomm import Placement, formats
from moecomm.errors import (
    Aborted,
    BadInput,
    Closed,
    ConcurrentCall,
    CorruptWeights,
    Mismatch,
    PeerLost,
    RoundFailed,
    Timeout,
    Unsupported,
)
from moecomm.fused import quantize_channels, quantize_weights
from moecomm.ranks.board import LocalBoard
from moecomm.ranks.opening import Opening
from moecomm.testing.cases import random_placement
from moecomm.transfer import WeightTransfer, ranks_over
from moecomm.transfer.records import Records
from moecomm.transfer.routes import routes_of

from .backends.conftest import all_ranks, run_ranks
from .conftest import Ranks
from .few import few

EXPERTS = 6
CASTS = (None, torch.float32, torch.float16, "fp8", "fp8_token", "int8_token", "int8_group", "mxfp8", "nvfp4", "mxfp4")
Tensors = dict[str, tuple[torch.Tensor, ...]]


def beside(ranks: Sequence[int], of: int, seed: int, slots: int) -> Placement:
    """A random placement of some of `of` ranks."""
    drawn = random_placement(seed, ranks=len(ranks), num_experts=EXPERTS, slots=slots)
    held: list[list[int]] = [[] for _ in range(of)]
    for rank, row in zip(ranks, drawn.experts.tolist(), strict=True):
        held[rank] = row
    return Placement(held, num_experts=EXPERTS)


def whole_cast(w: torch.Tensor, cast: Any) -> tuple[torch.Tensor, ...]:
    """Cast the tensors of all experts by the specification."""
    if cast is None or isinstance(cast, torch.dtype):
        return (w if cast is None else w.to(cast),)
    if cast == "fp8":
        return tuple(quantize_weights(w))
    if cast in ("fp8_token", "int8_token"):
        return tuple(quantize_channels(w, torch.int8 if cast == "int8_token" else torch.float8_e4m3fn))
    factors = w.float().flatten(1).abs().amax(1).clamp(min=1e-30) / 2688
    globals_ = [{"global_scale": 2688 / (2688 * float(f))} if cast == "nvfp4" else {} for f in factors]
    if cast == "nvfp4":
        amax = w.float().flatten(1).abs().amax(1).clamp(min=1e-30)
        given = torch.full_like(amax, 2688.0) / amax
        globals_ = [{"global_scale": given[n : n + 1]} for n in range(len(w))]
    cuts = [formats.quantize(m.flatten(0, -2), cast, **g) for m, g in zip(w, globals_, strict=True)]
    values, scales = (torch.stack([cut[n] for cut in cuts]) for n in range(2))
    values, scales = (t.view(*w.shape[:-1], -1) for t in (values, scales))
    return (values, scales, given.reciprocal()) if cast == "nvfp4" else (values, scales)


class Model:
    """The weights of all experts, which change from step to step, and what arrives of them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, cast: Any, seed: int) -> None:
        self.shapes, self.dtype, self.cast, self.seed = shapes, dtype, cast, seed

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(1000 * self.seed + step)
        return {name: torch.randn(EXPERTS, *shape, generator=g).to(self.dtype) for name, shape in self.shapes.items()}

    def given(self, step: int, held: Sequence[int]) -> dict[str, torch.Tensor] | None:
        """The tensors of a trainer; slots without an expert hold anything."""
        if all(expert < 0 for expert in held):
            return None
        rows = torch.tensor(list(held)).clamp(min=0)
        return {name: w[rows] for name, w in self.weights(step).items()}

    def arrived(self, step: int) -> Tensors:
        return {name: whole_cast(w, self.cast) for name, w in self.weights(step).items()}

    def room(self, held: Sequence[int]) -> Tensors:
        """The tensors of a rank that serves, before the first weights."""
        return {
            name: tuple(torch.zeros(len(held), *part.shape[1:], dtype=part.dtype) for part in parts)
            for name, parts in self.arrived(0).items()
        }

    def check(self, found: Tensors, held: Sequence[int], step: int) -> None:
        for name, parts in self.arrived(step).items():
            for mine, whole in zip(found[name], parts, strict=True):
                for slot, expert in enumerate(held):
                    want = whole[expert] if expert >= 0 else torch.zeros_like(whole[0])
                    assert torch.equal(_bytes(mine[slot]), _bytes(want)), (name, slot, expert)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def passed(held: Sequence[int], tensors: Tensors) -> Tensors | None:
    """`into=` of a rank: None if it has no slot in use."""
    return None if all(expert < 0 for expert in held) else tensors


@pytest.mark.parametrize("seed", few(range(60), 10))
def test_random_transfers_leave_what_the_specification_casts(seed: int) -> None:
    """Sets of ranks overlap or not, experts have replicas on both sides, and shapes divide by nothing."""
    rng = random.Random(f"transfer {seed}")
    of = rng.randint(2, 5)
    trainers, servers = (sorted(rng.sample(range(of), rng.randint(1, of))) for _ in range(2))
    cast = CASTS[seed % len(CASTS)]
    even = cast in ("nvfp4", "mxfp4")
    shapes: dict[str, tuple[int, ...]] = {
        f"w{n}": (rng.choice([1, 3, 40, 130]), rng.choice([2, 34, 136, 200]) - (0 if even else rng.randint(0, 1)))
        for n in range(rng.randint(1, 3))
    }
    if cast is None:
        shapes |= {"bias": (rng.randint(1, 9),), "scalar": (), "empty": (0, 3)}
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    if cast is None:
        dtype = rng.choice([dtype, torch.float8_e4m3fn, torch.int64])
    model = Model(shapes, dtype, cast, seed)
    source = beside(trainers, of, 2 * seed, -(-EXPERTS // len(trainers)) + rng.randint(0, 2))
    target = beside(servers, of, 2 * seed + 1, -(-EXPERTS // len(servers)) + rng.randint(0, 2))
    steps = rng.randint(1, 4)
    skips = {step for step in range(1, steps) if rng.random() < 0.3}  # nobody commits these

    def body(group: Any) -> None:
        have, want = source.held[group.rank], target.held[group.rank]
        found, now = model.room(want), 0
        how: dict[str, Any] = {"source": source, "target": target, "dtype": dtype, "cast": cast}
        with WeightTransfer(group, shapes, **how, backend="host", timeout_s=20) as transfer:
            for step in range(1, steps + 1):
                transfer.stage(model.given(step, have))
                if now:
                    model.check(found, want, now)
                if step in skips:
                    continue
                transfer.commit(passed(want, found))
                assert not transfer.staged or passed(want, found) is None
                now = step
                model.check(found, want, now)

    all_ranks(of, body)


@pytest.mark.parametrize("seed", range(200))
def test_a_rank_reads_only_what_it_lacks_and_an_expert_is_cast_once_for_all_readers(seed: int) -> None:
    rng = random.Random(seed)
    of = rng.randint(1, 6)
    trainers, servers = (sorted(rng.sample(range(of), rng.randint(1, of))) for _ in range(2))
    source = beside(trainers, of, 2 * seed, -(-EXPERTS // len(trainers)) + rng.randint(0, 2))
    target = beside(servers, of, 2 * seed + 1, -(-EXPERTS // len(servers)) + rng.randint(0, 2))
    routes = routes_of(source, target)
    senders: dict[int, set[int]] = {}
    for rank, route in enumerate(routes):
        assert set(route.reads) == set(target.held[rank]) - {-1} == set(route.slots)
        for expert, sender in route.reads.items():
            assert (sender == rank) == (expert in source.held[rank])
            assert expert in routes[sender].casts
            if sender != rank:
                senders.setdefault(expert, set()).add(sender)
        for expert, row in route.casts.items():
            assert source.held[rank][row] == expert
        assert sorted(route.places.values()) == list(range(len(route.places)))
        assert set(route.places) == set(route.slots) | set(route.casts)
    assert all(len(some) == 1 for some in senders.values())
    for rank, route in enumerate(routes):  # a rank casts for itself, or for the readers of an expert
        for expert in route.casts:
            assert expert in route.slots or senders[expert] == {rank}


APART = Placement([[0, 1, 2], [3, 4, 5], [], []]), Placement([[], [], [0, 1, 2, 3], [3, 4, 5, 0]])
SHAPES: dict[str, tuple[int, ...]] = {"w13": (6, 40), "w2": (40, 3)}


def opened(group: Any, **changes: Any) -> WeightTransfer:
    how: dict[str, Any] = {"shapes": SHAPES, "source": APART[0], "target": APART[1], "backend": "host", "timeout_s": 20}
    return WeightTransfer(group, **{**how, **changes})


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("shapes", {"w13": (6, 40), "w2": (40, 4)}),
        ("shapes", {"w2": (40, 3), "w13": (6, 40)}),
        ("shapes", {"w13": (6, 40), "w3": (40, 3)}),
        ("dtype", torch.float16),
        ("cast", "fp8"),
        ("cast", {"w2": torch.float32}),
        ("source", Placement([[0, 1, 2], [3, 5, 4], [], []])),
        ("target", Placement([[], [], [0, 1, 2, 3], [3, 4, 5]])),
    ],
)
def test_ranks_that_want_different_transfers_are_told_the_field(field: str, other: Any) -> None:
    found = run_ranks(4, lambda group: opened(group, **({field: other} if group.rank == 2 else {})))
    for error in found:
        assert isinstance(error, Mismatch) and field in str(error), error
    assert found[2].field == field


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("shapes", {}),
        ("shapes", {"w": 3}),
        ("shapes", {"w": (-1,)}),
        ("dtype", {"w13": torch.bfloat16}),
        ("dtype", {"w": torch.bfloat16}),
        ("dtype", torch.complex64),
        ("cast", "bf16"),
        ("cast", {"w": "fp8"}),
        ("cast", torch.int8),
        ("shapes", {"w13": (6, 40), "w2": (41,)}),
        ("source", None),
        ("source", Placement([range(EXPERTS)])),
        ("target", Placement([[], [], [0, 1, 2, 3], [3, 4, 5, 6]])),
        ("timeout_s", 0),
        ("shapes", {"w": (2**31, 2**10)}),
    ],
)
def test_what_cannot_be_opened_is_named_on_all_ranks(argument: str, given: Any) -> None:
    more = {"cast": "fp8"} if argument == "shapes" and given.get("w2") == (41,) else {}
    found = run_ranks(4, lambda group: opened(group, **({argument: given, **more} if group.rank != 1 else more)))
    if argument == "shapes" and "w" in given and isinstance(given["w"], tuple) and given["w"][0] > 0:
        found = run_ranks(4, lambda group: opened(group, **{argument: given}))
    for error in found:
        assert isinstance(error, BadInput) and error.argument == argument, error


def test_odd_columns_have_no_four_bits() -> None:
    with pytest.raises(BadInput, match="an even number of columns with cast='mxfp4'"):
        opened("self", source=Placement([range(6)]), target=Placement([range(6)]), cast="mxfp4")


def test_tensors_that_do_not_fit_are_named_on_all_ranks_and_the_next_call_works() -> None:
    model = Model(SHAPES, torch.bfloat16, None, 0)

    def bad(group: Any, nth: int) -> Any:
        given = model.given(1, APART[0].held[group.rank])
        if group.rank == 1 and given is not None:
            return [
                None,
                {"w13": given["w13"]},
                {**given, "w13": given["w13"][:2]},
                {**given, "w2": given["w2"].float()},
                {**given, "w2": given["w2"][..., :2]},
                {**given, "w2": given["w2"].tolist()},
                {**given, "w2": (given["w2"], given["w2"])},
                {**given, "w2": given["w2"].to_sparse()},
                {**given, "w2": torch._neg_view(given["w2"])},
                {**given, "w2": given["w2"].to("meta")},
                {**given, "w2": None},
            ][nth]
        return given

    def body(group: Any) -> list[str]:
        have, want = APART[0].held[group.rank], APART[1].held[group.rank]
        found, said = model.room(want), []
        with opened(group) as transfer:
            if group.rank >= 2:
                with pytest.raises(BadInput, match="nothing to commit"):
                    transfer.commit(found)
            for nth in range(11):
                with pytest.raises(BadInput) as caught:
                    transfer.stage(bad(group, nth))
                said.append(str(caught.value))
                assert not transfer.staged
            if group.rank >= 2:
                with pytest.raises(BadInput, match=r"nothing to commit"):
                    transfer.commit(found)
            transfer.stage(model.given(2, have))
            if group.rank >= 2:
                shared = torch.zeros(4, 40, 1, dtype=torch.bfloat16).expand(4, 40, 3)
                for into in (
                    None,
                    {"w13": found["w13"]},
                    {**found, "w2": (found["w2"][0][:3],)},
                    {**found, "w2": shared},
                ):
                    with pytest.raises(BadInput, match="into"):
                        transfer.commit(into if group.rank == 3 else found)
            else:
                with pytest.raises(BadInput, match="into"):
                    transfer.commit(found)
            transfer.commit(passed(want, found))
            model.check(found, want, 2)
        return said

    for said in all_ranks(4, body):
        assert all(text.startswith("tensors") for text in said)


@pytest.mark.parametrize("where", ["values", "scales", "hash", "number"])
def test_a_flipped_byte_names_the_tensor_and_its_way(where: str) -> None:
    """Whatever changes on the way, the weights in use stay, and the next transfer works."""
    model = Model(SHAPES, torch.bfloat16, "fp8", 3)

    def body(group: Any) -> str:
        have, want = APART[0].held[group.rank], APART[1].held[group.rank]
        found = model.room(want)
        with opened(group, cast="fp8") as transfer:
            transfer.stage(model.given(1, have))
            transfer.commit(passed(want, found))
            write = Records.write

            def broken(records: Records, record: torch.Tensor, tensors: Any, number: int) -> None:
                write(records, record, tensors, number)
                if record.data_ptr() == transfer._record(1, 4).data_ptr():
                    begins = [piece.begin for piece in records._pieces]
                    at = {"values": begins[2] + 7, "scales": begins[3] + 1}
                    at |= {"hash": records._trailer + 17, "number": records._trailer + 8 * len(begins)}
                    record[at[where]] ^= 64

            if group.rank == 1:
                transfer._records.write = broken.__get__(transfer._records)  # type: ignore[method-assign]
            with pytest.raises(CorruptWeights) as caught:
                transfer.stage(model.given(2, have))
            if want[0] >= 0:
                with pytest.raises(BadInput, match="nothing to commit"):
                    transfer.commit(found)
            model.check(found, want, 1)
            if group.rank == 1:
                del transfer._records.write
            transfer.stage(model.given(3, have))
            transfer.commit(passed(want, found))
            model.check(found, want, 3)
            error = caught.value
            assert (error.expert, error.source, error.destination) == (4, 1, 3)
            assert error.name == ("w13" if where == "number" else "w2")
        return str(error)

    found = all_ranks(4, body)
    assert found[3].startswith("tensor 'w") and "of expert 4 is not what rank 1 sent to rank 3" in found[0]


@contextmanager
def transfers(group: Any, model: Model, source: Placement, target: Placement) -> Iterator[Any]:
    """Yield a call that stages and commits a step, and one that checks whose weights are there."""
    rank = group.rank() if callable(group.rank) else group.rank
    have, want = source.held[rank], target.held[rank]
    found = model.room(want)
    how: dict[str, Any] = {"source": source, "target": target, "backend": "host", "timeout_s": 10}
    with WeightTransfer(group, model.shapes, **how, dtype=model.dtype, cast=model.cast) as transfer:
        yield transfer, found, have, want


def test_a_rank_that_closes_or_is_interrupted_leaves_the_old_weights_everywhere() -> None:
    """In the middle of any call, and before it; those that are left are told soon."""
    model = Model(SHAPES, torch.bfloat16, None, 1)

    def one(group: Any, victim: int, how: str, when: str) -> str:
        with transfers(group, model, *APART) as (transfer, found, have, want):
            transfer.stage(model.given(1, have))
            transfer.commit(passed(want, found))
            begin = time.monotonic()
            try:
                if (when, group.rank) == ("staged", victim):
                    transfer.stage(model.given(2, have))
                if group.rank == victim:
                    if how == "close":
                        transfer.close()
                        return "gone"
                    if when == "staged":
                        transfer._switch = _interrupt  # type: ignore[method-assign]
                        transfer._given = _interrupt  # type: ignore[method-assign]
                        transfer.commit(found)
                    transfer._read = _interrupt  # type: ignore[method-assign]
                    transfer.stage(model.given(2, have))
                transfer.stage(model.given(2, have))
                transfer.commit(passed(want, found))
            except KeyboardInterrupt:
                return "gone"
            except (PeerLost, Aborted) as error:
                assert time.monotonic() - begin < 5
                model.check(found, want, 1)
                return f"{type(error).__name__} {error.peer}"
            finally:
                if group.rank != victim:
                    time.sleep(0.1)  # its own end must not be taken for the victim's
            return "went on"

    for victim, how, when in (
        (0, "close", "before"),
        (0, "interrupt", "before"),
        (2, "close", "before"),
        (3, "interrupt", "before"),
        (2, "close", "staged"),
        (3, "interrupt", "staged"),
    ):
        found = all_ranks(4, lambda group, v=victim, h=how, w=when: one(group, v, h, w))
        assert found[victim] == "gone"
        number = victim if when == "before" else victim - 2  # among receivers
        word = "PeerLost" if how == "close" else "Aborted"
        for rank in set(range(4)) - {victim}:
            aware = when == "before" or rank >= 2
            assert found[rank] == (f"{word} {number}" if aware else "went on"), (found, victim, how, when)


def _interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_while_ranks_switch_leaves_no_rank_behind() -> None:
    model = Model(SHAPES, torch.bfloat16, None, 2)

    def body(group: Any) -> None:
        with transfers(group, model, *APART) as (transfer, found, have, want):
            for step in (1, 2):
                transfer.stage(model.given(step, have))
                if (group.rank, step) == (2, 1):
                    transfer._records.parts = _once.__get__(transfer._records)
                    with pytest.raises(KeyboardInterrupt):
                        transfer.commit(found)
                else:
                    transfer.commit(passed(want, found))
                model.check(found, want, step)

    def _once(records: Records, record: torch.Tensor) -> Any:
        del records.parts
        raise KeyboardInterrupt

    all_ranks(4, body)


@pytest.mark.parametrize("when", ["decided", "settled", "before"])
def test_an_interrupt_as_ranks_decide_is_of_all_or_none(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that is interrupted goes the way of the others, wherever in the agreement it is."""
    model = Model(SHAPES, torch.bfloat16, None, 2)
    settle, decide = Opening.settle, LocalBoard.decide
    victim = threading.local()

    def settled(ranks: Opening) -> None:
        if getattr(victim, "now", "") == "before":
            raise KeyboardInterrupt
        settle(ranks)
        if getattr(victim, "now", "") == "settled":
            raise KeyboardInterrupt

    def decided(board: LocalBoard, key: str, value: bytes) -> bytes:
        stands = decide(board, key, value)
        if getattr(victim, "now", "") == "decided":
            victim.now = ""
            raise KeyboardInterrupt
        return stands

    monkeypatch.setattr(Opening, "settle", settled)
    monkeypatch.setattr(LocalBoard, "decide", decided)

    def body(group: Any) -> None:
        with transfers(group, model, *APART) as (transfer, found, have, want):
            for step in (1, 2, 3):
                transfer.stage(model.given(step, have))
                victim.now = when if (group.rank, step) == (3, 2) else ""
                failed = when == "before" and step == 2 and group.rank >= 2
                with pytest.raises((KeyboardInterrupt, Aborted)) if failed or victim.now else nullcontext():
                    transfer.commit(passed(want, found))
                victim.now = ""
                model.check(found, want, 1 if when == "before" and step == 2 else step)

    all_ranks(4, body)


@pytest.mark.parametrize("seed", few(range(100), 6))
def test_random_sequences_follow_a_model(seed: int) -> None:
    """After any error on some rank, in any call, all receivers have the weights of the same commit."""
    rng = random.Random(f"sequence {seed}")
    of = rng.randint(2, 4)
    trainers, servers = (sorted(rng.sample(range(of), rng.randint(1, of))) for _ in range(2))
    source = beside(trainers, of, seed, EXPERTS)
    target = beside(servers, of, seed + 1000, EXPERTS)
    model = Model(SHAPES, torch.bfloat16, rng.choice([None, "fp8", "mxfp8"]), seed)
    kinds = ["fine"] * 4 + [
        "bad tensors",
        "interrupt in stage",
        "corrupt",
        "no commit",
        "bad into",
        "interrupt in commit",
    ]
    script = [(rng.choice(kinds), rng.randrange(of), rng.random() < 0.5) for _ in range(12)]

    def body(group: Any) -> list[str]:
        have, want = source.held[group.rank], target.held[group.rank]
        serves, found, now, staged, said = any(e >= 0 for e in want), model.room(want), 0, 0, []
        how: dict[str, Any] = {"source": source, "target": target, "cast": model.cast, "backend": "host"}
        with WeightTransfer(group, SHAPES, **how, timeout_s=20) as transfer:
            for step, (kind, victim, again) in enumerate(script, 1):
                mine, given = group.rank == victim, model.given(step, have)
                errors: tuple[type[BaseException], ...] = ()
                if kind == "bad tensors":
                    given, errors = ({"w": torch.zeros(1)} if mine else given), (BadInput,)
                elif kind == "interrupt in stage":
                    errors = (KeyboardInterrupt,) if mine else (Aborted,)
                    if mine:
                        once(transfer, rng.choice(["_compare_commits", "_synchronize", "_read"]) if again else "_given")
                elif kind == "corrupt":
                    victims = [r for r, route in enumerate(transfer._routes) if route.casts]
                    errors = (CorruptWeights,)
                    if group.rank == victims[victim % len(victims)]:
                        write = transfer._records.write

                        def broken(record: torch.Tensor, *more: Any, write: Any = write) -> None:
                            write(record, *more)
                            record[0] ^= 1

                        transfer._records.write = broken  # type: ignore[method-assign]
                try:
                    transfer.stage(given)
                    staged = step
                    assert not errors, (kind, step)
                except errors as error:
                    staged = 0
                    said.append(type(error).__name__)
                vars(transfer._records).pop("write", None)
                assert transfer.staged == (serves and staged > 0)
                if serves and now:
                    model.check(found, want, now)
                if kind == "no commit":
                    continue
                into: Any = found if serves else None
                first = next(r for r in range(of) if any(e >= 0 for e in target.held[r]))
                at_commit = staged and kind in ("bad into", "interrupt in commit")
                if at_commit and group.rank == first:
                    if kind == "bad into":
                        into = {"w13": torch.zeros(1)}
                    else:
                        once(transfer, "_given" if again else "_switch")
                switches = staged and not (at_commit and (kind == "bad into" or again))
                refused = False
                try:
                    transfer.commit(into)
                except (BadInput, KeyboardInterrupt, Aborted) as error:
                    said.append(type(error).__name__)
                    refused = True
                assert not refused or (serves and (not staged or at_commit)), step
                assert refused or not serves or switches, step
                if switches:
                    now, staged = step, 0
                if serves and now:
                    model.check(found, want, now)
                if serves and at_commit and not switches:  # what is staged is still there
                    transfer.commit(found)
                    now, staged = step, 0
                    model.check(found, want, now)
                elif not serves and at_commit and not switches:
                    now, staged = step, 0
        return said

    all_ranks(of, body)


def once(transfer: WeightTransfer, name: str) -> None:
    """Interrupt the next call of a method."""

    def interrupted(*given: Any, **named: Any) -> Any:
        delattr(transfer, name)
        raise KeyboardInterrupt

    setattr(transfer, name, interrupted)


def test_a_rank_that_missed_a_commit_is_named() -> None:
    """An interrupt between the decision and the switch would leave that: no stage goes on as if nothing were."""
    model = Model(SHAPES, torch.bfloat16, None, 2)

    def body(group: Any) -> None:
        with transfers(group, model, *APART) as (transfer, _, have, _):
            transfer._commits = int(group.rank == 3)
            with pytest.raises(Mismatch, match="commits") as caught:
                transfer.stage(model.given(1, have))
            assert group.rank < 2 or caught.value.rank == 5 - group.rank

    all_ranks(4, body)


def test_a_late_rank_is_a_timeout_and_the_next_call_works() -> None:
    model = Model(SHAPES, torch.bfloat16, "fp8", 1)

    def body(group: Any) -> None:
        have, want = APART[0].held[group.rank], APART[1].held[group.rank]
        found = model.room(want)
        with opened(group, cast="fp8", timeout_s=0.5) as transfer:
            if group.rank == 0:
                time.sleep(1.0)
            with pytest.raises(Timeout, match="rank 0"):
                transfer.stage(model.given(1, have))
            transfer._all._timeout_s = transfer._timeout_s = 20
            transfer.stage(model.given(2, have))
            transfer.commit(passed(want, found))
            model.check(found, want, 2)

    all_ranks(4, body)


def test_close_of_another_thread_ends_a_call() -> None:
    both = Placement([range(EXPERTS), []]), Placement([[], range(EXPERTS)])
    model = Model(SHAPES, torch.bfloat16, None, 4)

    def body(group: Any) -> str:
        with transfers(group, model, *both) as (transfer, _, have, _):
            if group.rank == 0:
                time.sleep(0.3)
                with pytest.raises(Aborted, match="rank 1 has closed its WeightTransfer during stage"):
                    transfer.stage(model.given(1, have))
                with pytest.raises(PeerLost, match="rank 1 is gone: it has closed its WeightTransfer"):
                    transfer.stage(model.given(1, have))
                return "told"
            closer = threading.Timer(0.15, transfer.close)
            closer.start()
            refused = threading.Timer(0.05, lambda: said.append(_error_of(transfer.stage)))
            refused.start()
            with pytest.raises(Aborted, match=r"closed its WeightTransfer during stage"):
                transfer.stage()
            closer.join()
            refused.join()
            assert transfer.closed and "closed" in repr(transfer)
            with pytest.raises(Closed):
                transfer.stage()
            return "closed"

    said: list[BaseException] = []
    assert all_ranks(2, body) == ["told", "closed"]
    assert isinstance(said[0], ConcurrentCall)


def _error_of(call: Any) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - a test looks at it
        return error
    return AssertionError("no error")


def test_one_rank_moves_to_itself_in_any_mode_of_torch() -> None:
    model = Model(SHAPES, torch.bfloat16, "mxfp8", 4)
    found = model.room(range(EXPERTS))
    same = Placement([range(EXPERTS)])
    with WeightTransfer("self", SHAPES, source=same, target=same, cast="mxfp8", backend="host") as transfer:
        for step in range(1, 5):
            with torch.inference_mode(step % 2 == 0):
                given = model.given(step, range(EXPERTS))
                assert given is not None
                transfer.stage({name: torch.nn.Parameter(w) if step == 3 else w for name, w in given.items()})
                transfer.commit(found)
                model.check(found, range(EXPERTS), step)
        with pytest.raises(Unsupported):
            transfer.__reduce_ex__(2)
    transfer.close()
    with pytest.raises(Closed):
        transfer.commit(found)


def test_slots_of_expert_weights_take_them() -> None:
    """A Buffer's layer gives the sums of the trainer's weights from the commit on."""
    engine = Placement([[0, 1, 2, -1], [3, 4, 5, 0]])
    target = Placement([[], *engine.experts.tolist()])
    model = Model({"w13": (16, 8), "w2": (8, 8)}, torch.float32, None, 5)
    engines = moecomm.local_ranks(2)

    def body(group: Any) -> list[torch.Tensor]:
        source = Placement([range(EXPERTS), [], []])
        about: dict[str, Any] = {"source": source, "target": target, "dtype": torch.float32, "backend": "host"}
        with WeightTransfer(group, model.shapes, **about) as transfer:
            if group.rank == 0:
                for step in (1, 2):
                    transfer.stage(model.given(step, range(EXPERTS)))
                return []
            sizes: dict[str, Any] = {"hidden": 8, "num_experts": EXPERTS, "topk": 2, "max_tokens": 8}
            mine = engines[group.rank - 1]
            with moecomm.Buffer(mine, **sizes, dtype=torch.float32, backend="host", placement=engine) as buffer:
                weights = moecomm.ExpertWeights(buffer, model.shapes, dtype=torch.float32)
                x, ids = torch.ones(4, 8), torch.tensor([[0, 5], [1, 4], [2, 3], [0, 1]])
                outs = []
                for _ in (1, 2):
                    transfer.stage()
                    transfer.commit({name: weights[name] for name in model.shapes})
                    outs.append(buffer.moe(x, ids, None, weights["w13"], weights["w2"]))
                weights.close()
                return outs

    _, *found = all_ranks(3, body)
    for outs in found:
        for step, out in enumerate(outs, 1):
            w = model.weights(step)
            gate, up = torch.einsum("eij,j->ei", w["w13"].double(), torch.ones(8).double()).chunk(2, dim=1)
            y = torch.einsum("eij,ej->ei", w["w2"].double(), torch.nn.functional.silu(gate) * up)
            ids = torch.tensor([[0, 5], [1, 4], [2, 3], [0, 1]])
            torch.testing.assert_close(out.double(), y[ids].sum(1), rtol=1e-4, atol=1e-4)


def test_transfers_of_other_placements_switch_together() -> None:
    """Dense weights are one expert, with a replica on each rank.  Nothing switches unless all parts are staged."""
    dense = Model({"norm": (7,), "head": (5, 3)}, torch.float32, torch.bfloat16, 8)
    model = Model(SHAPES, torch.bfloat16, "mxfp8", 7)
    whole = Placement([[0], [0], [], []]), Placement([[], [], [0], [0]])

    def body(group: Any) -> None:
        have, want = APART[0].held[group.rank], APART[1].held[group.rank]
        experts, others, trains = model.room(want), dense.room([0]), group.rank < 2
        about: dict[str, Any] = {"source": whole[0], "target": whole[1], "cast": torch.bfloat16, "dtype": torch.float32}
        with opened(group, cast="mxfp8") as transfer, opened(group, shapes=dense.shapes, **about) as also:
            if experts and not trains:
                scales = experts["w13"][1].view(torch.uint8)  # as engines have them
                into = {**experts, "w13": (experts["w13"][0], scales)}
            for step in (1, 2):
                transfer.stage(model.given(step, have))
                if not trains:
                    with pytest.raises(BadInput, match="nothing to commit"):
                        transfer.commit(into, also={also: others})
                    assert transfer.staged
                    if step == 2:
                        model.check(experts, want, 1)
                also.stage({name: w[:1] for name, w in dense.weights(step).items()} if trains else None)
                transfer.commit(*([] if trains else [into]), also={also: None if trains else others})
                if not trains:
                    model.check(experts, want, step)
                    dense.check(others, [0], step)
            elsewhere = {"source": Placement([[0], [], [], []]), "target": Placement([[], [], [0], []])}
            with opened(group, shapes={"w": (2,)}, **elsewhere) as third:
                third.stage({"w": torch.ones(1, 2).bfloat16()} if group.rank == 0 else None)
                transfer.stage(model.given(3, have))
                if not trains:
                    room = {"w": torch.zeros(1, 2).bfloat16()} if group.rank == 2 else None
                    with pytest.raises(BadInput, match="also"):
                        transfer.commit(into, also={third: room})
                    with pytest.raises(BadInput, match="also"):
                        transfer.commit(into, also={"third": room})  # type: ignore[dict-item]

    all_ranks(4, body)


def test_ranks_of_separate_jobs_meet_over_a_store() -> None:
    model = Model(SHAPES, torch.bfloat16, "fp8_token", 6)
    store = HashStore()

    def body(group: Any) -> None:
        with transfers(ranks_over(store, group.rank, 4, timeout_s=20), model, *APART) as (transfer, found, have, want):
            for step in (1, 2):
                transfer.stage(model.given(step, have))
                transfer.commit(passed(want, found))
                model.check(found, want, step)

    all_ranks(4, body)


def _killed(rank: int, group: Any, seed: int) -> str:
    """Transfer without an end, until a rank is killed."""
    rng = random.Random(f"killed transfer {seed}")
    victim, after_s = rng.randrange(4), rng.uniform(0.05, 0.6)
    model = Model({"w13": (64, 320), "w2": (160, 64)}, torch.bfloat16, rng.choice([None, "fp8"]), seed)
    with transfers(group, model, *APART) as (transfer, found, have, want):
        if rank == victim:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        begun = now = 0
        try:
            while True:
                begun += 1
                transfer.stage(model.given(begun, have))
                transfer.commit(passed(want, found))
                now = begun
        except (PeerLost, Timeout) as error:
            said = f"{type(error).__name__}"
        if now:
            model.check(found, want, now)
        return f"{said} after {now}"


@pytest.mark.parametrize("seed", few(range(40), 3))
def test_a_rank_is_killed_amid_transfers(seed: int, ranks: Ranks) -> None:
    """Wherever it is, the others have whole weights: those of their last commit, which all receivers have made."""
    ranks.start(4, _killed, seed)
    found = ranks.results(3)
    for result in found.values():
        assert isinstance(result, str) and result.startswith("PeerLost"), result
    numbers = sorted(int(result.split()[-1]) for rank, result in found.items() if rank >= 2)
    assert all(b == a for a, b in pairwise(numbers)), found


def _forked(rank: int, group: Any) -> str:
    model = Model(SHAPES, torch.bfloat16, None, 1)
    with transfers(group, model, *APART) as (transfer, found, have, want):
        if rank == 2 and os.fork() == 0:
            closed = isinstance(_error_of(transfer.stage), Closed)
            transfer.close()
            os._exit(0 if closed else 1)
        if rank == 2:
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        transfer.stage(model.given(1, have))
        transfer.commit(passed(want, found))
        model.check(found, want, 1)
    return "fine"


def test_a_forked_child_has_no_part(ranks: Ranks) -> None:
    assert ranks.run(4, _forked) == ["fine"] * 4


def test_errors_are_those_of_rounds() -> None:
    assert issubclass(PeerLost, RoundFailed) and issubclass(CorruptWeights, moecomm.MoecommError)
