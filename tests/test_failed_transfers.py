"""Transfers of weights that fail, on some rank and in any call: the weights in use are whole and alike everywhere."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from moecomm import Placement
from moecomm.errors import (
    Aborted,
    BadInput,
    Closed,
    ConcurrentCall,
    CorruptWeights,
    Mismatch,
    PeerLost,
    Timeout,
)
from moecomm.ranks.board import LocalBoard
from moecomm.ranks.opening import Opening
from moecomm.transfer import WeightTransfer, weight_transfer
from moecomm.transfer.records import Leaving, Records

from .backends.conftest import all_ranks
from .conftest import Ranks
from .few import few
from .weight_transfers import (
    APART,
    EXPERTS,
    SHAPES,
    Model,
    beside,
    error_of,
    once,
    opened,
    passed,
    transfers,
)


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
            write, records = transfer._carrier.write, transfer._records

            def broken(leaving: Sequence[Leaving], number: int) -> None:
                write(leaving, number)
                for record, _ in leaving:
                    if record.data_ptr() == transfer._record(3, 4).data_ptr():
                        begins = [piece.begin for piece in records.pieces]
                        at = {"values": begins[2] + 7, "scales": begins[3] + 1}
                        at |= {"hash": records.trailer + 17, "number": records.trailer + 8 * len(begins)}
                        record[at[where]] ^= 64

            if group.rank == 1:
                transfer._carrier.write = broken  # type: ignore[method-assign]
            with pytest.raises(CorruptWeights) as caught:
                transfer.stage(model.given(2, have))
            if want[0] >= 0:
                with pytest.raises(BadInput, match="nothing to commit"):
                    transfer.commit(found)
            model.check(found, want, 1)
            if group.rank == 1:
                del transfer._carrier.write
            transfer.stage(model.given(3, have))
            transfer.commit(passed(want, found))
            model.check(found, want, 3)
            error = caught.value
            assert (error.expert, error.source, error.destination) == (4, 1, 3)
            assert error.name == ("w13" if where == "number" else "w2")
        return str(error)

    found = all_ranks(4, body)
    assert found[3].startswith("tensor 'w") and "of expert 4 is not what rank 1 sent to rank 3" in found[0]


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


def test_a_rank_that_casts_hears_of_a_failure_between_two_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads from no rank, so nothing else would tell it before its last cast."""
    monkeypatch.setattr(weight_transfer, "_LOOK_S", 0.0)
    model = Model(SHAPES, torch.bfloat16, "fp8", 5)
    failed = threading.Event()

    def body(group: Any) -> int:
        have = APART[0].held[group.rank]
        written = 0
        with opened(group, cast="fp8") as transfer:
            if group.rank == 2:
                transfer._read = _interrupt  # type: ignore[method-assign]
            write = transfer._carrier.write

            def counted(leaving: Sequence[Leaving], number: int) -> None:
                nonlocal written
                assert failed.wait(20)
                written += 1
                write(leaving, number)

            transfer._carrier.write = counted  # type: ignore[method-assign]
            try:
                transfer.stage(model.given(1, have))
            except (Aborted, KeyboardInterrupt):
                failed.set()
            return written

    assert all_ranks(4, body) == [1, 1, 0, 0]


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


def left_out(transfer: WeightTransfer, steps: threading.Barrier, call: Callable[[], None] | None) -> None:
    """Make a call that another rank leaves out; None: this one does.  Then the ranks are in step again."""
    patience, transfer._timeout_s = transfer._timeout_s, 0.2
    if call is not None:
        with pytest.raises(Timeout, match=r"has not called (stage|commit)\(\)"):
            call()
    transfer._timeout_s = patience
    steps.wait(patience)


@pytest.mark.parametrize("seed", few(range(100), 0, 1, 6))
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
        "interrupt before stage",
        "stage left out",
        "commit left out",
        "corrupt",
        "no commit",
        "bad into",
        "interrupt in commit",
    ]
    steps = threading.Barrier(of)
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
                elif kind == "interrupt before stage":
                    errors = (KeyboardInterrupt,) if mine else (Aborted,)
                    if mine:
                        once(transfer, "_agreement")
                elif kind == "interrupt in stage":
                    errors = (KeyboardInterrupt,) if mine else (Aborted,)
                    if mine:
                        once(transfer, rng.choice(["_compare_commits", "_synchronize", "_read"]) if again else "_given")
                elif kind == "corrupt":
                    victims = [r for r, route in enumerate(transfer._routes) if route.casts]
                    errors = (CorruptWeights,)
                    if group.rank == victims[victim % len(victims)]:
                        write = transfer._carrier.write

                        def broken(leaving: Sequence[Leaving], number: int, write: Any = write) -> None:
                            write(leaving, number)
                            leaving[0].record[0] ^= 1

                        transfer._carrier.write = broken  # type: ignore[method-assign]
                elif kind == "stage left out":
                    left_out(transfer, steps, None if mine else partial(transfer.stage, given))
                    continue
                try:
                    transfer.stage(given)
                    staged = step
                    assert not errors, (kind, step)
                except errors as error:
                    staged = 0
                    said.append(type(error).__name__)
                vars(transfer._carrier).pop("write", None)
                assert transfer.staged == (serves and staged > 0)
                if serves and now:
                    model.check(found, want, now)
                if kind == "no commit":
                    continue
                into: Any = found if serves else None
                first = next(r for r in range(of) if any(e >= 0 for e in target.held[r]))
                if kind == "commit left out":
                    is_alone = sum(any(e >= 0 for e in held) for held in target.held) == 1
                    left_out(
                        transfer,
                        steps,
                        partial(transfer.commit, into) if serves and not is_alone and group.rank != first else None,
                    )
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
    model, late = Model(SHAPES, torch.bfloat16, "fp8", 1), threading.Barrier(4)

    def body(group: Any) -> None:
        have, want = APART[0].held[group.rank], APART[1].held[group.rank]
        found = model.room(want)
        with opened(group, cast="fp8", timeout_s=0.5) as transfer:
            if group.rank == 0:
                late.wait()  # as late as to meet the others in their next call
            else:
                with pytest.raises(Timeout, match="rank 0"):
                    transfer.stage(model.given(1, have))
                late.wait()
            transfer._timeout_s = 20
            transfer.stage(model.given(2, have))
            transfer.commit(passed(want, found))
            model.check(found, want, 2)

    all_ranks(4, body)


def test_close_of_another_thread_ends_a_call() -> None:
    both = Placement([range(EXPERTS), []]), Placement([[], range(EXPERTS)])
    model = Model(SHAPES, torch.bfloat16, None, 4)
    ended = threading.Event()

    def beside_stage(transfer: WeightTransfer) -> None:
        while not transfer.turn.running:
            time.sleep(0.001)
        said.append(error_of(transfer.stage))
        transfer.close()

    def body(group: Any) -> str:
        with transfers(group, model, *both) as (transfer, _, have, _):
            if group.rank == 0:
                assert ended.wait(20)
                with pytest.raises(Aborted, match="rank 1 has closed its WeightTransfer during stage"):
                    transfer.stage(model.given(1, have))
                with pytest.raises(PeerLost, match="rank 1 is gone: it has closed its WeightTransfer"):
                    transfer.stage(model.given(1, have))
                return "told"
            closer = threading.Thread(target=beside_stage, args=(transfer,))
            closer.start()
            with pytest.raises(Aborted, match=r"closed its WeightTransfer during stage"):
                transfer.stage()
            closer.join()
            ended.set()
            assert transfer.closed and "closed" in repr(transfer)
            with pytest.raises(Closed):
                transfer.stage()
            return "closed"

    said: list[BaseException] = []
    assert all_ranks(2, body) == ["told", "closed"]
    assert isinstance(said[0], ConcurrentCall)


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
            closed = isinstance(error_of(transfer.stage), Closed)
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


def test_receivers_that_pass_other_transfers_are_told_and_switch_none() -> None:
    source, target = Placement([[0], [], []], num_experts=1), Placement([[], [0], [0]], num_experts=1)
    about: dict[str, Any] = {"source": source, "target": target, "dtype": torch.float32, "timeout_s": 20}

    def body(group: Any) -> str:
        first, *others = (WeightTransfer(group, {"w": (4,)}, **about) for _ in range(3))
        for transfer in (first, *others):
            transfer.stage({"w": torch.ones(1, 4)} if group.rank == 0 else None)
        if group.rank == 0:
            return ""
        rooms = [{"w": torch.zeros(1, 4)} for _ in range(3)]
        also = dict(zip(others, rooms[1:], strict=True))
        with pytest.raises(Mismatch) as caught:
            first.commit(rooms[0], also={others[group.rank - 1]: rooms[group.rank]})
        assert caught.value.field == "also" and caught.value.rank == 2 - group.rank  # among receivers
        with pytest.raises(Mismatch, match="also"):
            first.commit(rooms[0], also=dict(list(also.items())[:: 1 if group.rank == 1 else -1]))
        assert all(room["w"].sum() == 0 for room in rooms)
        first.commit(rooms[0], also=also)
        assert all(room["w"].sum() == 4 for room in rooms)
        return str(caught.value.theirs)

    found = all_ranks(3, body)
    assert found[1] != found[2] and all(text.startswith("['WeightTransfer ") for text in found[1:])
