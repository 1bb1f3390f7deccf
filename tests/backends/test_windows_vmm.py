"""Windows of CUDA VMM and of ranks of one process, over a driver that keeps books."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moecomm.backends.windows import local, vmm
from moecomm.errors import Unsupported
from moecomm.ranks.collective import NoRoom
from moecomm.ranks.rendezvous import LocalRank, local_ranks
from tests.backends.conftest import run_ranks
from tests.backends.fake_driver import REFUSABLE, FakeDriver, Status

PART = 2 << 20  # the driver's granularity
Install = Callable[[FakeDriver], FakeDriver]


def open_vmm(group: LocalRank, fabric: bool = False) -> vmm.VmmWindow:
    return vmm.open_window(group, 3 << 20, torch.device("cuda", group.rank), 20.0, resident=100, fabric=fabric)


def mapped(driver: FakeDriver, address: int) -> list[int]:
    """The memory of both parts of a window."""
    return [driver.mapped[address], driver.mapped[address + PART]]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refuse(function: str, rank: int, status: Status = Status.CUDA_ERROR_INVALID_VALUE) -> FakeDriver:
    def answer(called: str, thread: str) -> Status:
        return status if (called, thread) == (function, f"rank{rank}") else Status.CUDA_SUCCESS

    return FakeDriver(answer)


@pytest.mark.parametrize("fabric", [False, True])
def test_every_rank_maps_the_memory_of_every_rank(install_driver: Install, fabric: bool) -> None:
    driver, before = install_driver(FakeDriver()), descriptors()
    windows: list[Any] = run_ranks(3, lambda group: open_vmm(group, fabric))
    for rank, window in enumerate(windows):
        assert [mapped(driver, address) for address in window.peers] == [driver.own[f"rank{peer}"] for peer in range(3)]
        assert window.address == window.peers[rank] and window.nbytes == 4 << 20
        assert all(driver.access[address + part] == [rank] for address in window.peers for part in (0, PART))
        assert window.kind == ("fabric" if fabric else "vmm")
    assert driver.handles == {} and descriptors() == before, "mappings keep the memory; nothing else stays open"

    tensor_owner = windows[0].owner
    for window in windows:
        window.close()
        window.close()
    kept = {window.address + part for window in windows for part in (0, PART)}
    assert set(driver.mapped) == kept, "each rank has dropped its peers, and only them"
    windows.clear()
    del window
    gc.collect()
    assert len(driver.mapped) == 2, "a tensor still lives in one of the windows"
    del tensor_owner
    gc.collect()
    assert driver.nothing_left


@pytest.mark.parametrize("fabric", [False, True])
@pytest.mark.parametrize("function", REFUSABLE)
def test_a_failure_on_one_rank_fails_all_and_leaves_nothing(
    install_driver: Install, function: str, fabric: bool
) -> None:
    driver, before = install_driver(refuse(function, 2)), descriptors()
    found = run_ranks(3, lambda group: open_vmm(group, fabric))
    assert [type(error) for error in found] == [Unsupported] * 3
    assert str(found[2]) == f"{function}: CUDA_ERROR_INVALID_VALUE"
    assert str(found[0]) == str(found[1]) == f"rank 2: {found[2]}"
    found.clear()
    gc.collect()
    assert driver.nothing_left and descriptors() == before


def test_a_failure_of_the_second_import_undoes_the_first(install_driver: Install) -> None:
    calls = []

    def second_import_of_rank2(function: str, thread: str) -> Status:
        if (function, thread) == ("cuMemImportFromShareableHandle", "rank2"):
            calls.append(function)
            return Status.CUDA_ERROR_NOT_PERMITTED if len(calls) == 2 else Status.CUDA_SUCCESS
        return Status.CUDA_SUCCESS

    driver, before = install_driver(FakeDriver(second_import_of_rank2)), descriptors()
    found = run_ranks(3, open_vmm)
    assert [type(error) for error in found] == [Unsupported] * 3 and "CUDA_ERROR_NOT_PERMITTED" in str(found[0])
    found.clear()
    gc.collect()
    assert driver.nothing_left and descriptors() == before


def test_out_of_memory_says_how_much_and_what_to_do(install_driver: Install) -> None:
    driver = install_driver(refuse("cuMemCreate", 1, Status.CUDA_ERROR_OUT_OF_MEMORY))
    found = run_ranks(2, open_vmm)
    assert [type(error) for error in found] == [NoRoom, NoRoom], "no rank goes on to try another kind of window"
    says = "rank 1: 2097152 bytes of a window do not fit on cuda:1: 1000 of 2000 bytes are free; "
    assert str(found[0]).startswith(says)
    assert "window_bytes=" in str(found[0]) and "max_tokens=" in str(found[0])
    found.clear()
    gc.collect()
    assert driver.nothing_left


def test_ranks_of_a_process_share_addresses(install_driver: Install) -> None:
    """Ranks 0 and 2 are on one GPU, rank 1 on another: everybody may use everything, and the last to close frees it."""
    driver = install_driver(FakeDriver())
    devices = [3, 5, 3]
    windows: list[Any] = run_ranks(
        3, lambda group: local.open_window(group, 100, torch.device("cuda", devices[group.rank]), resident=1)
    )
    assert windows[0].peers == windows[1].peers == windows[2].peers == [window.address for window in windows]
    assert [[driver.mapped[window.address]] for window in windows] == [driver.own[f"rank{rank}"] for rank in range(3)]
    assert [driver.access[window.address] for window in windows] == [[3, 5], [5, 3], [3, 5]]
    assert driver.handles == {}
    last = windows.pop()
    for window in windows:
        window.close()
    windows.clear()
    del window
    gc.collect()
    assert len(driver.mapped) == 3, "rank 2 may still write to them"
    last.close()
    del last
    gc.collect()
    assert driver.nothing_left


def test_a_failure_among_ranks_of_a_process_leaves_nothing(install_driver: Install) -> None:
    driver = install_driver(refuse("cuMemSetAccess", 0))
    found = run_ranks(2, lambda group: local.open_window(group, 100, torch.device("cuda", group.rank), resident=1))
    assert [type(error) for error in found] == [Unsupported] * 2
    found.clear()
    gc.collect()
    assert driver.nothing_left


def open_local(group: LocalRank) -> local.LocalWindow:
    return local.open_window(group, 3 << 20, torch.device("cuda", group.rank), resident=100)


OPEN: dict[str, Callable[[LocalRank], Any]] = {
    "local": open_local,
    "vmm": open_vmm,
    "fabric": lambda group: open_vmm(group, fabric=True),
}


@pytest.mark.parametrize("kind", OPEN)
def test_what_is_released_comes_back_at_the_same_addresses(install_driver: Install, kind: str) -> None:
    driver, before = install_driver(FakeDriver()), descriptors()
    seen: list[Any] = []
    together = threading.Barrier(3)

    def body(group: LocalRank) -> Any:
        window = OPEN[kind](group)
        peers = list(window.peers)
        together.wait()
        first = {address: driver.mapped[address] for address in peers}
        for _ in range(2):
            together.wait()
            window.release()
            together.wait()
            seen.append((set(driver.mapped), window.nbytes))
            together.wait()
            assert window.restore(group) == (window.address + PART, PART)
        together.wait()
        assert window.peers == peers and window.nbytes == 2 * PART
        assert {address: driver.mapped[address] for address in peers} == first, "the resident part is the same memory"
        newest = [driver.own[f"rank{peer}"][-1] for peer in range(3)]
        assert [driver.mapped[address + PART] for address in peers] == newest
        together.wait()
        return window

    windows: list[Any] = run_ranks(3, body)
    assert not [error for error in windows if isinstance(error, Exception)]
    everywhere = {address for window in windows for address in window.peers}
    assert seen == [(everywhere, PART)] * 6, "only the resident parts were mapped, on every rank"
    assert driver.handles == {} and descriptors() == before
    for window in windows:
        window.close()
    windows.clear()
    del window
    seen.clear()
    gc.collect()
    assert driver.nothing_left


@pytest.mark.parametrize("kind", OPEN)
def test_memory_that_is_not_free_stays_released_and_can_be_restored_later(install_driver: Install, kind: str) -> None:
    full = False

    def answer(function: str, thread: str) -> Status:
        out = full and (function, thread) == ("cuMemCreate", "rank1")
        return Status.CUDA_ERROR_OUT_OF_MEMORY if out else Status.CUDA_SUCCESS

    driver, before = install_driver(FakeDriver(answer)), descriptors()
    together = threading.Barrier(3)

    def body(group: LocalRank) -> Any:
        nonlocal full
        window = OPEN[kind](group)
        together.wait()
        window.release()
        together.wait()
        full = True
        with pytest.raises(NoRoom, match=r"2097152 bytes of a window do not fit on cuda:1"):
            window.restore(group)
        assert window.nbytes == PART
        together.wait()
        assert len(driver.mapped) == (3 if kind == "local" else 9) and driver.handles == {}
        together.wait()
        full = False
        together.wait()
        window.restore(group)
        assert window.nbytes == 2 * PART
        return window

    windows: list[Any] = run_ranks(3, body)
    assert not [error for error in windows if isinstance(error, Exception)]
    for window in windows:
        window.release()
        window.close()
    windows.clear()
    del window
    gc.collect()
    assert driver.nothing_left and descriptors() == before


def test_windows_without_a_part_to_release(install_driver: Install) -> None:
    """All of a small window may be resident."""
    driver = install_driver(FakeDriver())
    (window,) = run_ranks(1, lambda group: local.open_window(group, 100, torch.device("cuda", 0), resident=50))
    window.release()
    assert window.restore(local_ranks(1)[0]) == (window.address + PART, 0) and window.nbytes == PART
    window.close()
    del window
    gc.collect()
    assert driver.nothing_left
