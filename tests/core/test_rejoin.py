"""Buffer.grow(): processes join a Buffer whose ranks go on with their rounds, and ranks are lost meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import moecomm
from moecomm.testing import LocalBuffers

from .. import kill_plans
from ..conftest import Ranks
from ..few import few
from ..live import FAR_S, ROOM_S
from ..rejoin import Job, Member
from ..supervisor import Supervisor
from .test_membership import SIZES, failure_of, sums, until_it_fails


def test_two_ranks_become_four_and_two_again(tmp_path: Path) -> None:
    """The plan that NIXL has published: 2 ranks, 4, two of which are killed; 0 and 3 are left; then 4 again.

    Two processes are ready before each is wanted, as kill plans on GPUs have it.
    """
    sizes = {**kill_plans.SIZES, "backend": "host", "timeout_s": kill_plans.TIMEOUT_S}
    with Supervisor(tmp_path, kill_plans.member_of, 2, None, spares=2, expected=6) as job:
        job.fill(sizes)
        job.wait(lambda: job.full(kill_plans.EXACT))
        assert job.started == 2 and len(job.pids) == 4
        job.ranks = 4
        job.fill(sizes)
        job.wait(lambda: job.full(kill_plans.EXACT))
        job.kill(1)
        job.kill(2)
        job.wait(lambda: job.made([0, 3], kill_plans.EXACT))
        job.fill(sizes)
        job.wait(lambda: job.full(kill_plans.EXACT))
        job.stop()
    assert job.started == len(job.pids) == 6
    found = kill_plans.Found()
    for process in range(6):
        kill_plans.check_events(job, process, found, f"process {process}")
    assert len(found.ms["join"]) == 6 and len(found.ms["grow"]) == 4
    found.check_soon()


def test_the_time_of_a_join_begins_when_the_last_that_joins_is_there(tmp_path: Path) -> None:
    """Processes on GPUs start one after the other, seconds apart."""
    late_s = 1.0

    def member(job: Job, process: int) -> Member:
        time.sleep(late_s * process)
        return kill_plans.member_of(job, process)

    with Supervisor(tmp_path, member, 2, None, expected=2) as job:
        job.fill({**kill_plans.SIZES, "backend": "host", "timeout_s": kill_plans.TIMEOUT_S})
        job.wait(lambda: job.full(1))
        job.stop()
        joined = [event["ms"] for process in (0, 1) for event in job.job.events(process) if event["kind"] == "join"]
    assert len(joined) == 2 and max(joined) < 1e3 * late_s


def test_ranks_make_rounds_until_they_see_that_a_rank_waits() -> None:
    group, rounds = moecomm.local_ranks(3), []
    sizes: dict[str, Any] = {**SIZES, "device": "cpu"}

    def old(buffer: moecomm.Buffer) -> int:
        if buffer.rank == 0:
            assert buffer.joining(group[0]) == []
        come.wait()
        while buffer.joining(group[buffer.rank]) != [2]:
            time.sleep(1e-3)
        begun.wait()
        for _ in range(20):
            sums(buffer)
        rounds.append(buffer.rank)
        buffer.grow(group[buffer.rank])
        sums(buffer)
        return buffer.num_ranks

    def new() -> int:
        come.wait()
        buffer = moecomm.Buffer(group[2], **sizes)
        assert sorted(rounds) == [0, 1]
        sums(buffer)
        ranks = buffer.num_ranks
        closing.wait()
        buffer.close()
        return ranks

    come, begun, closing = threading.Barrier(3), threading.Barrier(2), threading.Event()
    with LocalBuffers(**sizes, ranks=2) as buffers, ThreadPoolExecutor(3) as pool:
        joined = pool.submit(new)
        found = list(pool.map(old, buffers.buffers))
        closing.set()
        assert [*found, joined.result()] == [3, 3, 3]


def test_a_rank_that_gave_up_does_not_wait() -> None:
    group = moecomm.local_ranks(2)
    buffer = moecomm.Buffer("self", **SIZES, device="cpu")
    with pytest.raises(moecomm.Timeout):
        moecomm.Buffer(group[1], **SIZES, device="cpu", timeout_s=0.1)
    assert buffer.joining(group[0]) == []
    assert buffer.joining("self") == []
    with pytest.raises(moecomm.BadInput, match="group"):
        buffer.joining("x")
    buffer.close()
    with pytest.raises(moecomm.Closed):
        buffer.joining(group[0])


def test_ranks_that_shrank_to_other_domains_grow_with_the_domains_that_were_asked_for() -> None:
    """2 does not divide the 3 ranks that are left, but the 4 that go on."""
    sizes = {**SIZES, "domain_ranks": 2, "timeout_s": 10.0}
    first, second = moecomm.local_ranks(4), moecomm.local_ranks(4)
    met = threading.Barrier(4, timeout=30)

    def rank(number: int) -> tuple[int, int]:
        buffer = moecomm.Buffer(first[number], **sizes)
        if number == 3:
            buffer.close()
            met.wait()
            buffer, left = moecomm.Buffer(second[3], **sizes), 1
        else:
            buffer.shrink()
            left = buffer.domain_ranks
            met.wait()
            buffer.grow(second[number])
        with buffer:
            sums(buffer)
            return left, buffer.domain_ranks

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rank, range(4))) == [(1, 2)] * 4


def test_abort_ends_grow() -> None:
    buffer = moecomm.Buffer("self", **SIZES, device="cpu", timeout_s=FAR_S)
    group = moecomm.local_ranks(2)
    timer = threading.Timer(0.05, buffer.abort)
    timer.start()
    with pytest.raises(moecomm.Aborted) as error:
        buffer.grow(group[0])
    timer.join()
    assert error.value.op == "grow"
    buffer.shrink()
    sums(buffer)
    buffer.close()


def is_lost_in_grow(rank: int, group: Any) -> Any:
    """Rank 2 dies while ranks 0 and 1 are in grow(), and rank 3 opens."""
    first = dist.new_group([0, 1, 2])
    if rank == 3:
        error = failure_of(lambda: moecomm.Buffer(group, **SIZES, timeout_s=FAR_S))
        return type(error), error.peer
    buffer = moecomm.Buffer(first, **SIZES, timeout_s=FAR_S)
    sums(buffer)
    if rank == 2:
        while buffer.joining(group) != [0, 1, 3]:
            time.sleep(1e-3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    error = failure_of(lambda: buffer.grow(group))
    assert time.monotonic() - begin < ROOM_S
    assert until_it_fails(buffer).peer == 2
    found = buffer.shrink()
    sums(buffer)
    return type(error), error.peer, found.lost


def test_a_rank_that_is_lost_before_it_comes_ends_grow(ranks: Ranks) -> None:
    ranks.start(4, is_lost_in_grow)
    survived = moecomm.PeerLost, -1, (2,)
    assert ranks.results(3) == {0: survived, 1: survived, 3: (moecomm.PeerLost, -1)}


def stops_in_shrink(rank: int, group: Any, pids: Any, delay_s: float) -> Any:
    """Rank 1 dies; rank 2 stops while it shrinks, and goes on when rank 0 has waited for it."""
    pids[rank] = os.getpid()
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=FAR_S)
    sums(buffer)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until_it_fails(buffer)
    acts = {0: threading.Thread(target=resume, args=(pids[2],)), 2: threading.Timer(delay_s, stop)}
    if rank in acts:
        acts[rank].start()
    found = buffer.shrink()
    for _ in range(100):
        sums(buffer)
    if rank in acts:
        acts[rank].join()
    buffer.close()
    return found


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def resume(process: int) -> None:
    """Resume a process a while after it has stopped."""
    stat = Path(f"/proc/{process}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(1e-3)
    time.sleep(0.2)
    os.kill(process, signal.SIGCONT)


def look_at_half_an_entry(rank: int, group: Any, path: str) -> int:
    """As a process leaves it that is killed while it writes: the length of a key, and no key."""
    buffer = moecomm.Buffer("self", **SIZES, timeout_s=0.4)
    store = dist.FileStore(path)
    with Path(path).open("ab") as file:
        file.write((40).to_bytes(4, "little"))
    with pytest.raises(moecomm.Timeout, match="does not answer") as found:
        buffer.joining(dist.ProcessGroup(store, 0, 2))
    sums(buffer)
    buffer.close()
    return found.value.peer


def test_a_store_that_was_torn_while_a_rank_joined_is_a_timeout(ranks: Ranks, tmp_path: Path) -> None:
    """torch's FileStore waits for the rest without end, in a thread that is left behind."""
    assert ranks.run(1, look_at_half_an_entry, str(tmp_path / "torn")) == [-1]


@pytest.mark.parametrize("delay_ms", few(range(0, 20, 4), 0, 8))
def test_a_rank_that_is_stopped_for_a_moment_in_shrink_goes_on(ranks: Ranks, delay_ms: int) -> None:
    pids = ranks._context.Array("i", 4)
    ranks.start(4, stops_in_shrink, pids, 1e-3 * delay_ms)
    assert ranks.results(3) == dict.fromkeys((0, 2, 3), ((0, 2, 3), (1,)))
