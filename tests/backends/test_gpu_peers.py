"""Memory of ranks on GPUs, and what stands on it, with a driver that is host memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.backends import gpu_peers, lsa, windows
from moecomm.backends.gpu_peers import CONTROL, Extent, GpuPeers
from moecomm.backends.reach import Layout, Reach
from moecomm.gpu import cuda_driver
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.rendezvous import Alone
from moecomm.rounds.state import RoundState
from moecomm.window import gpu_calls

from .conftest import run_ranks
from .test_lsa_without_gpu import shape_of

DEVICE = torch.device("cuda", 0)


class Owner:
    """Keeps memory of a rank."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory


class HostMemoryWindow:
    """A window that is host memory of threads."""

    kind = "local"

    def __init__(self, ranks: Rendezvous, nbytes: int) -> None:
        self._memory = _native.host_alloc(nbytes)
        self.owner: Any = Owner(self._memory)
        self.address, self.nbytes = self._memory.address, nbytes
        ctypes.memset(self.address, 0xFF, nbytes)
        self.peers = [int.from_bytes(data, "little") for data in ranks.all_gather(self.address.to_bytes(8, "little"))]
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeReach(Reach):
    """Loads and stores among threads; notes what it is told."""

    def open_window(self, layout: Layout) -> Any:
        self.opened = HostMemoryWindow(self.ranks, layout.bytes)
        self.words: list[int] = []
        return self.opened

    def watch(self, abort_word: int) -> None:
        self.words.append(abort_word)


class Pinned:
    def __init__(self, nbytes: int) -> None:
        self.memory, self.nbytes = _native.host_alloc(nbytes), nbytes  # aligned as pinned memory is
        self.address = self.memory.address

    def write(self, offset: int, data: bytes) -> int:
        assert offset + len(data) <= self.nbytes
        ctypes.memmove(self.address + offset, data, len(data))
        return self.address + offset

    def read(self, offset: int, nbytes: int) -> bytes:
        return ctypes.string_at(self.address + offset, nbytes)


class Copies:
    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def to_device(self, address: int, pinned: int, nbytes: int) -> None:
        ctypes.memmove(address, pinned, nbytes)

    to_host = to_device

    def wait(self) -> None:
        pass


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "PinnedMemory", Pinned)
    monkeypatch.setattr(cuda_driver, "CopyStream", Copies)
    monkeypatch.setattr(cuda_driver, "bind_thread", lambda device: None)
    monkeypatch.setattr(_native, "cuda_context", lambda: 1)
    place = windows.Peer(b"host", b"gpu", None)
    monkeypatch.setattr(windows, "meet", lambda ranks, device, near: [place] * ranks.ranks)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


def opened(ranks: Rendezvous, nbytes: int = 1000) -> GpuPeers:
    peers = GpuPeers(ranks, DEVICE, 5.0, FakeReach, control_bytes=CONTROL)
    peers.open(Extent(nbytes, nbytes, nbytes), [(0, nbytes // 2)], lambda: None)
    return peers


def test_memory_is_zeroed_where_that_is_asked_and_goes_with_its_last_owner() -> None:
    def body(group: Rendezvous) -> None:
        peers = opened(group)
        window: Any = peers.reach.opened  # type: ignore[attr-defined]
        assert ctypes.string_at(window.address, 1000) == bytes(500) + b"\xff" * 500
        assert (peers.name, peers.nbytes, peers.ranks_of_gpu) == ("lsa/local", 1000, 2)
        assert peers.addresses == window.peers and peers.reach.words == [peers.abort_host]  # type: ignore[attr-defined]
        own, mapping = peers.owner(group.rank), peers.owner(1 - group.rank)
        assert own is window.owner and mapping is not own
        group.all_gather(b"1")
        peers.close()
        assert not window.closed, "a tensor of a peer may still refer to it"
        assert peers.reach.words == [peers.abort_host, 0]  # type: ignore[attr-defined]
        gone = weakref.ref(own)
        peers.reach = FakeReach(group, [], DEVICE, 5.0, 0)  # which held on to it for this test
        del mapping
        assert window.closed
        del own, window
        gc.collect()
        assert gone() is None

    assert run_ranks(2, body) == [None, None]


def test_a_failure_of_one_rank_closes_the_windows_of_all() -> None:
    def body(group: Rendezvous) -> Any:
        def prepare() -> None:
            if group.rank == 1:
                raise OSError("no kernel")

        peers = GpuPeers(group, DEVICE, 5.0, FakeReach)
        with pytest.raises(moecomm.Unsupported, match="no kernel"):
            peers.open(Extent(100, 100, 100), [], prepare)
        return peers.reach.opened.closed  # type: ignore[attr-defined]

    assert run_ranks(2, body) == [True, True]


class ExtensibleMemory(HostMemoryWindow):
    """A window with as much memory again behind it, which is extended by a step at a time."""

    STEP = 4096

    def __init__(self, ranks: Rendezvous, nbytes: int) -> None:
        self._size, self.more = nbytes, nbytes
        super().__init__(ranks, 2 * nbytes)
        self.nbytes = nbytes

    def extend(self, nbytes: int, kept: object) -> tuple[int, int, None]:
        assert nbytes <= self.STEP
        self.nbytes += self.STEP
        return self.nbytes - self.STEP, self.STEP, None

    def take(self, end: int) -> None:
        """Do nothing: the extent is all of it."""

    def extent(self, rank: int) -> int:
        return self.STEP * (1 + 2 * self._size // self.STEP)


def test_a_session_extends_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer maps the memory in the next call that is not captured."""
    monkeypatch.setattr(lsa.plain_kernel, "load", lambda *_: 0)
    monkeypatch.setattr(lsa.cuda_driver, "relaxed_captures", contextlib.nullcontext)
    monkeypatch.setattr(windows, "extensible", lambda window: window)
    monkeypatch.setattr(FakeReach, "open_window", lambda self, layout: ExtensibleMemory(self.ranks, layout.bytes))
    monkeypatch.setattr(FakeReach, "watch", lambda self, abort_word: None)
    sessions: list[Any] = run_ranks(2, lambda group: lsa.LsaSession(group, shape_of(2), DEVICE, 5.0, FakeReach))
    assert not [error for error in sessions if isinstance(error, Exception)]
    first, second = sessions
    heap_of_none = SimpleNamespace(holds=lambda offset: False)
    size, heap = first.nbytes, shape_of(2).heap_bytes
    assert first.extensible == size and first.context.shape.heap_bytes == heap + size
    assert first.context.in_heap(first.context.peers[0] + 2 * size - 256)
    assert first.extend(100, heap_of_none) is None and first.extending and first.nbytes == size + ExtensibleMemory.STEP
    capturing = True
    monkeypatch.setattr(second, "capturing", lambda: capturing)
    rounds = RoundState.__new__(RoundState)
    rounds.session = second
    rounds.offers, rounds._admitted, rounds._open, rounds.released = second.offers, 0, True, False
    rounds.admit()
    assert first.extend(100, heap_of_none) is None
    capturing = False
    for _ in range(2):
        rounds.admit()
        assert rounds._admitted == 1
    assert first.extend(100, heap_of_none) == (size, ExtensibleMemory.STEP) and not first.extending
    gone = weakref.ref(first.owner)
    gc.disable()
    try:
        for session in sessions:
            session.close()
            session.reach = None  # which held on to the window for this test
        assert gone() is None, "no cycle keeps it"
    finally:
        gc.enable()
    assert first.extend(100, heap_of_none) is None
    rounds._open = False
    rounds.admit()


def test_a_session_of_a_buffer_stands_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that a mask needs at once is loaded as well."""
    loaded: list[str] = []
    monkeypatch.setattr(lsa.plain_kernel, "load", lambda kernel, index: loaded.append(kernel.entry))
    shape = shape_of(1)
    layout = _native.window_layout(shape)
    session = lsa.LsaSession(Alone(), shape, DEVICE, 5.0, FakeReach)
    window: Any = session.reach.opened  # type: ignore[attr-defined]
    assert ctypes.string_at(window.address, layout.staging) == bytes(layout.staging)
    assert loaded == ["look_up_experts"]
    assert session.name == "lsa/local" and session.nbytes == layout.bytes and session.owner is window.owner
    assert session.context.peers[0] == window.address and session.context.rank == 0
    assert session.context.record == session._control.address
    assert session.context.abort_host == session._control.address + 64
    assert session.most_blocks == 132 and session.exclusive_gpu
    session.abort(_native.Failure.aborted, 0)
    assert _native.read_word(session.context.abort_host) != 0
    session.close()
    session.close()
    assert window.closed and session.owner is None and session.reach.words == [session.context.abort_host, 0]  # type: ignore[attr-defined]


def launches_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Let kernels be loaded and launched by a driver that only notes the entry and the arguments of each."""
    entries: list[str] = []
    launched: list[tuple[str, Any]] = []

    def load(kernel: Any, device: int) -> int:
        entries.append(kernel.entry)
        return len(entries) - 1

    def launch(function: int, blocks: int, threads: int, shared: int, stream: int, args: Any) -> None:
        launched.append((entries[function], args))

    monkeypatch.setattr(gpu_calls.plain_kernel, "load", load)
    monkeypatch.setattr(_native, "cuda_launch_packed", launch)
    monkeypatch.setattr(_native, "cuda_context", lambda: 1)
    monkeypatch.setattr(_native, "current_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return launched


def test_calls_of_a_window_launch_kernels_with_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launches_of(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    handle = _native.WindowHandle(0, 1, 8, 256)
    peers = GpuPeers(Alone(), DEVICE, 5.0, FakeReach, control_bytes=CONTROL)
    peers.open(
        Extent(handle.total_bytes, handle.total_bytes, handle.total_bytes), [(0, handle.total_bytes)], lambda: None
    )
    handle.record, handle.abort_host = peers.record, peers.abort_host
    calls = gpu_calls.calls_of(peers, handle)
    calls.signal(0, 3, 5)
    calls.set_signal(0, 4, 6)
    assert calls.wait(2, 7, -1) and calls.barrier()
    assert [entry for entry, _ in launched] == [
        f"window_{call}" for call in ("signal", "set_signal", "wait", "barrier")
    ]
    assert [(args.value, args.rank, args.index) for _, args in launched[:3]] == [(5, 0, 3), (6, 0, 4), (7, -1, 2)]
    for _, args in launched:
        assert bytes(args.window) == handle.content
        assert ctypes.c_uint64.from_address(args.window.peers).value == peers.addresses[0]
    assert ctypes.string_at(calls.handle_address, len(handle.content)) == handle.content
    handle.set_signal(0, 5, 99)
    assert calls.signal_value(5) == 99
    calls.abort(_native.Failure.aborted)
    assert calls.abort_word() == _native.read_word(peers.addresses[0] + handle.abort) != 0
    calls.leave()
    assert _native.read_word(peers.addresses[0] + handle.left) == 1


def window_on_gpu(monkeypatch: pytest.MonkeyPatch, reach: type[Reach]) -> moecomm.Window:
    """A Window of one rank whose kernels are not launched."""
    launches_of(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    monkeypatch.setattr(moecomm.backends, "missing", lambda name: "")
    backend = SimpleNamespace(
        open_peers=lambda ranks, nbytes, device, timeout_s: gpu_peers.open_peers(
            ranks, nbytes, device, timeout_s, reach, ""
        )
    )
    monkeypatch.setattr(moecomm.backends, "load", lambda name: backend)
    return moecomm.Window("self", 256, backend="lsa", timeout_s=5.0)


def test_calls_that_wait_for_the_gpu_are_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = [False]
    monkeypatch.setattr(_native, "current_stream", lambda device: 7)
    monkeypatch.setattr(_native, "cuda_capturing", lambda stream: captures[0])
    window = window_on_gpu(monkeypatch, FakeReach)
    with window:
        window.check()
        captures[0] = True
        window.wait(0, 1)
        window.barrier()
        for call, name in ((window.check, "check"), (lambda: window.signal_value(0), "signal_value")):
            with pytest.raises(moecomm.BadInput, match="during a capture") as caught:
                call()
            assert caught.value.argument == name


def test_a_source_on_another_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        window_on_gpu(monkeypatch, FakeReach) as window,
        pytest.raises(moecomm.BadInput, match="cuda:0") as caught,
    ):
        window.put(torch.ones(4), 0)
    assert caught.value.argument == "source"


def test_a_rank_of_another_domain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(FakeReach):
        def open_window(self, layout: Layout) -> Any:
            window = super().open_window(layout)
            window.peers = [0]
            return window

    with pytest.raises(moecomm.Unsupported, match="rank 0 is in another domain"):
        window_on_gpu(monkeypatch, Away)


def test_a_device_that_is_no_gpu_is_named() -> None:
    with pytest.raises(moecomm.BadInput, match="device"):
        gpu_peers.gpu_of(torch.device("cpu"), "lsa", "")
    with pytest.raises(moecomm.Unsupported, match="no driver"):
        gpu_peers.gpu_of(torch.device("cuda", 0), "lsa", "no driver")
    assert gpu_peers.gpu_of(torch.device("cuda", 1), "lsa", "") == torch.device("cuda", 1)
