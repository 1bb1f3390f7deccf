"""Transfers beside each other, which switch together, and ranks that are lost while others copy from their memory."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from moecomm import Placement
from moecomm.errors import Aborted, BadInput, Closed, CorruptWeights, PeerLost
from moecomm.transfer import WeightTransfer
from moecomm.transfer.records import Carrier, Leaving

from .backends.conftest import all_ranks
from .conftest import Ranks
from .few import few
from .weight_transfers import CASTS, EXPERTS, SHAPES, Model, beside, error_of, once, passed

EVEN: tuple[dict[str, tuple[int, ...]], ...] = ({"w13": (6, 40), "w2": (40, 4)}, {"up": (24, 130), "bias": (5, 2)})
FAILURES = ("bad into", "interrupt", "interrupt in the switch")


@pytest.mark.parametrize("seed", few(range(120), 0, 1, 2, 3))
def test_random_sequences_of_three_transfers(seed: int) -> None:
    """Whatever fails in a commit() of several, on some rank, all of them switch on all ranks, or none does."""
    rng = random.Random(f"together {seed}")
    of = rng.randint(2, 4)
    servers = sorted(rng.sample(range(of), rng.randint(1, of)))
    models, placed = list[Model](), list[tuple[Placement, Placement]]()
    for n in range(3):
        trainers = sorted(rng.sample(range(of), rng.randint(1, of)))
        models.append(Model(EVEN[n % 2], torch.bfloat16, rng.choice(CASTS), 10 * seed + n))
        source = beside(trainers, of, 6 * seed + n, -(-EXPERTS // len(trainers)) + rng.randint(0, 2))
        placed.append((source, _covering(servers, of, 6 * seed + 3 + n)))
    script = [
        (
            rng.choice(("one by one", "at once", "in turn")),
            sorted(rng.sample(range(3), rng.randint(1, 3))),  # are staged
            rng.sample(range(3), rng.randint(2, 3)),  # are committed, the first as the one that is called
            rng.choice((None, None, *FAILURES)),
            rng.choice(servers),
            rng.random() < 0.3,  # a stage fails
        )
        for _ in range(6)
    ]

    def body(group: Any) -> None:
        rank = group.rank
        with ExitStack() as stack:
            transfers, rooms = list[WeightTransfer](), list[Any]()
            for model, (source, target) in zip(models, placed, strict=True):
                how: dict[str, Any] = {"source": source, "target": target, "cast": model.cast, "backend": "host"}
                transfers.append(stack.enter_context(WeightTransfer(group, model.shapes, **how, timeout_s=30)))
                rooms.append(model.room(target.held[rank]))
            now, staged, serves = [0] * 3, [0] * 3, rank in servers

            def stage(n: int, step: int, fails: bool) -> None:
                given = models[n].given(step, placed[n][0].held[rank])
                staged[n] = 0
                if fails:
                    victim = next(r for r in range(of) if any(e >= 0 for e in placed[n][0].held[r]))
                    broken = {"none": torch.zeros(1)} if rank == victim else given
                    with pytest.raises(BadInput):
                        transfers[n].stage(broken)
                else:
                    transfers[n].stage(given)
                    staged[n] = step

            def check() -> None:
                for n in range(3):
                    if now[n] and serves:
                        models[n].check(rooms[n], placed[n][1].held[rank], now[n])

            for step, (how_staged, some, parts, failure, victim, fails) in enumerate(script, 1):
                if how_staged == "at once":
                    _at_once(*(partial(stage, n, step, fails and n == some[0]) for n in some))
                else:
                    for n in some if how_staged == "one by one" else some[::-1]:
                        stage(n, step, fails and n == some[0])
                check()
                first, *rest = parts
                into: dict[int, Any] = {n: rooms[n] if serves else None for n in parts}
                ready = all(staged[n] for n in parts)
                failure = failure if ready else None
                last = transfers[rest[-1]]
                if failure and rank == victim:
                    if failure == "bad into":
                        into[rest[-1]] = {"up": torch.zeros(1)}
                    elif failure == "interrupt":
                        once(last, "_given")
                    elif failure == "interrupt in the switch":
                        once(last, "_switch")
                switches = ready and failure in (None, "interrupt in the switch")
                also = {transfers[n]: into[n] for n in rest}
                refused: tuple[type[BaseException], ...] = ()
                if serves and not switches:
                    refused = (BadInput, KeyboardInterrupt, Aborted)
                elif failure == "interrupt in the switch" and rank == victim:
                    refused = (KeyboardInterrupt,)
                with pytest.raises(refused) if refused else nullcontext():
                    transfers[first].commit(into[first], also=also)
                vars(last).pop("_given", None)
                for n in parts if switches else ():
                    now[n], staged[n] = staged[n], 0
                check()
                if serves:
                    assert [transfer.staged for transfer in transfers] == [number > 0 for number in staged]

    all_ranks(of, body)


def _covering(servers: list[int], of: int, seed: int) -> Placement:
    """A random placement in which each of these ranks serves something, so that receivers are the same."""
    while True:
        found = beside(servers, of, seed, -(-EXPERTS // len(servers)) + seed % 3)
        if all(any(expert >= 0 for expert in found.held[rank]) for rank in servers):
            return found
        seed += 1000


def _at_once(*calls: Any) -> None:
    """Make calls in threads of their own; raise the first of their errors."""
    errors = list[BaseException]()

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("seed", few(range(60), 0, 1, 2))
def test_a_rank_closes_while_others_copy_from_its_memory(seed: int) -> None:
    """One rank trains, and the others have replicas: homes of its experts, from which the rest copies.

    The memory stays readable, the old weights stay in use, and all are told.
    """
    rng = random.Random(f"home {seed}")
    of = rng.randint(3, 5)
    source = Placement([range(EXPERTS), *[[]] * (of - 1)])
    target = Placement([[], *(rng.sample(range(EXPERTS), EXPERTS) for _ in range(of - 1))])
    model = Model({"w": (64, 96)}, torch.bfloat16, rng.choice([None, "fp8", "nvfp4"]), seed)
    victim, after = rng.randrange(of), rng.randrange(EXPERTS)
    method = "read" if victim else "write"
    how: dict[str, Any] = {"source": source, "target": target, "cast": model.cast, "backend": "host", "timeout_s": 20}

    def body(group: Any) -> None:
        rank, want = group.rank, target.held[group.rank]
        found, have = model.room(want), source.held[rank]
        with WeightTransfer(group, model.shapes, **how) as transfer:
            transfer.stage(model.given(1, have))
            transfer.commit(passed(want, found))
            if rank == victim:
                _after(transfer._carrier, method, after, transfer.close)
            error = error_of(transfer.stage, model.given(2, have))
            if error is None:  # it has closed behind its last wait
                error = error_of(transfer.stage, model.given(3, have))
            told = isinstance(error, (PeerLost, Aborted)) and error.peer == victim
            assert told or (rank == victim and isinstance(error, Closed)), error
            assert transfer.closed == (rank == victim)
            if rank > 0:
                model.check(found, want, 1)

    all_ranks(of, body)


def _after(carrier: Carrier, method: str, count: int, act: Any) -> None:
    """Act at a call of a method of a Carrier, after so many experts."""
    original, left = getattr(carrier, method), [count]

    def acting(experts: Sequence[Any], *more: Any) -> None:
        if 0 <= left[0] < len(experts):
            act()
        left[0] -= len(experts)
        original(experts, *more)

    setattr(carrier, method, acting)


def _killed(rank: int, group: Any, seed: int) -> str:
    rng = random.Random(f"killed home {seed}")
    source = Placement([range(EXPERTS), [], [], []])
    target = _covering([1, 2, 3], 4, seed)
    model = Model({"w": (256, 192)}, torch.bfloat16, rng.choice([None, "mxfp8"]), seed)
    victim, after, now = rng.randrange(4), rng.randrange(12), 1
    found, want, have = model.room(target.held[rank]), target.held[rank], source.held[rank]
    how: dict[str, Any] = {"source": source, "target": target, "cast": model.cast, "backend": "host", "timeout_s": 20}
    with WeightTransfer(group, model.shapes, **how) as transfer:
        transfer.stage(model.given(1, have))
        transfer.commit(passed(want, found))
        if rank == victim:
            method = "read" if rank else "write"
            _after(transfer._carrier, method, after, lambda: os.kill(os.getpid(), signal.SIGKILL))
        error = None
        while error is None:
            if (error := error_of(transfer.stage, model.given(now + 1, have))) is None:
                error = error_of(transfer.commit, passed(want, found))
                now += error is None
        assert isinstance(error, PeerLost), error
        if rank:
            model.check(found, want, now)
            with pytest.raises((BadInput, PeerLost)):
                transfer.commit(found)
            model.check(found, want, now)
        return f"{error.peer + (error.op == 'commit')} of {victim}"  # it counts receivers


@pytest.mark.parametrize("seed", few(range(30), 0, 2))
def test_a_rank_is_killed_while_others_copy_from_its_memory(seed: int, ranks: Ranks) -> None:
    ranks.start(4, _killed, seed)
    found = ranks.results(3)
    assert all(text == f"{victim} of {victim}" for text in found.values() for victim in [text.split()[-1]]), found


def test_a_byte_that_changes_at_a_home_is_found_by_all_that_copy_from_there() -> None:
    """The sender's hash travels with the record, so a reader does not trust the home."""
    source = Placement([range(EXPERTS), [], []])
    target = Placement([[], range(EXPERTS), range(EXPERTS)])
    model = Model(SHAPES, torch.bfloat16, None, 3)
    how: dict[str, Any] = {"source": source, "target": target, "backend": "host", "timeout_s": 20}

    def body(group: Any) -> None:
        want, have = target.held[group.rank], source.held[group.rank]
        found = model.room(want)
        with WeightTransfer(group, SHAPES, **how) as transfer:
            transfer.stage(model.given(1, have))
            transfer.commit(passed(want, found))
            homes = transfer._routes[0].homes
            expert = next(expert for expert, home in homes.items() if home == 1)
            write = transfer._carrier.write

            def broken(leaving: Sequence[Leaving], number: int) -> None:
                write(leaving, number)
                for record, _ in leaving:
                    if record.data_ptr() == transfer._record(1, expert).data_ptr():
                        record[3] ^= 8

            if group.rank == 0:
                transfer._carrier.write = broken  # type: ignore[method-assign]
            with pytest.raises(CorruptWeights) as caught:
                transfer.stage(model.given(2, have))
            assert (caught.value.expert, caught.value.source) == (expert, 0)
            assert caught.value.destination in (1, 2)
            if group.rank:
                model.check(found, want, 1)

    all_ranks(3, body)
