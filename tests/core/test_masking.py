"""Buffer.mask(): the ranks that are left go on in the same windows, with exact rounds."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import moecomm
from moecomm import _native, ops
from moecomm.backends import host
from moecomm.base.experts import experts_of
from moecomm.rounds.state import CollectiveCall
from moecomm.testing import LocalBuffers, check_case, random_case

from ..conftest import Ranks
from ..few import few
from ..live import ROOM_S
from .test_membership import SIZES, failure_of, over_threads

EXACT = 100  # rounds after each step
LATE_S, FIRST_S = 0.03, 0.005
HIDDEN, EXPERTS, TOPK = SIZES["hidden"], SIZES["num_experts"], SIZES["topk"]


def experts_of_ranks(buffer: moecomm.Buffer, ranks: tuple[int, ...]) -> torch.Tensor:
    """Ids of the experts of some ranks."""
    found = [expert for rank in ranks for expert in experts_of(rank, EXPERTS, buffer.num_ranks)]
    return torch.tensor(found or [-1])


def tokens_of(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers, so that sums are exact, and expert ids."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randint(-8, 9, (1 + (rank + number) % 16, HIDDEN), generator=generator)
    x[:, 0], x[:, 1] = rank, torch.arange(len(x))
    return x.bfloat16(), torch.rand(len(x), EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]


def exact_round(buffer: moecomm.Buffer, number: int, meaning: dict[int, int] | None = None) -> None:
    """Compare a dispatch and a combine with the tokens of the ranks that take part; `meaning`: replicas."""
    x, ids = tokens_of(buffer.rank, number)
    meant = ids.clone().apply_(lambda one: (meaning or {}).get(one, one))
    layout = ("expert", "batched", "flat")[number % 3]
    routed = buffer.dispatch(x, ids, layout=layout)  # which may mask ranks by itself
    there = ~torch.isin(meant, experts_of_ranks(buffer, buffer.masked))
    assert routed.src is not None
    rows, src = routed.x.view(-1, HIDDEN), routed.src.view(-1, 2)
    if layout == "batched":
        counts = routed.tokens_per_expert.tolist()
        used = torch.cat([torch.arange(count) + at * routed.x.shape[1] for at, count in enumerate(counts)])
        rows, src = rows[used], src[used]
    for row, (rank, token) in zip(rows, src.tolist(), strict=True):
        assert rank not in buffer.masked and torch.equal(row, tokens_of(rank, number)[0][token])
    if layout == "flat":
        owners = torch.where(there, _owners(buffer, meant), -1)
        want = x * torch.tensor([len(set(row) - {-1}) for row in owners.tolist()]).view(-1, 1)
    else:
        want = x * there.sum(dim=1, keepdim=True)
    out = torch.full_like(x, torch.nan)
    buffer.combine(routed.x, routed.handle, wire="exact", out=out)
    assert torch.equal(out, want.to(out.dtype))


def _owners(buffer: moecomm.Buffer, ids: torch.Tensor) -> torch.Tensor:
    owner = [rank for rank in range(buffer.num_ranks) for _ in experts_of(rank, EXPERTS, buffer.num_ranks)]
    return torch.tensor(owner)[ids]


def rounds(buffer: moecomm.Buffer, count: int, meaning: dict[int, int] | None = None) -> None:
    for number in range(count):
        exact_round(buffer, number, meaning)


def die(after_s: float = 0.0) -> None:
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


class Plan(NamedTuple):
    """`steps`: the ranks that each step kills."""

    ranks: int
    steps: list[list[int]]

    @property
    def survivors(self) -> set[int]:
        return set(range(self.ranks)) - {rank for step in self.steps for rank in step}

    def due(self, alive: set[int]) -> list[int]:
        """The step after those whose ranks are all gone."""
        return next((step for step in self.steps if alive & set(step)), [])


def plan_of(seed: int) -> Plan:
    draw = random.Random(seed)
    ranks = draw.randint(2, 6)
    left, steps = list(range(ranks)), []
    while len(left) > 1 and (not steps or draw.random() < 0.6):
        step = draw.sample(left, draw.randint(1, len(left) - 1))
        left = [rank for rank in left if rank not in step]
        steps.append(step)
    return Plan(ranks, steps)


def survive(rank: int, group: Any, plan: Plan, seed: int, **options: Any) -> tuple[int, ...]:
    """Run a plan on one rank: the ranks that are left mask the others.  Of a step, the first rank dies in a round."""
    draw, number = random.Random(seed * 64 + rank), 0
    buffer = moecomm.Buffer(group, **SIZES, **options, timeout_s=20)
    before = buffer.nbytes, buffer.local_experts
    while (alive := set(range(plan.ranks)) - set(buffer.masked)) != plan.survivors or number < EXACT:
        if number == (EXACT if buffer.masked else 3) and rank in (step := plan.due(alive)):
            die(draw.uniform(0, FIRST_S if rank == step[0] else LATE_S))
        try:
            exact_round(buffer, number)
            number += 1
        except moecomm.RoundFailed:
            buffer.mask()
            number = 0
    assert before == (buffer.nbytes, buffer.local_experts) and buffer.num_ranks == plan.ranks
    buffer.close()
    return buffer.masked


def survive_by_forwarders(rank: int, group: Any, plan: Plan, seed: int) -> tuple[int, ...]:
    """Run a plan over domains of two ranks; few tokens need forwarders, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "direct_bytes", lambda *_: 0)
        return survive(rank, group, plan, seed, domain_ranks=2)


@pytest.mark.parametrize("seed", few(range(40), *range(6)))
def test_killed_ranks_are_masked(ranks: Ranks, seed: int) -> None:
    plan = plan_of(seed)
    ranks.start(plan.ranks, survive, plan, seed)
    lost = tuple(sorted(set(range(plan.ranks)) - plan.survivors))
    assert ranks.results(len(plan.survivors), timeout_s=60) == dict.fromkeys(plan.survivors, lost), plan


def repeats(rank: int, group: Any) -> Any:
    """A call whose round fails is made again by itself, or raises and the next call works."""
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=20, on_timeout="mask")
    rounds(buffer, 3)
    if rank == 2:
        die()
    errors, number = [], 0
    while number < 300 or not buffer.masked:
        try:
            exact_round(buffer, number)
            number += 1
        except moecomm.PeerLost as error:
            errors.append(str(error))
            number = 0  # on all ranks
    assert len(errors) <= 1 and all("the next call works" in error for error in errors)
    return buffer.masked


def test_a_buffer_masks_by_itself(ranks: Ranks) -> None:
    ranks.start(4, repeats)
    assert ranks.results(3) == dict.fromkeys((0, 1, 3), (2,))


def makes_a_call_again(buffer: moecomm.Buffer) -> Any:
    x, ids = tokens_of(buffer.rank, 0)
    buffer.dispatch(x, ids)
    if buffer.rank == 1:
        buffer.close()
        return None
    routed = buffer.dispatch(x, ids, layout="expert")
    assert buffer.masked == (1,)
    there = ~torch.isin(ids, experts_of_ranks(buffer, (1,)))
    assert torch.equal(buffer.combine(routed.x, routed.handle, wire="exact"), x * there.sum(dim=1, keepdim=True))
    record = buffer.rounds.flight
    return [failure.error for failure in record.failures], buffer.failed


def test_a_call_is_made_again_where_all_ranks_failed_in_it() -> None:
    assert over_threads(makes_a_call_again, on_timeout="mask") == [(["PeerLost"], False), None, (["PeerLost"], False)]


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_silent_rank_is_masked_when_a_wait_runs_out(op: str, caplog: pytest.LogCaptureFixture) -> None:
    """A dispatch repeats itself; a combine needs another dispatch, so it raises the error."""
    timeout_s, told = 1.5, threading.Event()
    through = threading.Barrier(2, action=told.set)

    def call(buffer: moecomm.Buffer) -> Any:
        rounds(buffer, 3)
        x, ids = tokens_of(buffer.rank, 0)
        there = ~torch.isin(ids, experts_of_ranks(buffer, (1,)))
        if op == "combine":
            routed = buffer.dispatch(x, ids, layout="expert")
        if buffer.rank == 1:
            assert told.wait(20)
            with pytest.raises(moecomm.Excluded):
                buffer.dispatch(x, ids)
            assert buffer.failed
            return None
        begin = time.monotonic()
        if op == "combine":
            with pytest.raises(moecomm.Timeout, match="masked ranks are now 1, and the next call works"):
                buffer.combine(routed.x, routed.handle)
        again = buffer.dispatch(x, ids, layout="expert")
        waited = time.monotonic() - begin
        assert torch.equal(buffer.combine(again.x, again.handle, wire="exact"), x * there.sum(dim=1, keepdim=True))
        assert waited < ROOM_S
        assert buffer.stats().masked == int((~there).sum())
        rounds(buffer, 30)
        through.wait(20)
        (failure,) = buffer.rounds.flight.failures
        assert (failure.error, failure.record["peer"]) == ("Timeout", 1)
        return buffer.masked, buffer.failed, waited

    first, silent, last = over_threads(call, on_timeout="mask", timeout_s=timeout_s)
    assert first[:2] == last[:2] == ((1,), False) and silent is None
    assert max(first[2], last[2]) >= timeout_s, "the first rank whose wait ends tells the other"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(warnings) == [f"rank {rank}: masked ranks are now [1]" for rank in (0, 2)]


@pytest.mark.parametrize("options", [{}, {"verify_every": 2}, {"domain_ranks": 2, "verify_every": 1}])
def test_the_host_counts_rounds_as_ranks_do(options: dict[str, int]) -> None:
    """Else a call could be made again after the failure of a round before it."""
    sizes: dict[str, Any] = {**SIZES, "ranks": 4, "dtype": torch.bfloat16}
    backend = sizes.pop("backend")
    with LocalBuffers(**sizes, **options, backend=backend) as ranks:
        for number in range(10):
            check_case(ranks, random_case(number, **sizes, few_kernels=True))
        for buffer in ranks.buffers:
            assert buffer.rounds.flight.rounds == buffer.rounds.session.last_round() >= 20


@pytest.mark.parametrize(("ahead", "captured", "again"), [(1, False, True), (0, False, False), (1, True, False)])
def test_a_call_is_made_again_only_after_the_failure_of_its_own_round(ahead: int, captured: bool, again: bool) -> None:
    """On GPUs a call may raise the failure of a round before it; after a capture nobody knows whose round it was."""
    with moecomm.Buffer(**SIZES) as buffer:
        rounds(buffer, 2)
        state = buffer.rounds
        state.flight.replays = captured
        with CollectiveCall(state):
            text = {"rank": 0, "peer": 1, "phase": "header", "op": "dispatch"}
            state.fail(moecomm.Timeout("late", **text, round=state.flight.rounds + ahead))
            assert state.repeatable is again
        assert not state.repeatable, "no call is under way"


def test_sums_are_those_without_the_ids_of_masked_experts() -> None:
    """Operators with gradients, and a layer, against the same rounds with ids of -1."""
    idle = threading.Barrier(3)

    def call(buffer: moecomm.Buffer) -> Any:
        generator = torch.Generator().manual_seed(buffer.rank)
        x = torch.randn(8, HIDDEN, generator=generator)
        ids = torch.rand(8, EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]
        weights = torch.rand(8, TOPK, generator=generator)
        mine = len(buffer.local_experts)
        w13, w2 = (torch.randn(mine, *shape, generator=generator) / 8 for shape in ((64, HIDDEN), (HIDDEN, 32)))

        def layer(ids: torch.Tensor) -> list[torch.Tensor]:
            given = [one.clone().requires_grad_() for one in (x, weights, w13, w2)]
            out = ops.moe(buffer, given[0], ids, *given[1:])
            out.square().sum().backward()
            with torch.no_grad():
                again = buffer.moe(x, ids, weights, w13, w2)
            return [out.detach(), again, *(one.grad for one in given)]

        none = torch.where(torch.isin(ids, experts_of_ranks(buffer, (2,))), -1, ids)
        if buffer.rank == 2:
            ids, none = (torch.empty(0, TOPK, dtype=torch.int64) for _ in range(2))
            x, weights = x[:0], weights[:0]
        want = layer(none)
        idle.wait()
        if buffer.rank == 2:
            return None
        assert buffer.mask([2]) == (2,)
        found = layer(ids)
        return [torch.equal(a, b) for a, b in zip(found, want, strict=True)]

    found = over_threads(call, dtype=torch.float32)
    assert found == [[True] * 6, [True] * 6, None]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_up_to_all_other_ranks_are_masked(count: int) -> None:
    idle = threading.Barrier(5)

    def call(buffer: moecomm.Buffer) -> Any:
        rounds(buffer, 3)
        gone = tuple(range(count))
        idle.wait()
        if buffer.rank in gone:
            return None
        assert buffer.mask(gone) == gone
        rounds(buffer, 30)
        return buffer.masked

    assert over_threads(call, ranks=5) == [None] * count + [tuple(range(count))] * (5 - count)


def test_a_rank_that_is_masked_ends_the_round_that_has_ended_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of rank 2 says for a while that it has not ended its last round, as where its thread gets no core."""
    monkeypatch.setattr(host, "END_S", ROOM_S)
    exclude, said = _native.exclude, list[int]()
    idle = threading.Barrier(3)

    def call(buffer: moecomm.Buffer) -> int:
        rounds(buffer, 3)
        context = buffer.rounds.session.context
        word = ctypes.c_uint32.from_address(context.peers[2] + context.window.state)
        last = word.value
        if buffer.rank == 2:
            word.value -= 1
        idle.wait()
        if buffer.rank == 2:
            time.sleep(0.2)  # by then a rank that does not wait has excluded it
            word.value = last
        else:
            buffer.mask([2])
        return last

    def noted(context: _native.Context, rank: int) -> None:
        said.append(_native.read_word(context.peers[rank] + context.window.state))
        exclude(context, rank)

    monkeypatch.setattr(_native, "exclude", noted)
    last = over_threads(call)
    assert said == [last[2]] * 2


def test_a_replica_takes_the_place_of_an_expert() -> None:
    """Ranks 0 to 2 have experts 0 to 3, 4 to 6, and 7 to 9.  A replica of a masked rank leads on to its own."""
    replicas = {4: 0, 5: 9, 9: 1, 6: 4}
    idle, two_idle = threading.Barrier(3), threading.Barrier(2)

    def call(buffer: moecomm.Buffer) -> Any:
        assert buffer.mask([], replicas=replicas) == ()
        rounds(buffer, 3)
        idle.wait()
        if buffer.rank != 1:
            assert buffer.mask([1]) == (1,)
            rounds(buffer, 9, {4: 0, 5: 9, 6: 0})
            two_idle.wait()
        if buffer.rank == 0:
            assert buffer.mask([2]) == (1, 2)
            rounds(buffer, 9, {4: 0, 5: 1, 9: 1, 6: 0})

    over_threads(call)


def test_ranks_that_suspect_others_agree() -> None:
    """Ranks 0 and 3 name another rank each; a rank that names itself, or is named, is not asked."""
    late, idle = threading.Event(), threading.Barrier(4)

    def call(buffer: moecomm.Buffer) -> Any:
        rounds(buffer, 3)
        idle.wait()
        if buffer.rank in (1, 2):
            assert late.wait(20)
            with pytest.raises(moecomm.Excluded):
                buffer.dispatch(*tokens_of(buffer.rank, 0))
            with pytest.raises(moecomm.Excluded):
                buffer.mask([0])
            return None
        buffer.mask([1 if buffer.rank == 0 else 2])
        rounds(buffer, 30)
        late.set()
        rounds(buffer, 30)
        return buffer.masked

    assert over_threads(call, ranks=4) == [(1, 2), None, None, (1, 2)]


def test_a_rank_whose_rows_do_not_come_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 never receives all puts of rank 2, which comes to both attempts and is masked at the second."""
    late, resume, tries = threading.Event(), host.HostSession.resume, []

    def hears_all_but_one(session: Any, last_round: int, masked: set[int], agreement: int) -> set[int]:
        lost = resume(session, last_round, masked, agreement)
        if session.context.rank == 0 and 2 not in masked:
            tries.append(agreement)
            return lost | {2}
        return lost

    monkeypatch.setattr(host.HostSession, "resume", hears_all_but_one)

    def call(buffer: moecomm.Buffer) -> Any:
        rounds(buffer, 3)
        if buffer.rank == 2:
            with pytest.raises(moecomm.Excluded):
                buffer.mask()
            assert late.wait(20)
            return None
        assert buffer.mask() == (2,)
        rounds(buffer, 30)
        late.set()
        return buffer.masked

    assert over_threads(call) == [(2,), (2,), None] and len(tries) == 2


def test_a_rank_that_cannot_go_on_leaves_itself_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.HostSession, "resume", lambda session, *about: {session.context.rank})

    def call(buffer: moecomm.Buffer) -> None:
        with pytest.raises(moecomm.Excluded):
            buffer.mask()

    over_threads(call, ranks=1)


def test_all_ranks_that_come_stay() -> None:
    """A rank that was slow, but comes when the others agree, is not masked."""
    made = threading.Barrier(3)

    def call(buffer: moecomm.Buffer) -> Any:
        rounds(buffer, 3)
        made.wait()  # abort() would end a round that a rank is still in
        if buffer.rank == 1:
            buffer.abort()
        failure_of(lambda: exact_round(buffer, 0))
        assert buffer.mask() == ()
        rounds(buffer, 30)
        return buffer.failed

    assert over_threads(call) == [False] * 3


def is_stopped(pid: int) -> bool:
    return pid != 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def paused(rank: int, group: Any, pids: Any) -> Any:
    """Rank 1 stops between two rounds; the others mask it, and take it in again when it goes on."""
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=ROOM_S, on_timeout="mask")
    rounds(buffer, 3)
    if rank == 1:
        pids[rank] = os.getpid()
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(moecomm.Excluded):
            rounds(buffer, 1)
        assert buffer.failed
    else:
        while not is_stopped(pids[1]):
            time.sleep(1e-3)
        buffer.mask([1])
        rounds(buffer, 30)
        os.kill(pids[1], signal.SIGCONT)
        rounds(buffer, 30)
    assert buffer.unmask([1]) == ()
    rounds(buffer, 30)
    buffer.release_memory()
    buffer.restore()
    rounds(buffer, 3)
    buffer.close()
    return True


def test_a_rank_that_was_paused_is_taken_in_again(ranks: Ranks) -> None:
    pids = ranks._context.Array("i", 3)
    ranks.start(3, paused, pids)
    assert ranks.results(3) == dict.fromkeys(range(3), True)


def dies_while_masked(rank: int, group: Any) -> Any:
    """The death of a masked rank ends no round; that of another one does, and can be masked, too."""
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=ROOM_S)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.mask([1])
    rounds(buffer, 100)  # meanwhile it dies
    begin = time.monotonic()
    while not buffer.rounds.session.dead_peers():
        assert time.monotonic() < begin + ROOM_S
        time.sleep(0.01)
    rounds(buffer, 30)
    with pytest.raises(moecomm.PeerLost, match="rank 1"):
        buffer.unmask([1])
    rounds(buffer, 30)
    found = buffer.shrink(keep_ids=True)
    assert (found.lost, buffer.masked) == ((1,), ())
    return True


def test_the_death_of_a_masked_rank_ends_no_round(ranks: Ranks) -> None:
    ranks.start(3, dies_while_masked)
    assert ranks.results(2) == {0: True, 2: True}


def dies_while_others_mask(rank: int, group: Any, late_s: float) -> Any:
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=ROOM_S)
    rounds(buffer, 3)
    group.barrier().wait()  # all have finished these rounds
    if rank == 3:
        return None
    if rank == 2:
        die(late_s)
        buffer.mask([3])
        while True:
            rounds(buffer, 1)
    buffer.mask([3])
    while buffer.masked != (2, 3):
        try:
            rounds(buffer, 1)
        except moecomm.PeerLost:
            buffer.mask()
    rounds(buffer, 100)
    return True


@pytest.mark.parametrize("late_s", [0.0, 0.0003, 0.001, 0.002, 0.004])
def test_a_rank_dies_while_others_mask(ranks: Ranks, late_s: float) -> None:
    ranks.start(4, dies_while_others_mask, late_s)
    assert ranks.results(3) == {0: True, 1: True, 3: None}


def test_handles_of_before_are_refused() -> None:
    idle = threading.Barrier(3)

    def call(buffer: moecomm.Buffer) -> Any:
        x, ids = tokens_of(buffer.rank, 0)
        routed = buffer.dispatch(x, ids)
        idle.wait()
        if buffer.rank == 1:
            return
        buffer.mask([1])
        for again in (
            lambda: buffer.combine(routed.x, routed.handle),
            lambda: buffer.dispatch(x, handle=routed.handle),
        ):
            with pytest.raises(moecomm.BadInput, match="before a mask"):
                again()
        rounds(buffer, 3)

    over_threads(call)


def test_a_half_dispatch_is_forgotten() -> None:
    idle = threading.Barrier(3)

    def call(buffer: moecomm.Buffer) -> Any:
        routed = buffer.dispatch_begin(*tokens_of(buffer.rank, 0))
        idle.wait()
        if buffer.rank == 1:
            return
        buffer.mask([1])
        with pytest.raises(moecomm.BadInput, match="routed"):
            buffer.dispatch_end(routed)
        buffer.dispatch_end(buffer.dispatch_begin(*tokens_of(buffer.rank, 0)))
        rounds(buffer, 3)

    over_threads(call)


def refused(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_what_cannot_be_masked() -> None:
    buffer = moecomm.Buffer("self", **SIZES, device="cpu", timeout_s=0.1)
    refused(lambda: buffer.mask([0]), moecomm.BadInput, "this rank")
    refused(lambda: buffer.mask([1]), moecomm.BadInput, "0 to 0")
    refused(lambda: buffer.mask([], replicas={0: 10}), moecomm.BadInput, "replicas")
    refused(lambda: buffer.mask([], replicas={"a": 1}), moecomm.BadInput, "replicas")  # type: ignore[dict-item]
    refused(lambda: buffer.mask([], replicas=[0]), moecomm.BadInput, "replicas")  # type: ignore[arg-type]
    refused(lambda: buffer.unmask([-1]), moecomm.BadInput, "0 to 0")
    refused(lambda: buffer.unmask([0]), moecomm.Timeout, "no rank has called")
    assert buffer.mask() == ()
    rounds(buffer, 3)
    buffer.close()
    refused(buffer.mask, moecomm.Closed, "closed")
    sizes = {**SIZES, "device": "cpu"}
    refused(lambda: moecomm.Buffer("self", **sizes, on_timeout="no"), moecomm.BadInput, "on_timeout")  # type: ignore[arg-type]


def rounds_over_domains(buffer: moecomm.Buffer, idle: threading.Barrier) -> None:
    """A rank that is still in a round when others mask it fails, so all wait before each step."""
    rounds(buffer, 6)
    for masked in ((1,), (1, 4, 5)):  # a forwarder, then a whole domain
        idle.wait(60)
        if buffer.rank not in masked:
            buffer.mask(masked)
            rounds(buffer, 6)
    idle.wait(60)
    buffer.unmask(masked)
    rounds(buffer, 6)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "by forwarders"])
def test_forwarders_are_masked(monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    idle = threading.Barrier(6)
    over_threads(lambda buffer: rounds_over_domains(buffer, idle), ranks=6, domain_ranks=2)


def test_killed_forwarders_are_masked(ranks: Ranks) -> None:
    plan = Plan(4, [[1], [2]])
    ranks.start(4, survive_by_forwarders, plan, 0)
    assert ranks.results(2, timeout_s=60) == dict.fromkeys((0, 3), (1, 2))


def test_a_rank_that_was_masked_decides_nothing_any_more() -> None:
    """It may not know yet, and find a decision of another call than its own; or know, and come again and again."""
    late = threading.Event()

    def call(buffer: moecomm.Buffer) -> Any:
        if buffer.rank == 2:
            assert late.wait(60)
            begin = time.monotonic()
            for again in (buffer.shrink, buffer.shrink, buffer.mask, lambda: buffer.shrink(keep_ids=True)):
                with pytest.raises(moecomm.Excluded):
                    again()
            return time.monotonic() - begin < 20 / 2  # no call waits for ranks that make no such call
        buffer.mask([2])
        late.set()
        rounds(buffer, 3)
        assert buffer.mask() == (2,)
        rounds(buffer, 3)
        return buffer.shrink()

    assert over_threads(call, timeout_s=20) == [((0, 1), (2,)), ((0, 1), (2,)), True]


def test_a_rank_that_gave_up_meets_the_others_in_its_next_call() -> None:
    """unmask() of a rank that waits alone leaves neither a word nor a number behind."""
    tried = threading.Barrier(3)

    def call(buffer: moecomm.Buffer) -> Any:
        if buffer.rank == 1:
            with pytest.raises(moecomm.Timeout, match="no rank has called unmask"):
                buffer.unmask([1])
        tried.wait(60)
        found = buffer.shrink()
        rounds(buffer, 3)
        return found.lost

    assert over_threads(call, timeout_s=1) == [()] * 3


def test_memory_that_is_released_refuses_a_mask() -> None:
    """Nothing but shrink() would work afterwards: all ranks take their memory again together."""

    def call(buffer: moecomm.Buffer) -> Any:
        buffer.release_memory()
        if buffer.rank == 0:
            buffer.close()
            return None
        for refuses in (buffer.mask, lambda: buffer.mask([0]), lambda: buffer.unmask([0])):
            refused(refuses, moecomm.MemoryReleased, r"restore\(\) on every rank first, or shrink\(\)")
        found = buffer.shrink()
        rounds(buffer, 3)
        return found.lost

    assert over_threads(call, timeout_s=1) == [None, (0,), (0,)]


def places_of(kept: Any) -> list[range]:
    """Offsets of a block of the window, or of several; none of memory outside."""
    if isinstance(kept, tuple):
        return [place for one in kept for place in places_of(one)]
    return [range(kept.offset, kept.offset + kept.nbytes)] if isinstance(kept, _native.Block) else []


@pytest.mark.parametrize("verify_every", [0, 1])
def test_memory_of_a_failed_dispatch_waits_for_ranks_that_may_write_there(verify_every: int) -> None:
    """Rank 0 comes late to a dispatch that the others have given up: no output lies where its rows belong."""
    held: dict[int, int] = {}
    gave_up, back = threading.Barrier(2), threading.Barrier(3)

    def call(buffer: moecomm.Buffer) -> Any:
        rounds(buffer, 3)
        mine = buffer.rounds
        if buffer.rank == 0:
            back.wait(60)
            buffer.unmask([0])
            rounds(buffer, 3)
            return None
        before = mine.memory.used
        assert isinstance(failure_of(lambda: exact_round(buffer, 0)), moecomm.Timeout)
        places = [place for kept in mine.unfinished for place in places_of(kept)]
        assert len(places) >= (4 if verify_every else 2)
        gave_up.wait(60)
        buffer.mask([0])
        gc.collect()
        small, scratch = list[range](), mine.memory.scratch

        def noted(nbytes: int) -> Any:
            block = scratch(nbytes)
            small.extend(places_of(block))
            return block

        mine.memory.scratch = noted  # of the dispatches that verify others
        outputs = [buffer.dispatch(*tokens_of(buffer.rank, number)) for number in range(3)]
        later = [
            place for routed in outputs for kept in (routed.payload, routed.handle.block) for place in places_of(kept)
        ]
        assert later and (small or not verify_every)
        assert all(new.stop <= old.start or new.start >= old.stop for new in later + small for old in places)
        mine.memory.scratch = scratch
        del outputs
        held[buffer.rank] = mine.memory.used
        back.wait(60)
        buffer.unmask([0])
        rounds(buffer, 3)
        gc.collect()
        return mine.memory.used <= before < held[buffer.rank]

    found = over_threads(call, timeout_s=1, verify_every=verify_every)
    assert found == [None, True, True]


def stopped_in_a_dispatch(rank: int, group: Any, pids: Any, after_s: float) -> Any:
    """Rank 0 stops while it stores its rows, and goes on when the others have masked it and use their memory again."""
    sizes: dict[str, Any] = {"hidden": 4096, "num_experts": 3, "topk": 1, "max_tokens": 1024, "dtype": torch.float32}
    buffer = moecomm.Buffer(group, **sizes, backend="host", timeout_s=20)
    buffer.rounds.session.context.timeout_ns = 300_000_000
    pids[rank] = os.getpid()

    def small(count: int = 8) -> Any:
        return buffer.dispatch(torch.full((count, 4096), rank + 1.0), torch.ones(count, 1, dtype=torch.int64))

    small()
    if rank == 0:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        with suppress(moecomm.RoundFailed, moecomm.Excluded):
            small(1024)
            small()
        buffer.unmask([0])
        small()
        return True
    failure_of(lambda: small(1024))
    buffer.mask([0])
    gc.collect()
    outputs = [small() for _ in range(20)]
    if rank == 1:
        os.kill(pids[0], signal.SIGCONT)
    buffer.unmask([0])
    want = [0, 2 * 8, 0][rank]
    for routed in outputs:  # as they were before
        assert routed.tokens_per_expert.tolist() == [want], routed.tokens_per_expert
        assert routed.x.unique().tolist() == ([2.0, 3.0] if want else [])
    small()
    return True


def test_rows_of_a_rank_that_was_stopped_in_a_dispatch_change_no_output(ranks: Ranks) -> None:
    for after_ms in (1, 3, 5, 8, 12):
        pids = ranks._context.Array("i", 3)
        ranks.start(3, stopped_in_a_dispatch, pids, after_ms / 1e3)
        assert ranks.results(3) == dict.fromkeys(range(3), True)


def test_memory_is_not_released_without_all_ranks() -> None:
    def call(buffer: moecomm.Buffer) -> Any:
        if buffer.rank == 0:
            return
        buffer.mask([0])
        with pytest.raises(moecomm.BadInput, match="masked ranks"):
            buffer.release_memory()
        rounds(buffer, 3)

    over_threads(call)
