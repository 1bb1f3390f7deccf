"""Windows of CUDA VMM and of ranks of one process, over a driver that keeps books."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moecomm.backends.collective import NoRoom
from moecomm.backends.windows import local, vmm
from moecomm.core.rendezvous import LocalRank
from moecomm.errors import Unsupported
from tests.backends.conftest import run_ranks
from tests.backends.fake_driver import FakeDriver, Status

Install = Callable[[FakeDriver], FakeDriver]


def open_vmm(group: LocalRank, fabric: bool = False) -> vmm.VmmWindow:
    return vmm.open_window(group, 3 << 20, torch.device("cuda", group.rank), 20.0, fabric=fabric)


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
        assert [driver.mapped[address] for address in window.peers] == [driver.own[f"rank{peer}"] for peer in range(3)]
        assert window.address == window.peers[rank] and window.nbytes == 4 << 20
        assert all(driver.access[address] == [rank] for address in window.peers)
        assert window.kind == ("fabric" if fabric else "vmm")
    assert driver.handles == {} and descriptors() == before, "mappings keep the memory; nothing else stays open"

    tensor_owner = windows[0].owner
    for window in windows:
        window.close()
        window.close()
    kept = {window.address for window in windows}
    assert set(driver.mapped) == kept, "each rank has dropped its peers, and only them"
    windows.clear()
    del window
    gc.collect()
    assert len(driver.mapped) == 1, "a tensor still lives in one of the windows"
    del tensor_owner
    gc.collect()
    assert driver.nothing_left


@pytest.mark.parametrize("fabric", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
    ],
)
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
    says = "rank 1: a window of 4194304 bytes does not fit on cuda:1: 1000 of 2000 bytes are free; "
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
        3, lambda group: local.open_window(group, 100, torch.device("cuda", devices[group.rank]))
    )
    assert windows[0].peers == windows[1].peers == windows[2].peers == [window.address for window in windows]
    assert [driver.mapped[window.address] for window in windows] == [driver.own[f"rank{rank}"] for rank in range(3)]
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
    found = run_ranks(2, lambda group: local.open_window(group, 100, torch.device("cuda", group.rank)))
    assert [type(error) for error in found] == [Unsupported] * 2
    found.clear()
    gc.collect()
    assert driver.nothing_left
