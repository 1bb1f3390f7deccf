"""Buffer.shrink(): the ranks that are left agree, and go on with exact rounds."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm import _native, dispatch
from moecomm.membership import meeting
from moecomm.ranks import messages
from moecomm.ranks.board import LocalBoard
from moecomm.ranks.pages import PAGE_BYTES, Pages
from moecomm.rounds.expert_tables import AbsentEntries, ExpertIds
from moecomm.testing import LocalBuffers
from moecomm.testing.layers import selecting

from .. import call_plans, kill_plans
from ..conftest import Ranks
from ..few import few
from ..live import FAR_S, ROOM_S

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 10, "topk": 3, "max_tokens": 16, "backend": "host"}


def sums(buffer: moecomm.Buffer, lost: tuple[int, ...] = ()) -> None:
    """A dispatch and a combine whose sums have a term for each expert that is there."""
    x = torch.arange(8.0).repeat_interleave(64).view(8, 64).bfloat16()
    ids = torch.rand(8, 10, generator=torch.Generator().manual_seed(buffer.rank)).argsort(dim=1)[:, :3]
    there = ~torch.isin(ids, torch.tensor(lost or [-1]))
    for given in (ids, ids.int()):
        routed = buffer.dispatch(x, given)
        assert torch.equal(buffer.combine(routed.x, routed.handle, wire="exact"), x * there.sum(dim=1, keepdim=True))


def until_it_fails(buffer: moecomm.Buffer, lost: tuple[int, ...] = ()) -> moecomm.RoundFailed:
    """Rounds until one fails."""
    return failure_of(lambda: sums(buffer, lost))


def failure_of(call: Callable[[], Any]) -> moecomm.RoundFailed:
    try:
        while True:
            call()
    except moecomm.RoundFailed as error:
        return error.with_traceback(None)


def never_look_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that are threads look at a board only when what they wait for is there, so that no wait is counted."""
    read_or, look = LocalBoard.read_or, LocalBoard.look

    def has(board: LocalBoard, keys: Sequence[str]) -> bool:
        return all(board._prefix + key in board._shared.values for key in keys)

    def patient_read_or(board: LocalBoard, keys: Sequence[str], other: str) -> tuple[list[bytes] | None, bytes | None]:
        with board._shared.changed:
            board._shared.changed.wait_for(lambda: has(board, keys) or has(board, [other]), FAR_S)
        return read_or(board, keys, other)

    def patient_look(board: LocalBoard, keys: Sequence[str]) -> list[bytes | None]:
        decision, *here = keys
        if decision == "members":
            with board._shared.changed:
                board._shared.changed.wait_for(lambda: has(board, here) or has(board, [decision]), FAR_S)
        return look(board, keys)

    monkeypatch.setattr(LocalBoard, "read_or", patient_read_or)
    monkeypatch.setattr(LocalBoard, "look", patient_look)


def test_shrink_takes_few_python_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count calls of ranks that find each other there, whenever they come.  Later ones take no more than the first."""
    never_look_too_early(monkeypatch)
    folder = str(Path(moecomm.__file__).parent)
    start = threading.Barrier(2)

    def shrink(buffer: moecomm.Buffer) -> Counter[str]:
        entered: Counter[str] = Counter()

        def profile(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(folder):
                entered[frame.f_code.co_filename] += 1

        start.wait(FAR_S)
        sys.setprofile(profile)
        try:
            assert buffer.shrink().ranks == (0, 1)
        finally:
            sys.setprofile(None)
        return entered

    def rank(group: Any) -> list[Counter[str]]:
        with moecomm.Buffer(group, **SIZES) as buffer:
            return [shrink(buffer) for _ in range(4)]

    with ThreadPoolExecutor(2) as pool:
        found = [entered for of_rank in pool.map(rank, moecomm.local_ranks(2)) for entered in of_rank]
    assert all(entered.total() <= 232 and len(entered) <= 37 for entered in found), found


@pytest.mark.parametrize("invalid", [False, True])
def test_a_rank_that_waits_in_a_round_is_waited_for(invalid: bool) -> None:
    """A rank calls shrink() where the other one makes a round, for as long as it may: an interrupt was lost there.

    `invalid`: it has not raised the error of the round before, with which ranks go on.
    """
    timeout_s, x, ids = 4.0, torch.zeros(1, 64).bfloat16(), torch.tensor([[0, 1, 99]])

    def body(group: Any) -> tuple[tuple[int, ...], str]:
        found = ""
        with moecomm.Buffer(group, **SIZES, timeout_s=timeout_s) as buffer:
            if invalid:
                dispatch.run(dispatch.prepare(buffer.rounds, dispatch.Request(dispatch.Options()), x, ids))
            if buffer.rank == 1:
                if invalid:
                    assert isinstance(buffer.rounds.failure(), moecomm.BadInput)
                time.sleep(0.7 * timeout_s)
                found = type(failure_of(lambda: sums(buffer))).__name__
            shrunk = buffer.shrink()
            sums(buffer)
            return shrunk.lost, found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, moecomm.local_ranks(2))) == [((), ""), ((), "Timeout")]


def die_in_a_round(buffer: moecomm.Buffer, lost: tuple[int, ...] = ()) -> None:
    for _ in range(20):
        sums(buffer, lost)
    os.kill(os.getpid(), signal.SIGKILL)


def test_times_that_are_slow_or_near_the_deadline_are_found() -> None:
    found = kill_plans.Found()
    found.ms["noticed"] = [20.0, 30.0, 2000.0]
    found.check_soon()  # one of them under load
    for times in ([20.0, 350.0, 400.0], [20.0, 30.0, 10_500.0]):
        found.ms["noticed"] = times
        with pytest.raises(AssertionError, match="noticed"):
            found.check_soon()


@pytest.mark.parametrize("seed", [0, 1, 6, 9])
def test_a_kill_plan(tmp_path: Path, seed: int) -> None:
    kill_plans.check(tmp_path, seed).check_soon()


@pytest.mark.long
def test_more_kill_plans(tmp_path: Path) -> None:
    found = kill_plans.Found()
    for seed in range(100, 110):
        (tmp_path / str(seed)).mkdir()
        found.add(kill_plans.check(tmp_path / str(seed), seed))
    found.check_soon()


def test_plans_of_every_membership_call() -> None:
    """Ends are errors of moecomm or exact rounds, and most ranks go on."""
    found = call_plans.run(range(50), jobs=12)
    assert not found["plans_failed"] and found["plans"] == 50, found
    assert found["rounds"] > 500 and found["ended"] > 50, found


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_more_plans_of_every_membership_call() -> None:
    found = call_plans.run(range(1000, 2000), jobs=12)
    assert not found["plans_failed"] and found["plans"] == 1000, found


def keep_ids(rank: int, group: Any) -> tuple[range, range]:
    buffer = moecomm.Buffer(group, **SIZES)
    before, lost = buffer.local_experts, ()
    for victim in (1, 0):  # in the numbers of now; experts of 4 ranks: 3, 3, 2, 2
        if buffer.rank == victim:
            die_in_a_round(buffer, lost)
        assert isinstance(until_it_fails(buffer, lost), moecomm.PeerLost)
        found = buffer.shrink(keep_ids=True)
        assert found.lost == (victim,)
        lost += (3, 4, 5) if victim else (0, 1, 2)
        assert buffer.num_experts == 10 and buffer.local_experts == before
        for _ in range(5):
            sums(buffer, lost)
        with pytest.raises(moecomm.BadInput, match="topk_idx"):
            buffer.dispatch(torch.zeros(1, 64).bfloat16(), torch.tensor([[1, 2, 10]]))
    buffer.shrink()  # all experts are there again
    assert len(buffer.local_experts) == 5
    sums(buffer)
    buffer.close()
    return before, buffer.local_experts


def test_experts_keep_their_ids(ranks: Ranks) -> None:
    ranks.start(4, keep_ids)
    assert ranks.results(2) == {2: (range(6, 8), range(5)), 3: (range(8, 10), range(5, 10))}


def test_ids_of_lost_experts_count_as_none() -> None:
    ids, absent = ExpertIds([0, 1, 6, 7], 8, torch.device("cpu")), AbsentEntries(torch.device("cpu"))
    assert ids.translate(torch.tensor([[0, 6, 3, -1, 8, -2]]), absent).tolist() == [[0, 2, -1, -1, 8, -2]]
    assert ids.translate(torch.tensor([7], dtype=torch.int32), absent).dtype == torch.int32
    assert absent.read() == 1
    elsewhere = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    assert ids.translate(elsewhere, absent) is elsewhere
    assert ids.range_of(range(2, 4)) == range(6, 8)


def stopped(rank: int, group: Any, pids: Any) -> Any:
    """Rank 1 stops for longer than the deadline; the others go on without it."""
    pids[rank] = os.getpid()
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=3)
    sums(buffer)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        error = until_it_fails(buffer)
        with pytest.raises(moecomm.Excluded) as excluded:
            buffer.shrink()
        return type(error), excluded.value.ranks
    error = until_it_fails(buffer)
    found = buffer.shrink()
    for number in range(1000):
        if number == 100 and rank == 0:
            os.kill(pids[1], signal.SIGCONT)  # writes to the old windows from now on
        sums(buffer)
    buffer.close()
    return type(error), error.peer, found.lost


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", few((1, 4), 1))
def test_a_stopped_rank_is_left_out_and_harms_no_round(ranks: Ranks, times: int, pytestconfig: pytest.Config) -> None:
    for _ in range(pytestconfig.getoption("--repeats") or times):
        pids = ranks._context.Array("i", 3)
        ranks.start(3, stopped, pids)
        found = ranks.results(3)
        assert found[0] == found[2] == (moecomm.Timeout, 1, (1,))
        assert found[1][1] == (0, 2) and issubclass(found[1][0], moecomm.RoundFailed)


def over_threads(call: Callable[[moecomm.Buffer], Any], ranks: int = 3, **sizes: Any) -> list[Any]:
    with (
        LocalBuffers(**{**SIZES, "dtype": torch.bfloat16, **sizes}, ranks=ranks) as buffers,
        ThreadPoolExecutor(ranks) as pool,
    ):
        return list(pool.map(call, buffers.buffers))


def test_threads_shrink_after_a_timeout() -> None:
    def call(buffer: moecomm.Buffer) -> Any:
        sums(buffer)
        if buffer.rank == 1:
            time.sleep(4)  # longer than the deadline, and the grace
            with pytest.raises(moecomm.RoundFailed):
                sums(buffer)
            with pytest.raises(moecomm.Excluded, match="goes on with ranks 0, 2"):
                buffer.shrink()
            return None
        assert until_it_fails(buffer).peer == 1
        found = buffer.shrink()
        for _ in range(5):
            sums(buffer)
        buffer.release_memory()
        buffer.restore()
        sums(buffer)
        return found

    assert over_threads(call, timeout_s=1.5) == [meeting.Shrunk((0, 2), (1,)), None, meeting.Shrunk((0, 2), (1,))]


def test_all_ranks_go_on_after_abort() -> None:
    def call(buffer: moecomm.Buffer) -> Any:
        if buffer.rank == 1:
            sums(buffer)
            buffer.abort()
        assert isinstance(until_it_fails(buffer), moecomm.Aborted)
        found = buffer.shrink()
        sums(buffer)
        return found.lost

    assert over_threads(call) == [()] * 3


def test_domains_are_as_large_as_ranks_that_are_left_allow() -> None:
    def call(buffer: moecomm.Buffer) -> Any:
        if buffer.rank == 5:
            buffer.abort()
            return None
        until_it_fails(buffer)
        return buffer.shrink(), buffer.domain_ranks, sums(buffer)

    found = over_threads(call, ranks=6, domain_ranks=3, timeout_s=2)
    assert found == [(((0, 1, 2, 3, 4), (5,)), 1, None)] * 5 + [None]


def closes(rank: int, group: Any) -> Any:
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=FAR_S)
    sums(buffer)
    if rank == 0:
        buffer.close()
        return None
    begin = time.monotonic()
    found = buffer.shrink()  # no round has failed
    assert time.monotonic() - begin < ROOM_S
    sums(buffer)
    buffer.release_memory()
    buffer.restore()
    sums(buffer)
    return found


def test_a_rank_that_closes_is_left_out(ranks: Ranks) -> None:
    assert ranks.run(3, closes) == [None, ((1, 2), (0,)), ((1, 2), (0,))]


def test_a_thread_that_closes_is_left_out_at_once() -> None:
    """Without a call that fails first: the round header says that it leaves."""
    closed = threading.Event()

    def call(buffer: moecomm.Buffer) -> Any:
        if buffer.rank == 1:
            buffer.close()
            closed.set()
            return None
        assert closed.wait(ROOM_S)
        begin = time.monotonic()
        shrunk = buffer.shrink()
        assert time.monotonic() - begin < ROOM_S
        return shrunk

    found = over_threads(call, timeout_s=FAR_S)
    assert [found[0], found[2]] == [meeting.Shrunk((0, 2), (1,))] * 2


def layers(rank: int, group: Any) -> Any:
    """A layer with and without gradients; after a loss, with the values that it has without the lost experts."""
    layer = moecomm.nn.ExpertParallel(
        group, hidden=64, intermediate=32, num_experts=10, topk=3, max_tokens=16, dtype=torch.float32, backend="host"
    )
    with torch.no_grad():  # fewer rows come after the loss, and products must have the same bits
        for weight in layer.experts.parameters():
            weight.copy_(selecting(*weight.shape, generator=torch.Generator().manual_seed(rank)))
    buffer = layer.open()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    ids = torch.rand(8, 10, generator=torch.Generator().manual_seed(rank)).argsort(dim=1)[:, :3]
    weights = torch.rand(8, 3, generator=torch.Generator().manual_seed(rank))
    lost = torch.tensor([3, 4, 5])  # of rank 1

    def call(ids: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        out = layer(given, ids, weights)
        out.sum().backward()
        with torch.no_grad():
            return [out.detach(), given.grad, layer(x, ids, weights)]

    want = call(torch.where(torch.isin(ids, lost), -1, ids))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert isinstance(failure_of(lambda: layer(x, ids, weights)), moecomm.PeerLost)
    buffer.shrink(keep_ids=True)
    found = call(ids)
    buffer.shrink()
    with pytest.raises(moecomm.BadInput, match="keep_ids"):
        layer(x, ids, weights)
    return [torch.equal(a, b) for a, b in zip(found, want, strict=True)]


def test_layers_go_on(ranks: Ranks) -> None:
    ranks.start(4, layers)
    assert ranks.results(3) == {rank: [True] * 3 for rank in (0, 2, 3)}


def test_grow_leaves_a_buffer_as_it_was_where_no_rank_joins() -> None:
    buffer = moecomm.Buffer("self", **SIZES, device="cpu", timeout_s=0.2)
    with pytest.raises(moecomm.Timeout, match="rank 1"):
        buffer.grow(moecomm.local_ranks(2)[0])
    sums(buffer)
    buffer.grow("self")
    sums(buffer)
    buffer.close()
    with pytest.raises(moecomm.Closed):
        buffer.grow("self")


def with_a_group(rank: int, group: Any, store: str) -> Any:
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=FAR_S)
    if rank == 1:
        die_in_a_round(buffer)
    until_it_fails(buffer)
    dist.destroy_process_group()
    place = (0, None, 1)[rank]
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=place, world_size=2, timeout=timedelta(seconds=20)
    )
    found = buffer.shrink(dist.group.WORLD)
    sums(buffer)
    return found


def test_a_group_of_the_caller_is_used(ranks: Ranks, tmp_path: Any) -> None:
    ranks.start(3, with_a_group, str(tmp_path / "second"))
    assert ranks.results(2) == dict.fromkeys((0, 2), ((0, 2), (1,)))


def test_what_cannot_shrink() -> None:
    buffer = moecomm.Buffer("self", **SIZES, device="cpu")
    handle = buffer.dispatch(torch.zeros(1, 64).bfloat16(), torch.tensor([[0, 1, 2]])).handle
    assert buffer.shrink() == ((0,), ())
    with pytest.raises(moecomm.Closed):
        buffer.combine(torch.zeros(3, 64).bfloat16(), handle)
    with pytest.raises(moecomm.BadInput, match="keep_ids"):
        buffer.shrink(keep_ids="yes")  # type: ignore[arg-type]
    buffer.close()
    with pytest.raises(moecomm.Closed):
        buffer.shrink()


def test_one_decision_stands() -> None:
    """Ranks that propose at once, each with another value."""
    windows = [_native.HostWindow(PAGE_BYTES) for _ in range(4)]
    pages = [Pages([window.address for window in windows], rank) for rank in range(4)]
    start = threading.Barrier(4)

    def propose(rank: int) -> list[bytes]:
        found = []
        for number in range(200):
            start.wait()
            found.append(pages[rank].decide(f"1/{number}/outcome", b"%d of %d" % (rank, number)))
        return found

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(propose, range(4)))
    assert found[0] == found[1] == found[2] == found[3]
    assert [value.split(b" of ")[1] for value in found[0]] == [b"%d" % number for number in range(200)]
    assert pages[3].read(["1/199/outcome"]) == [found[0][199]] and pages[3].read(["1/200/outcome"]) is None
    assert pages[0].decide("1/190/outcome", b"late") == found[0][190]
    with pytest.raises(moecomm.Unsupported, match="no room"):
        pages[0].write("large", b"x" * PAGE_BYTES)


MESSAGES: list[tuple[Any, ...]] = [
    messages.Coming("shrink()", 1, 0, [2], [], []),
    messages.Decision("mask()", [0, 1], 7, True),
    messages.Disagreement([0, 1], "mask()", "shrink()"),
    messages.Lost([]),
    messages.Agreed(3),
    messages.LastCall("grow()", 0.0, False),
    messages.Opened(),
    messages.Failed("Timeout", 1, "text", {"peer": None}, [0, 2]),
    messages.Stray("id", "got", "want"),
]


def test_messages_are_read_as_what_they_are_alone() -> None:
    for message in MESSAGES:
        packed = messages.pack(message)
        assert messages.unpack(packed, type(message)) == message
        for other in MESSAGES:
            if other is not message:
                with pytest.raises(moecomm.Unsupported, match=f"no {type(other).__name__} of this version"):
                    messages.unpack(packed, type(other))


def test_what_is_no_message_is_named() -> None:
    draw, kinds = random.Random(0), [type(message) for message in MESSAGES]
    broken = [b"", b"1", b"[0", b"[]", b"{}", b"null", b"\xff", b'["Lost", [true]]', b'["Agreed", "1"]', b"[" * 9999]
    for message in MESSAGES:
        packed = bytearray(messages.pack(message))
        for _ in range(200):
            changed = packed.copy()
            changed[draw.randrange(len(changed))] = draw.randrange(256)
            broken += [bytes(changed), bytes(changed[: draw.randrange(len(changed))])]
    for data in broken:
        with suppress(moecomm.Unsupported):
            found: Any = messages.unpack(data, *kinds)
            assert messages.unpack(messages.pack(found), type(found)) == found  # a change within a number or a word


def test_erased_values_are_gone() -> None:
    """All of them, so that agreements without end fit a page."""
    windows = [_native.HostWindow(PAGE_BYTES) for _ in range(2)]
    mine, other = (Pages([window.address for window in windows], rank) for rank in range(2))
    names = ["0/1/0", "0/0/ready/0", "0/1/1"]
    for name in names:
        mine.write(name, b"value")
    mine.erase(["0/0/outcome", *names[:2]])
    assert [mine.read([name]) for name in names] == [None, None, [b"value"]]
    assert [other.read([name]) for name in names] == [None, None, [b"value"]]
