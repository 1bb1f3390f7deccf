"""The nvshmem backend over a stand-in for nvshmem4py that keeps books, as one rank whose peers say what it says."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import _native
from moecomm.backends import lsa, nic, nvshmem, nvshmem_runtime, windows
from moecomm.backends.reach import Reach
from moecomm.errors import Unsupported
from moecomm.gpu import linking
from moecomm.ranks.collective import NoRoom

DEVICE = torch.device("cuda", 0)
LAYOUT = _native.window_layout(
    _native.Shape(ranks=4, slots=4, topk=1, max_tokens=8, ring_tokens=32, staged_row_bytes=32, heap_bytes=4096)
)


class Echo:
    """Rank 1 of a group in which all say the same, but for what `says` makes of the n-th all-gather."""

    rank, in_process = 1, False

    def __init__(self, ranks: int = 4, says: Callable[[bytes], list[bytes]] | None = None) -> None:
        self.ranks, self._says = ranks, says

    def all_gather(self, data: bytes) -> list[bytes]:
        if self._says is not None and (others := self._says(data)):
            return others
        return [data] * self.ranks


class Books:
    """The NVSHMEM of this process."""

    def __init__(self, *, running: tuple[int, int] | None = None, near: int = 4, version: str = "3.4.5") -> None:
        self.here, self.near, self.version = running, near, version
        self.environment: dict[str, str] = {}
        self.heap: dict[int, int] = {}
        self.told: list[tuple[str, int]] = []
        self.next, self.fails = 0x10000, ""
        self.identity = ctypes.create_string_buffer(128)

    def get_unique_id(self, *, empty: bool) -> SimpleNamespace:
        assert "NVSHMEM_DISABLE_NVLS" in os.environ, "it may read them before init does"
        return SimpleNamespace(ptr=ctypes.addressof(self.identity))

    def init(self, *, uid: Any, rank: int, nranks: int, device: Any, initializer_method: str) -> None:
        assert initializer_method == "uid" and uid.ptr == ctypes.addressof(self.identity)
        self.environment = {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}
        self.here = (rank, nranks)

    def align(self, alignment: int, nbytes: int) -> int:
        if self.fails == "align":
            return 0
        assert alignment % 256 == 0
        self.next += 1 << 20
        self.heap[self.next] = nbytes
        return self.next

    def ptr(self, address: int, rank: int) -> int:
        return address if rank == 1 else 0 if self.fails == "ptr" else address + 0x1000_0000 * (rank + 1)

    def cumodule_init(self, module: int) -> int:
        self.told.append(("init", module))
        return 7 if self.fails == "cumodule_init" else 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Books:
        bindings, core, package = (ModuleType(name) for name in ("nvshmem.bindings", "nvshmem.core", "nvshmem"))
        for name in ("align", "ptr", "cumodule_init"):
            setattr(bindings, name, getattr(self, name))
        bindings.free = self.heap.pop
        bindings.cumodule_finalize = lambda module: self.told.append(("finalize", module))
        bindings.init_status = lambda: 0 if self.here is None else 2
        bindings.my_pe, bindings.n_pes = lambda: self.here[0], lambda: self.here[1]
        bindings.Team_id = SimpleNamespace(TEAM_SHARED=1)
        bindings.team_n_pes = lambda team: self.near
        bindings.uniqueid_dtype = SimpleNamespace(itemsize=128)
        core.get_version = lambda: SimpleNamespace(libnvshmem_version=self.version)
        core.get_unique_id = self.get_unique_id
        core.init = self.init
        package.bindings, package.core = bindings, core
        for name, module in (("nvshmem", package), ("nvshmem.bindings", bindings), ("nvshmem.core", core)):
            monkeypatch.setitem(sys.modules, name, module)
        cuda_core = ModuleType("cuda.core")
        cuda_core.Device = lambda index: SimpleNamespace(set_current=lambda: None)
        monkeypatch.setitem(sys.modules, "cuda.core", cuda_core)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 40))
        monkeypatch.setattr(nic, "has_rdma", lambda: False)
        monkeypatch.setattr(linking, "_told", [])
        for name, value in (("_blocks", {}), ("_given_up", set()), ("_taken", 0), ("_grown", 0)):
            monkeypatch.setattr(nvshmem_runtime, name, value)
        return self


def reach(group: Echo, domain_ranks: int = 0) -> nvshmem.NvshmemReach:
    return nvshmem.NvshmemReach(group, [], DEVICE, 20.0, domain_ranks)


def test_it_is_initialised_once_and_told_what_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    books = Books().install(monkeypatch)
    linking._told.append(77)
    found = reach(Echo())
    assert books.here == (1, 4) and books.told == [("finalize", 77), ("init", 77)]
    assert books.environment == {"NVSHMEM_DISABLE_NVLS": "0", "NVSHMEM_REMOTE_TRANSPORT": "none"}
    assert "NVSHMEM_REMOTE_TRANSPORT" not in os.environ
    assert (found.domain_ranks, found.transport, found.shim) == (0, "lsa", "nvshmem")
    reach(Echo())
    assert len(books.told) == 2
    books.here = None
    monkeypatch.setattr(nic, "has_rdma", lambda: True)
    reach(Echo())
    assert books.environment == {"NVSHMEM_DISABLE_NVLS": "0", "NVSHMEM_IB_ENABLE_IBGDA": "1"}


def test_one_that_others_have_initialised_is_joined_if_its_ranks_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books(running=(1, 4)).install(monkeypatch)
    reach(Echo())
    assert books.environment == {}
    books.here = (3, 8)
    with pytest.raises(Unsupported, match="as 3 of 8, and the Buffer has it as 1 of 4; a process has one NVSHMEM"):
        reach(Echo())
    books.here = (1, 4)
    with pytest.raises(Unsupported, match="NVSHMEM is initialised here, and not on rank 2"):
        reach(Echo(says=lambda data: [b"\1", b"\1", b"\0", b"\1"] if data == b"\1" else []))


def test_a_block_is_given_back_when_all_ranks_have_given_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books().install(monkeypatch)
    first, second = (reach(Echo()).open_window(LAYOUT) for _ in range(2))
    assert first.kind == "p2p" and first.nbytes == LAYOUT.bytes == books.heap[first.address]
    assert first.peers == [
        first.address + 0x1000_0000,
        first.address,
        *(first.address + n * 0x1000_0000 for n in (3, 4)),
    ]
    addresses, tensor_owner = [first.address, second.address], first.owner
    for window in (first, second):
        window.close()
    del first, second, window
    gc.collect()
    assert set(books.heap) == set(addresses), "a rank can't give back alone"
    other = Echo(says=lambda data: [b"\0\0", *[data] * 3] if data == b"\0\1" else [])
    third = reach(other).open_window(LAYOUT)
    assert set(books.heap) == {*addresses, third.address}, "rank 0 has not given it up"
    fourth = reach(Echo()).open_window(LAYOUT)
    assert set(books.heap) == {addresses[0], third.address, fourth.address}
    del tensor_owner
    gc.collect()
    fifth = reach(Echo()).open_window(LAYOUT)
    assert set(books.heap) == {third.address, fourth.address, fifth.address}


def test_memory_that_is_not_there_is_no_room_before_nvshmem_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books().install(monkeypatch)
    first = nvshmem_runtime.take(Echo(), 1 << 20, DEVICE)
    with pytest.raises(NoRoom, match="2097152 bytes of a window do not fit on cuda:0"):
        nvshmem_runtime.take(Echo(), 2 << 20, DEVICE)
    assert list(books.heap) == [first.address]
    del first
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 40))
    nvshmem_runtime.take(Echo(), 1 << 20, DEVICE)  # the heap does not shrink: what it has is there
    books.fails = "align"
    with pytest.raises(Unsupported, match="NVSHMEM's heap has no room for 10 bytes; NVSHMEM_SYMMETRIC_SIZE"):
        nvshmem_runtime.take(Echo(), 10, DEVICE)


def test_ranks_that_share_memory_are_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books(near=2).install(monkeypatch)
    found = reach(Echo())
    assert (found.domain_ranks, found.transport) == (2, "nvshmem")
    window = found.open_window(LAYOUT)
    assert window.kind == "network" and [bool(peer) for peer in window.peers] == [True, True, False, False]
    books.fails = "ptr"
    with pytest.raises(Unsupported, match="ranks 1 and 0 do not share memory"):
        found.open_window(LAYOUT)
    books.near = 2
    fewer = reach(Echo(), 1)
    assert (fewer.domain_ranks, fewer.transport, fewer.puts) == (1, "nvshmem", True)
    with pytest.raises(Unsupported, match="domain_ranks=4: 2 neighbouring ranks share memory"):
        reach(Echo(), 4)
    books.near = 3
    with pytest.raises(Unsupported, match=r"ranks share memory with \[3, 3, 3, 3\] ranks"):
        reach(Echo())


def test_domains_of_ranks_that_all_share_memory_are_those_of_lsa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their windows are all mapped, and kernels are linked with nothing."""
    books = Books(near=4).install(monkeypatch)
    found = reach(Echo(), 2)
    assert (found.domain_ranks, found.transport, found.puts) == (2, "lsa", False)
    window = found.open_window(LAYOUT)
    assert window.kind == "p2p" and window.peers == [books.ptr(window.address, rank) for rank in range(4)]
    assert all(window.peers)
    books.fails = "ptr"
    with pytest.raises(Unsupported, match="ranks 1 and 0 do not share memory"):
        found.open_window(LAYOUT)


def test_threads_are_refused_and_a_rank_alone_needs_no_nvshmem(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books().install(monkeypatch)
    group = Echo()
    group.in_process = True
    with pytest.raises(Unsupported, match="a process a rank"):
        reach(group)
    monkeypatch.setattr(nvshmem.local, "open_window", lambda ranks, nbytes, device, *, resident: (nbytes, resident))
    assert reach(Echo(1)).open_window(LAYOUT) == (LAYOUT.bytes, LAYOUT.staging) and books.here is None


def test_a_kernel_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books().install(monkeypatch)
    linking.register_module(5)
    books.fails = "cumodule_init"
    with pytest.raises(Unsupported, match="status 7"):
        linking.register_module(6)
    assert linking._told == [5]


def test_what_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lsa, "missing", lambda: "")
    books = Books().install(monkeypatch)
    assert nvshmem.missing() == ""
    books.version = "3.3.20"
    assert nvshmem.missing() == (
        "NVSHMEM 3.3.20 is loaded and 3.4.5 is wanted; pip install 'nvidia-nvshmem-cu13>=3.4.5'"
    )

    def gone() -> None:
        raise RuntimeError("no libnvshmem_host\nnor elsewhere")

    monkeypatch.setattr(sys.modules["nvshmem.core"], "get_version", gone)
    assert nvshmem.missing() == (
        "libnvshmem_host.so.3 can't be loaded (no libnvshmem_host); pip install nvidia-nvshmem-cu13"
    )
    monkeypatch.setitem(sys.modules, "nvshmem.core", None)
    assert nvshmem.missing().startswith("nvshmem4py can't be imported (")
    monkeypatch.setattr(lsa, "missing", lambda: "torch sees no GPU")
    assert nvshmem.missing() == "torch sees no GPU"


def test_lsa_reaches_by_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "open_window", lambda *arguments, resident, more: (*arguments, resident, more))
    group = Echo()
    found: Any = Reach(group, [], DEVICE, 3.0, 0).open_window(LAYOUT)
    assert found == (group, [], LAYOUT.bytes, DEVICE, 3.0, LAYOUT.staging, 0)
