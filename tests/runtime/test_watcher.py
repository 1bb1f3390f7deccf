from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moecomm import _native

from ..live import ROOM_S
from .processes import open_fds

PEER_LOST = 2


def word_of(rank: int) -> int:
    return (PEER_LOST << 16) | (rank + 1)


@contextmanager
def sleepers(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def becomes(address: int, wanted: int, within_s: float = ROOM_S) -> bool:
    """Polls a word until it is no longer 0."""
    end = time.monotonic() + within_s
    while (found := _native.read_word(address)) == 0 and time.monotonic() < end:
        time.sleep(0.0005)
    return found == wanted


def threads() -> set[str]:
    """Ids of the threads of this process."""
    return set(os.listdir("/proc/self/task"))


def all_end(besides: set[str], within_s: float = ROOM_S) -> bool:
    """Return whether no other threads are left: the system lists one for a moment longer than it can be joined."""
    end = time.monotonic() + within_s
    while (left := threads() - besides) and time.monotonic() < end:
        time.sleep(0.0005)
    return not left


@pytest.mark.parametrize("pidfds", [True, False])
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_names_the_dead(victim: int, pidfds: bool) -> None:
    memory = _native.host_alloc(256)
    with sleepers(4) as processes:
        watcher = _native.Watcher([p.pid for p in processes], 1, memory.address, memory.address + 64, pidfds=pidfds)
        assert watcher.dead() == []
        processes[victim].kill()  # and is not waited for: its parent may be busy
        assert becomes(memory.address, word_of(victim))
        assert becomes(memory.address + 64, word_of(victim))
        assert watcher.dead() == [victim]
        watcher.close()


@pytest.mark.parametrize("pidfds", [True, False])
def test_dead_before_it_is_watched(pidfds: bool) -> None:
    memory = _native.host_alloc(256)
    with sleepers(1) as processes:
        processes[0].kill()
        processes[0].wait()
        watcher = _native.Watcher([processes[0].pid, os.getpid()], 1, memory.address, pidfds=pidfds)
        assert becomes(memory.address, word_of(0))
        watcher.close()


def test_passed_descriptors_count_and_not_pids() -> None:
    """In another PID namespace a peer's pid may be ours, or nobody's."""
    memory = _native.host_alloc(256)
    fds = open_fds()
    with sleepers(2) as processes:
        passed = [-1, *(_native.pidfd_open(process.pid) for process in processes)]
        watcher = _native.Watcher([os.getpid(), os.getpid(), 1 << 22], 0, memory.address, passed=passed)
        assert not becomes(memory.address, word_of(1), within_s=0.15)
        assert watcher.dead() == []
        processes[0].kill()
        assert becomes(memory.address, word_of(1))
        processes[1].kill()
        processes[1].wait()
        watcher.close()
    del watcher
    assert open_fds() == fds


def test_the_first_cause_stays() -> None:
    memory = _native.host_alloc(256)
    with sleepers(2) as processes:
        watcher = _native.Watcher([0, processes[0].pid, processes[1].pid], 0, memory.address, memory.address + 64)
        assert _native.set_abort(memory.address, 3, 7)
        processes[1].kill()
        assert becomes(memory.address + 64, word_of(2))
        assert _native.read_word(memory.address) == (3 << 16) | 8
        assert not _native.set_abort(memory.address + 64, 3, 7)
        watcher.close()


@pytest.mark.parametrize("pidfds", [True, False])
def test_expected_leave(pidfds: bool) -> None:
    memory = _native.host_alloc(256)
    with sleepers(3) as processes:
        left = [memory.address + 64, memory.address + 128]
        watcher = _native.Watcher([p.pid for p in processes], 2, memory.address, left=left, pidfds=pidfds)
        _native.store_word(left[0], 1)
        processes[0].kill()
        processes[0].wait()
        processes[1].kill()
        processes[1].wait()
        assert becomes(memory.address, word_of(1))  # looked at after rank 0, so that one has been passed over
        assert watcher.dead() == [1]
        watcher.close()


def test_ranks_of_one_process_die_together() -> None:
    memory = _native.host_alloc(256)
    with sleepers(1) as processes:
        watcher = _native.Watcher([processes[0].pid, os.getpid(), processes[0].pid], 1, memory.address)
        processes[0].kill()
        assert becomes(memory.address, word_of(0))
        watcher.close()
        assert watcher.dead() == [0, 2]


def test_nobody_to_watch() -> None:
    memory = _native.host_alloc(256)
    before = threads()
    watcher = _native.Watcher([os.getpid(), 0, os.getpid(), -1], 0, memory.address)
    assert threads() <= before
    watcher.close()
    assert (watcher.dead(), _native.read_word(memory.address)) == ([], 0)


def test_silent_after_close() -> None:
    memory = _native.host_alloc(256)
    with sleepers(1) as processes:
        watcher = _native.Watcher([processes[0].pid, os.getpid()], 1, memory.address)
        start = time.monotonic()
        watcher.close()
        watcher.close()
        assert time.monotonic() - start < ROOM_S
        processes[0].kill()
        processes[0].wait()
        assert (watcher.dead(), _native.read_word(memory.address)) == ([], 0)


def test_close_from_several_threads() -> None:
    memory = _native.host_alloc(256)
    with sleepers(1) as processes:
        for _ in range(50):
            watcher = _native.Watcher([processes[0].pid, os.getpid()], 1, memory.address)
            closing = [threading.Thread(target=watcher.close) for _ in range(3)]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join()
    assert _native.read_word(memory.address) == 0


def test_nothing_leaks() -> None:
    memory = _native.host_alloc(256)
    with sleepers(2) as processes:
        pids = [processes[0].pid, os.getpid(), processes[1].pid]
        fds, before = open_fds(), threads()
        for _ in range(100):
            _native.Watcher(pids, 1, memory.address)
        assert open_fds() == fds and all_end(besides=before)
