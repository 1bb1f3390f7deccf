"""Windows of NCCL, over a stand-in for nccl4py that keeps books."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from moecomm.backends.windows import nccl
from moecomm.errors import Unsupported
from moecomm.ranks.collective import NoRoom
from tests.backends.conftest import run_ranks


class Books:
    """Calls of the ranks to NCCL, and which of them fail where."""

    def __init__(self, version: str = "2.30.7", fails: tuple[str, int] = ("", -1)) -> None:
        self.version, self.fails = Version(version), fails
        self.memory: set[int] = set()
        self.communicators: set[int] = set()
        self.configs: list[tuple[Any, str | None]] = []  # each with NCCL_NVLS_ENABLE at that time

    def check(self, what: str, rank: int) -> None:
        if self.fails == (what, rank):
            raise RuntimeError(f"{what} failed")


def stand_in(books: Books) -> ModuleType:
    """nccl.core with the names that the windows use.  A GPU's number is its rank."""

    class Communicator:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        @classmethod
        def init(cls, ranks: int, rank: int, unique_id: bytes, config: Any) -> Communicator:
            assert unique_id == b"\x07" * 128
            books.configs.append((config, os.environ.get("NCCL_NVLS_ENABLE")))
            books.check("init", rank)
            books.communicators.add(rank)
            return cls(rank)

        def register_window(self, buffer: Any, flags: str) -> Any:
            assert flags == "symmetric" and buffer.size == 4 << 20
            handle = 0 if books.fails == ("symmetric", self.rank) else 99
            reachable = books.fails != ("peer", self.rank)
            return SimpleNamespace(
                handle=handle, get_peer_device_pointer=lambda peer: 1000 * self.rank + peer + 1 if reachable else None
            )

        def abort(self) -> None:
            books.communicators.remove(self.rank)

    def mem_alloc(nbytes: int, device: int) -> Any:
        books.check("mem_alloc", device)
        books.memory.add(device)
        return SimpleNamespace(handle=0x7000 + device, size=nbytes, device=device)

    core = ModuleType("nccl.core")
    core.__version__ = "0.6.0"
    core.LibraryInfo = object
    core.Communicator = Communicator
    core.UniqueId = SimpleNamespace(from_bytes=bytes)
    core.get_unique_id = lambda: b"\x07" * 128
    core.get_version = lambda: SimpleNamespace(libnccl=SimpleNamespace(version=books.version, path="/lib/libnccl.so.2"))
    core.mem_alloc, core.mem_free = mem_alloc, lambda buffer: books.memory.remove(buffer.device)
    core.WindowFlag = SimpleNamespace(COLL_SYMMETRIC="symmetric")
    core.NcclNvlsHostMode = SimpleNamespace(DISABLE="off")
    core.NCCLConfig = type("NCCLConfig", (SimpleNamespace,), {"__dataclass_fields__": {"nvls_host_mode": None}})
    return core


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Books], Books]:
    def install(books: Books) -> Books:
        core, package = stand_in(books), ModuleType("nccl")
        package.core = core  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nccl", package)
        monkeypatch.setitem(sys.modules, "nccl.core", core)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
        monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
        return books

    return install


def open_nccl(group: Any) -> nccl.NcclWindow:
    return nccl.open_window(group, 3 << 20, torch.device("cuda", group.rank))


def test_peers_are_resolved_once_and_memory_outlives_close(install: Callable[[Books], Books]) -> None:
    books = install(Books())
    windows: list[Any] = run_ranks(3, open_nccl)
    assert windows[1].peers == [1001, 0x7001, 1003], "our own memory under the address that ncclMemAlloc gave"
    assert (windows[1].address, windows[1].nbytes, windows[1].kind) == (0x7001, 4 << 20, "nccl")
    tensor_owner = windows[2].owner
    for window in windows:
        window.close()
        window.close()
    assert books.communicators == set() and books.memory == {0, 1, 2}
    windows.clear()
    del window
    gc.collect()
    assert books.memory == {2}
    del tensor_owner
    gc.collect()
    assert books.memory == set()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("mem_alloc", "mem_alloc failed"),
        ("init", "init failed"),
        ("symmetric", "NCCL has no symmetric windows here: it wants peer access between all GPUs"),
        ("peer", "the GPU of rank 0 is in another NVLink domain"),
    ],
)
def test_a_failure_on_one_rank_fails_all_and_leaves_nothing(
    install: Callable[[Books], Books], what: str, says: str
) -> None:
    books = install(Books(fails=(what, 1)))
    found = run_ranks(3, open_nccl)
    assert [type(error) for error in found] == [Unsupported] * 3
    assert [str(error) for error in found] == [f"rank 1: {says}", says, f"rank 1: {says}"]
    found.clear()
    gc.collect()
    assert books.memory == set() and books.communicators == set()
    assert "NCCL_NVLS_ENABLE" not in os.environ


def test_out_of_memory_is_told_apart(install: Callable[[Books], Books], monkeypatch: pytest.MonkeyPatch) -> None:
    install(Books(fails=("mem_alloc", 0)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 40))
    found = run_ranks(2, open_nccl)
    assert [type(error) for error in found] == [NoRoom, NoRoom]
    assert "4194304 bytes of a window do not fit on cuda:0: 1048576 of" in str(found[1])


def test_multicast_is_off_by_config_where_nccl_has_one(install: Callable[[Books], Books]) -> None:
    books = install(Books("2.32.3"))
    run_ranks(2, open_nccl)
    assert [(config.nvls_host_mode, variable) for config, variable in books.configs] == [("off", None)] * 2


@pytest.mark.parametrize("before", [None, "2"])
def test_multicast_is_off_by_environment_before(
    install: Callable[[Books], Books], monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    books = install(Books("2.30.7"))
    if before is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", before)
    run_ranks(1, open_nccl)  # it is one process a rank: threads would put each other's variable back
    assert books.configs == [(None, "0")]
    assert os.environ.get("NCCL_NVLS_ENABLE") == before


def test_what_is_missing_is_a_sentence(install: Callable[[Books], Books], monkeypatch: pytest.MonkeyPatch) -> None:
    install(Books("2.28.9"))
    assert nccl.missing() == (
        "NCCL 2.28.9 is loaded (/lib/libnccl.so.2) and windows need 2.30; pip install 'nvidia-nccl-cu13>=2.30.7'"
    )
    install(Books("2.30.7"))
    assert nccl.missing() == ""
    monkeypatch.setattr(sys.modules["nccl.core"], "get_version", lambda: SimpleNamespace(libnccl=None))
    assert nccl.missing() == "nccl4py finds no libnccl.so.2; pip install 'nvidia-nccl-cu13>=2.30.7'"
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    assert nccl.missing().startswith("nccl4py can't be imported (")
