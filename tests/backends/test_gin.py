"""The gin backend over stand-ins for nccl4py and libnccl that keep books, as one rank whose peers say what it says."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from moecomm import _native, rma_plugin, shims
from moecomm.backends import gin, lsa, nccl_device, nic, windows
from moecomm.backends.windows import nccl
from moecomm.errors import Unsupported
from moecomm.gpu import cuda_driver

from .test_nvshmem import Echo

DEVICE = torch.device("cpu")  # where a struct for kernels can be looked at


def layout_of(domain_ranks: int) -> _native.WindowLayout:
    sizes = {"slots": 4, "topk": 1, "max_tokens": 8, "ring_tokens": 32, "staged_row_bytes": 32, "heap_bytes": 4096}
    return _native.window_layout(_native.Shape(ranks=4, domain_ranks=domain_ranks, **sizes))


class Nccl:
    """libnccl of this process: rank 1 of 4, with `lsa_teams` teams."""

    def __init__(self, *, gin_type: int = 2, lsa_teams: int = 1, version: str = "2.30.7", fails: str = "") -> None:
        self.gin_type, self.lsa_teams, self.version, self.fails = gin_type, lsa_teams, version, fails
        self.memory: set[int] = set()
        self.open: set[str] = set()
        self.environments: list[dict[str, str]] = []
        self.wanted = nccl_device._Requirements()

    def note(self, what: str) -> None:
        self.open.add(what)
        names = ("NCCL_", "MOECOMM_")
        self.environments.append({name: value for name, value in os.environ.items() if name.startswith(names)})

    def ncclCommQueryProperties(self, communicator: Any, room: Any) -> int:
        found = nccl_device._Properties.from_buffer(room)
        assert (communicator.value, found.size, found.magic, found.version) == (4242, 56, 0xCAFEBEEF, 23007)
        found.device_api, found.gin_type, found.lsa_teams = True, self.gin_type, self.lsa_teams
        return 0

    def ncclDevCommCreate(self, communicator: Any, wanted: Any, made: Any) -> int:
        if self.fails == "ncclDevCommCreate":
            return 5
        ctypes.memmove(ctypes.byref(self.wanted), wanted, ctypes.sizeof(self.wanted))
        self.note("device communicator")
        made.raw = bytes(range(240)) + bytes(len(made.raw) - 240)
        return 0

    def ncclDevCommDestroy(self, communicator: Any, made: Any) -> int:
        assert made.raw[:240] == bytes(range(240)) and "communicator" in self.open
        self.open.remove("device communicator")
        return 0

    def ncclGetErrorString(self, result: int) -> bytes:
        return b"invalid usage"

    def ncclGetLastError(self, communicator: Any) -> bytes:
        return b"library is too old"

    def core(self) -> ModuleType:
        """nccl.core."""
        nccl = self

        class Communicator:
            ptr = 4242

            @classmethod
            def init(cls, ranks: int, rank: int, unique_id: bytes, settings: Any) -> Communicator:
                nccl.note("communicator")
                return cls()

            def register_window(self, buffer: Any, flags: str) -> Any:
                team = 4 // nccl.lsa_teams
                address = lambda peer: 0x5000 + peer if peer // team == 1 // team and nccl.fails != "peer" else None  # noqa: E731
                return SimpleNamespace(handle=0xABC, get_peer_device_pointer=address)

            def abort(self) -> None:
                assert nccl.memory, "the window's memory is still there"
                nccl.open.remove("communicator")

        def mem_alloc(nbytes: int, device: int) -> Any:
            nccl.memory.add(nbytes)
            return SimpleNamespace(handle=0x7000, size=nbytes)

        core = ModuleType("nccl.core")
        core.__version__, core.LibraryInfo, core.Communicator = "0.6.0", object, Communicator
        core.UniqueId = SimpleNamespace(from_bytes=bytes)
        core.get_unique_id = lambda: bytes(128)
        library = SimpleNamespace(version=Version(self.version), path="/lib/libnccl.so.2")
        core.get_version = lambda: SimpleNamespace(libnccl=library)
        core.mem_alloc, core.mem_free = mem_alloc, lambda buffer: self.memory.remove(buffer.size)
        core.WindowFlag = SimpleNamespace(COLL_SYMMETRIC="symmetric")
        core.NCCLConfig = type("NCCLConfig", (SimpleNamespace,), {"__dataclass_fields__": {}})
        return core

    def install(self, monkeypatch: pytest.MonkeyPatch, *, rdma: bool = False) -> Nccl:
        package, core = ModuleType("nccl"), self.core()
        package.core = core  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nccl", package)
        monkeypatch.setitem(sys.modules, "nccl.core", core)
        monkeypatch.setattr(nccl_device, "_library", lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(nic, "has_rdma", lambda: rdma)
        monkeypatch.setattr(rma_plugin, "path", lambda: Path("/plugin.so"))
        monkeypatch.setattr(cuda_driver, "attribute", lambda name, device: 1)
        shim = shims.Shim("gin", Path("gin.fatbin"), "", "sm_90a", (13, 0), "NCCL 2.30.7")
        monkeypatch.setattr(shims, "find", lambda name: shim)
        return self


@pytest.fixture(autouse=True)
def freed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory goes while there is an NCCL to give it to."""
    yield
    gc.collect()


def reach(group: Echo | None = None, domain_ranks: int = 0) -> gin.GinReach:
    group = group or Echo()
    peers = [windows.Peer(b"h" * 32, bytes([rank] * 16), None) for rank in range(group.ranks)]
    return gin.GinReach(group, peers, DEVICE, 20.0, domain_ranks)


def test_one_team_runs_the_kernels_of_lsa_beside_a_device_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl().install(monkeypatch)
    found = reach()
    assert (found.domain_ranks, found.transport, found.shim) == (0, "lsa", "gin_proxy")
    layout = layout_of(0)
    window = found.open_window(layout)
    assert window.kind == "proxy" and window.peers == [0x5000, 0x7000, 0x5002, 0x5003]
    wanted = nccl.wanted
    assert (wanted.size, wanted.magic, wanted.version) == (96, 0xCAFEBEEF, 23007)
    assert (wanted.gin_connection, wanted.gin_contexts, wanted.gin_signals) == (1, 4, 1)
    assert wanted.gin_strong_signals and not wanted.gin_va_signals
    link = found._link
    words = [int.from_bytes(bytes(link[at : at + 8].tolist()), "little") for at in (0, 8)]
    assert found.link == link.data_ptr() and words == [found.link + 256, 0xABC]
    assert link[256:496].tolist() == list(range(240))
    window.close()
    window.close()
    assert nccl.open == set() and nccl.memory == {window.nbytes}
    del window
    gc.collect()
    assert nccl.memory == set()


def test_structs_are_those_of_the_headers_of_nccl() -> None:
    wanted, found = nccl_device._Requirements, nccl_device._Properties
    assert (ctypes.sizeof(wanted), ctypes.sizeof(found)) == (96, 56)
    at = {"lsa_multimem": 32, "gin_contexts": 60, "gin_connection": 72, "gin_traffic_class": 84, "gin_va_signals": 93}
    assert {name: getattr(wanted, name).offset for name in at} == at
    assert (found.device_api.offset, found.gin_type.offset, found.lsa_teams.offset) == (32, 36, 40)


def test_several_teams_are_domains_with_a_signal_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(lsa_teams=2).install(monkeypatch)
    found = reach()
    assert (found.domain_ranks, found.transport, found.most_blocks) == (2, "gin_proxy", 32)
    assert reach(domain_ranks=2).domain_ranks == 2
    with pytest.raises(Unsupported, match="domain_ranks=4: NCCL's LSA team has 2; see NCCL_LSA_TEAM_SIZE"):
        reach(domain_ranks=4)
    layout = layout_of(2)
    window = found.open_window(layout)
    assert window.peers == [0x5000, 0x7000, 0, 0]
    words = 3 * 4 + 4 * 2 * 32  # signals() of csrc/protocol/layout.h
    assert nccl.wanted.gin_signals == gin.spare_signal(layout) + 1 > words


@pytest.mark.parametrize("rdma", [False, True])
def test_nccl_is_told_how_large_a_domain_is(monkeypatch: pytest.MonkeyPatch, rdma: bool) -> None:
    nccl = Nccl(lsa_teams=2).install(monkeypatch, rdma=rdma)
    reach(domain_ranks=2).open_window(layout_of(2))
    assert [environment["NCCL_LSA_TEAM_SIZE"] for environment in nccl.environments] == ["2", "2"]
    nccl = Nccl().install(monkeypatch, rdma=rdma)
    for domain_ranks in (0, 4):
        reach(domain_ranks=domain_ranks)
    assert all("NCCL_LSA_TEAM_SIZE" not in environment for environment in nccl.environments)
    assert len(nccl.environments) == 2 and "NCCL_LSA_TEAM_SIZE" not in os.environ


def test_a_nic_means_nccls_own_gin(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(gin_type=3, lsa_teams=4).install(monkeypatch, rdma=True)
    found = reach()
    assert found.open_window(layout_of(1)).kind == "gdaki" and found.transport == found.shim == "gin"
    assert all("NCCL_RMA_PLUGIN" not in environment for environment in nccl.environments)


def test_nccl_is_told_of_the_plugin_for_as_long_as_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GIN_TYPE", "7")
    nccl = Nccl().install(monkeypatch)
    before = dict(os.environ)
    reach().open_window(layout_of(0))
    assert len(nccl.environments) == 2 and dict(os.environ) == before
    for environment in nccl.environments:
        assert environment["NCCL_RMA_PLUGIN"] == "/plugin.so" and len(environment["MOECOMM_RMA_JOB"]) == 32
        assert environment["NCCL_GIN_TYPE"] == "7", "what the user has set comes first"


def test_what_the_plugin_loses_is_told_to_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the job of its own communicator; not where NCCL has a NIC, and no plugin."""
    nccl, watched = Nccl().install(monkeypatch), {}
    monkeypatch.setattr(rma_plugin, "watch", watched.__setitem__)
    monkeypatch.setattr(rma_plugin, "losses", lambda _: {})
    ignored: list[tuple[str, int, bool]] = []
    monkeypatch.setattr(rma_plugin, "ignore", lambda *how: ignored.append(how))
    found = reach()
    assert found.losses() == {}
    found.watch(0x1234)
    job = nccl.environments[0]["MOECOMM_RMA_JOB"]
    assert watched == {job: 0x1234}
    lost = {3: "PeerLost: the connection was closed"}
    monkeypatch.setattr(rma_plugin, "losses", {job: lost}.__getitem__)
    found.ignore(3, True)
    assert found.losses() == lost and ignored == [(job, 3, True)]
    Nccl(gin_type=3).install(monkeypatch, rdma=True)
    other = reach()
    other.watch(0x5678)
    other.ignore(3, True)
    assert len(ignored) == 1 and other.losses() == {} and watched == {job: 0x1234}


def test_without_gin_the_communicator_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(gin_type=0).install(monkeypatch)
    nccl.memory.add(0)
    with pytest.raises(Unsupported, match=r"NCCL finds no GIN: neither an RDMA NIC nor the plugin"):
        reach()
    assert nccl.open == set()


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("ncclDevCommCreate", r"ncclDevCommCreate: invalid usage \(library is too old\)"),
        ("peer", "the GPU of rank 0 is not in the LSA team of rank 1"),
    ],
)
def test_what_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, fails: str, says: str) -> None:
    nccl = Nccl(fails=fails).install(monkeypatch)
    with pytest.raises(Unsupported, match=says):
        reach().open_window(layout_of(0))
    assert nccl.memory == set() and nccl.open == set()


def test_ranks_that_nccl_can_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    Nccl().install(monkeypatch)
    group = Echo()
    group.in_process = True
    with pytest.raises(Unsupported, match="a process a rank"):
        reach(group)
    peers = [windows.Peer(b"h" * 32, b"g" * 16, None)] * 4
    with pytest.raises(Unsupported, match="ranks 0 and 1 share a GPU, which NCCL refuses"):
        gin.GinReach(Echo(), peers, DEVICE, 20.0, 0)
    monkeypatch.setattr(gin.local, "open_window", lambda ranks, nbytes, device, *, resident: (nbytes, resident))
    layout = layout_of(0)
    assert reach(Echo(1)).open_window(layout) == (layout.bytes, layout.staging)


def test_what_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lsa, "missing", lambda: "")
    monkeypatch.setattr(nccl, "missing", lambda: "nccl4py can't be imported (no); pip install nccl4py")
    assert gin.missing() == "nccl4py can't be imported (no); pip install nccl4py"
    monkeypatch.setattr(nccl, "missing", lambda: "")
    Nccl(version="2.30.5").install(monkeypatch)
    assert gin.missing() == (
        "NCCL 2.30.5 is loaded (/lib/libnccl.so.2) and the shim was compiled for NCCL 2.30.7; "
        "pip install 'nvidia-nccl-cu13>=2.30.7'"
    )
    Nccl(version="2.32.3").install(monkeypatch)
    assert gin.missing() == ""

    def gone() -> Path:
        raise Unsupported("The RMA plugin was not built.")

    monkeypatch.setattr(rma_plugin, "path", gone)
    assert gin.missing() == (
        "there is no RDMA NIC, and without one bytes go through a plugin.  The RMA plugin was not built."
    )
    monkeypatch.setattr(nic, "has_rdma", lambda: True)
    assert gin.missing() == ""
    monkeypatch.setattr(cuda_driver, "attribute", lambda name, device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert gin.missing() == "NCCL has no GIN for NVIDIA H200: no GPUDirect RDMA for memory of CUDA VMM"
    monkeypatch.setattr(shims, "find", lambda name: shims.Shim(name, Path(), f"The {name} shim was not built."))
    assert gin.missing() == "The gin shim was not built."


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (128, 16), (511, 16), (512, 32), (4096, 32)])
def test_a_thread_that_posts_puts_gets_few(monkeypatch: pytest.MonkeyPatch, tokens: int, chunk: int) -> None:
    sizes = {"slots": 4, "topk": 1, "max_tokens": 4096, "ring_tokens": 32, "staged_row_bytes": 32, "heap_bytes": 4096}
    shape = _native.Shape(ranks=4, domain_ranks=2, **sizes)
    session: Any = SimpleNamespace(_gpu="NVIDIA H200", _ranks=4, _most_blocks=32)
    session.context, session.reach = SimpleNamespace(shape=shape), SimpleNamespace(least_chunks=gin._PROXY_CHUNKS)
    asked: dict[str, Any] = {"num_tokens": tokens, "layout": "flat", "num_sms": None}
    assert lsa.LsaSession.schedule(session, "dispatch", **asked).chunk_tokens == chunk
    session.reach.least_chunks = ()
    assert lsa.LsaSession.schedule(session, "dispatch", **asked).chunk_tokens <= 4
    for rdma in (False, True):
        monkeypatch.setattr(nic, "has_rdma", lambda rdma=rdma: rdma)
        assert gin.direct_bytes(4, 128, 28672) == (lsa.direct_bytes(4, 128, 28672) if rdma else 0)
