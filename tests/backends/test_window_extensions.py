"""Windows that are extended, over a driver that keeps books: no rank waits, and all have mapped what one uses."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from moecomm.backends import windows
from moecomm.backends.windows import local, vmm
from moecomm.backends.windows.extensions import Extensions
from moecomm.errors import Unsupported
from moecomm.ranks.rendezvous import LocalRank
from tests.backends.conftest import run_ranks
from tests.backends.fake_driver import FakeDriver, Status
from tests.test_interrupts import interrupted

PART = 2 << 20  # the driver's granularity
MORE = 5 * PART
Install = Callable[[FakeDriver], FakeDriver]


def open_vmm(group: LocalRank) -> Any:
    device = torch.device("cuda", group.rank)
    return vmm.open_window(group, 3 << 20, device, 20.0, resident=100, fabric=False, more=MORE)


def open_local(group: LocalRank) -> Any:
    return local.open_window(group, 3 << 20, torch.device("cuda", group.rank), resident=100, more=MORE)


OPEN: dict[str, Callable[[LocalRank], Any]] = {"local": open_local, "vmm": open_vmm}


class Opened:
    """A rank's window, its extensions, and the offsets of those in use; counts its waits for rounds."""

    def __init__(self, group: LocalRank, kind: str) -> None:
        self.window, self.waits, self.used = OPEN[kind](group), 0, list[tuple[int, int]]()
        self.extensions = Extensions(self.window, group, None, 20.0, self._wait)

    def _wait(self) -> None:
        self.waits += 1

    def extend(self, nbytes: int) -> tuple[int, int] | None:
        if (found := self.extensions.extend(nbytes, self)) is not None:
            self.used.append(found)
        return found

    def missing(self, nbytes: int) -> int:
        return nbytes

    def holds(self, offset: int) -> bool:
        return any(begin <= offset < begin + size for begin, size in self.used)

    def close(self) -> None:
        self.extensions.close()
        self.window.close()
        del self.window


def opened(kind: str, ranks: int = 3) -> list[Opened]:
    found: list[Any] = run_ranks(ranks, lambda group: Opened(group, kind))
    assert all(isinstance(one, Opened) for one in found), found
    return found


def close(ranks: list[Opened], driver: FakeDriver) -> None:
    for one in ranks:
        one.close()
    ranks.clear()
    gc.collect()
    assert driver.nothing_left, (driver.handles, driver.reserved, driver.mapped)


@pytest.mark.parametrize("kind", OPEN)
def test_memory_is_used_when_all_peers_have_mapped_it(install_driver: Install, kind: str) -> None:
    driver, before = install_driver(FakeDriver()), len(os.listdir("/proc/self/fd"))
    ranks = opened(kind)
    first, second, third = ranks
    for at in range(2):
        assert first.extend(100) is None and first.extensions.pending
        assert first.window.nbytes == (3 + at) * PART
        assert second.extensions.offers.value == third.extensions.offers.value == at + 1
        assert second.extensions.admit() == at + 1 and second.waits == at + 1
        assert first.extend(100) is None, "the third has not mapped it"
        assert third.extensions.admit() == at + 1
        assert first.extend(100) == ((2 + at) * PART, PART) and not first.extensions.pending
        memory = driver.mapped[first.window.address + (2 + at) * PART]
        assert [driver.mapped[one.window.peers[0] + (2 + at) * PART] for one in ranks] == [memory] * 3
    assert driver.handles == {}
    close(ranks, driver)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", OPEN)
def test_ranks_extend_their_windows_at_the_same_time(install_driver: Install, kind: str) -> None:
    driver = install_driver(FakeDriver())
    ranks = opened(kind)
    for one in ranks:
        assert one.extend(PART + 1) is None
    assert [one.extensions.admit() for one in ranks] == [3, 3, 3]
    assert [one.extend(1) for one in ranks] == [(2 * PART, 2 * PART)] * 3
    assert [one.window.extent(rank) for one in ranks for rank in range(3)] == [4 * PART] * 9
    close(ranks, driver)


@pytest.mark.parametrize("kind", OPEN)
def test_a_rank_alone_waits_for_nobody(install_driver: Install, kind: str) -> None:
    driver = install_driver(FakeDriver())
    ranks = opened(kind, 1)
    assert ranks[0].extend(1) == (2 * PART, PART)
    close(ranks, driver)


@pytest.mark.parametrize("kind", OPEN)
def test_addresses_run_out(install_driver: Install, kind: str) -> None:
    driver = install_driver(FakeDriver())
    ranks = opened(kind, 1)
    found = [ranks[0].extend(PART) for _ in range(7)]
    # Of three parts of a MiB, the last half is not in the layout of the window.
    assert found == [(at * PART, PART) for at in range(2, 6)] + [None] * 3
    assert not ranks[0].extensions.pending
    close(ranks, driver)


class Answers:
    """Answers of a driver whose `function` returns `status` while `fails` is set."""

    def __init__(self, function: str, status: Status) -> None:
        self._function, self._status, self.fails = function, status, False

    def __call__(self, called: str, thread: str) -> Status:
        return self._status if self.fails and called == self._function else Status.CUDA_SUCCESS


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"])
def test_memory_that_is_out_leaves_the_window_as_it_is(install_driver: Install, function: str) -> None:
    answers = Answers(function, Status.CUDA_ERROR_OUT_OF_MEMORY)
    driver = install_driver(FakeDriver(answers))
    ranks = opened("vmm", 2)
    answers.fails = True
    assert ranks[0].extend(1) is None and not ranks[0].extensions.pending
    answers.fails = False
    assert ranks[0].extend(1) is None, "it has been tried"
    assert ranks[0].extensions.offers.value == 0 and ranks[0].window.nbytes == 2 * PART
    assert driver.handles == {}
    close(ranks, driver)


@pytest.mark.parametrize("function", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_a_peer_cannot_map_is_not_used(install_driver: Install, function: str) -> None:
    answers = Answers(function, Status.CUDA_ERROR_INVALID_VALUE)
    driver = install_driver(FakeDriver(answers))
    ranks = opened("vmm", 2)
    assert ranks[0].extend(1) is None
    answers.fails = True
    assert ranks[1].extensions.admit() == 1
    answers.fails = False
    assert ranks[0].extend(1) is None and ranks[0].extensions.pending
    assert driver.handles == {}
    close(ranks, driver)


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("seen", [False, True])
def test_what_is_released_comes_back_with_its_extensions(install_driver: Install, kind: str, seen: bool) -> None:
    """Also what a peer has not mapped before."""
    driver = install_driver(FakeDriver())
    ranks = opened(kind)
    assert ranks[0].extend(2 * PART) is None
    if seen:
        for one in ranks:
            one.extensions.admit()
        assert ranks[0].extend(1) == (2 * PART, 2 * PART)
    together = threading.Barrier(3)

    def pause(group: LocalRank) -> None:
        one = ranks[group.rank]
        one.window.release()
        together.wait()
        assert one.window.nbytes == PART
        together.wait()
        size = (3 if group.rank == 0 else 1) * PART
        assert one.window.restore(group) == (one.window.address + PART, size)
        one.extensions.publish()

    assert run_ranks(3, pause) == [None] * 3
    for one in ranks:
        one.extensions.admit()
        assert [one.window.extent(rank) for rank in range(3)] == [4 * PART, 2 * PART, 2 * PART]
    if not seen:
        assert ranks[0].extend(1) == (2 * PART, 2 * PART)
    assert ranks[0].extend(1) is None
    for one in ranks:
        one.extensions.admit()
    assert ranks[0].extend(1) == (4 * PART, PART)
    assert driver.handles == {}
    close(ranks, driver)


def grows(one: Opened, meeting: threading.Barrier) -> None:
    """Take part in a growth for two parts; raise BrokenBarrierError where another rank leaves it."""
    try:
        found = one.extensions.grow(2 * PART, one, range(3), lambda: meeting.wait(20) and None)
    except BaseException:
        meeting.abort()
        raise
    assert found is not None and found[1] is not None
    one.used.append(found[1])


def extends(ranks: list[Opened]) -> None:
    """Let the first rank extend its window, as long as the others map it."""
    first = ranks[0]
    for _ in range(4):
        if first.used or first.extend(100) is not None:
            break
        for one in ranks[1:]:
            one.extensions.admit()


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("what", ["extends", "maps", "grows", "takes part"])
def test_an_interrupt_at_any_instruction_loses_no_memory(install_driver: Install, kind: str, what: str) -> None:
    """The next call works, uses the memory that was taken before, and all ranks have mapped it."""
    number, was = 0, True
    while was:
        driver = install_driver(FakeDriver())
        ranks = opened(kind)
        if what == "extends":
            was = interrupted(lambda: ranks[0].extend(100), number, anywhere=False)  # noqa: B023
        elif what == "maps":
            assert ranks[0].extend(100) is None
            was = interrupted(ranks[1].extensions.admit, number, anywhere=False)
        else:
            meeting, at = threading.Barrier(3), 0 if what == "grows" else 1

            def body(group: LocalRank) -> bool:
                call = partial(grows, ranks[group.rank], meeting)  # noqa: B023
                return interrupted(call, number, anywhere=False) if group.rank == at else bool(call())  # noqa: B023

            found = run_ranks(3, body)
            was = found[at] is True
            others = [one for rank, one in enumerate(found) if rank != at]
            assert all(isinstance(one, threading.BrokenBarrierError) or one is False for one in others), found
        if what in ("extends", "maps"):
            extends(ranks)
            size, parts = PART, [[(2 * PART, PART)], [], []]
        else:
            if was:
                behind = [one.used.clear() for one in ranks if one.used]  # a rank whose growth was over goes on with it
                meeting = threading.Barrier(3)
                assert run_ranks(3, lambda group: grows(ranks[group.rank], meeting)) == [None] * 3, (number, behind)  # noqa: B023
            size, parts = 2 * PART, [[(2 * PART, 2 * PART)]] * 3
        assert [one.used for one in ranks] == parts, number
        for rank, owner in enumerate(ranks):
            if owner.used:
                assert owner.window.nbytes == 2 * PART + size, number
                memory = driver.mapped[owner.window.address + 2 * PART]
                assert [driver.mapped[one.window.peers[rank] + 2 * PART] for one in ranks] == [memory] * 3, number
        driver.handles.clear()  # one that the driver had just made when the interrupt came
        close(ranks, driver)
        number += 1
    assert number > 10


def test_a_rank_without_descriptors_fails_all(install_driver: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, make = install_driver(FakeDriver()), socket.socket

    def refuse(*how: Any) -> socket.socket:
        if threading.current_thread().name == "rank1":
            raise OSError(errno.EMFILE, "Too many open files")
        return make(*how)

    def body(group: LocalRank) -> None:
        window = open_vmm(group)
        group.all_gather(b"")
        monkeypatch.setattr(socket, "socket", refuse)
        try:
            Extensions(window, group, None, 20.0, lambda: None)
        finally:
            window.close()

    found = run_ranks(2, body)
    assert [type(error) for error in found] == [Unsupported] * 2 and "Too many open files" in str(found[0])
    found.clear()
    gc.collect()
    assert driver.nothing_left, (driver.handles, driver.reserved, driver.mapped)


def test_other_users_and_other_messages_are_not_heard(install_driver: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install_driver(FakeDriver())
    ranks = opened("vmm", 2)
    first, second = ranks
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(second.extensions._socket.getsockname())
        stranger.send(b"hello")
    second.extensions.admit()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert first.extend(1) is None and not first.extensions.pending, "its peer seems to be of another user"
    assert second.window.extent(0) == 2 * PART
    close(ranks, driver)


@pytest.mark.parametrize("kind", OPEN)
def test_a_rank_without_so_many_addresses(install_driver: Install, kind: str) -> None:
    """All ranks open a window that keeps its size."""
    reserved = []

    class Driver(FakeDriver):
        def cuMemAddressReserve(self, nbytes: int, *how: int) -> tuple[Any, ...]:
            if threading.current_thread().name == "rank1" and nbytes > MORE:
                return Status.CUDA_ERROR_OUT_OF_MEMORY, None
            reserved.append(nbytes)
            return super().cuMemAddressReserve(nbytes, *how)

    driver = install_driver(Driver())
    peer = windows.Peer(b"host", b"gpu", "vmm")

    def body(group: LocalRank) -> Any:
        group.in_process = kind == "local"
        return windows.open_window(
            group, [peer] * 2, 3 << 20, torch.device("cuda", group.rank), 20.0, resident=100, more=MORE
        )

    found = run_ranks(2, body)
    assert [windows.extensible(window) for window in found] == [None, None], found
    assert reserved[-1] == 2 * PART
    for window in found:
        window.close()
    found.clear()
    del window
    gc.collect()
    assert driver.nothing_left, (driver.handles, driver.reserved, driver.mapped)


def test_windows_of_libraries_and_between_hosts_keep_their_size(install_driver: Install) -> None:
    driver = install_driver(FakeDriver())
    found = run_ranks(
        2,
        lambda group: vmm.open_window(
            group, 3 << 20, torch.device("cuda", group.rank), 20.0, resident=100, fabric=True, more=MORE
        ),
    )
    assert [windows.extensible(window) for window in found] == [None, None]  # type: ignore[arg-type]
    assert windows.extensible(None) is None
    for window in found:
        window.close()  # type: ignore[attr-defined]
    found.clear()
    del window
    gc.collect()
    assert driver.nothing_left, (driver.handles, driver.reserved, driver.mapped)
