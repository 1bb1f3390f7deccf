"""The lsa backend where there is no GPU: what it says, and the parts of it that are plain bytes and numbers."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

import moecomm
from moecomm import _native, backends
from moecomm.backends import between_rounds, gpu_counters, gpu_masks, lsa, lsa_kernels
from moecomm.backends.gpu_peers import GpuPeers
from moecomm.base.protocol import BALANCED, REPLICATED
from moecomm.dispatch import launch
from moecomm.dispatch.routed import Routed
from moecomm.errors import Unsupported
from moecomm.gpu import cuda_driver, plain_kernel, tuning
from moecomm.ranks.collective import NoRoom
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.rendezvous import Alone
from moecomm.ranks.settings import Settings
from moecomm.testing import LocalBuffers

from ..fresh_python import run_python
from ..live import FAR_S, ROOM_S


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_missing_is_a_sentence_to_act_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert lsa.missing() == "this torch is built without CUDA; install a CUDA build from https://pytorch.org"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_native, "cuda_missing", lambda: "libcuda.so.1 can't be loaded; install the NVIDIA driver")
    assert lsa.missing() == "libcuda.so.1 can't be loaded; install the NVIDIA driver"
    monkeypatch.setattr(_native, "cuda_missing", lambda: "")
    assert lsa.missing() == "torch sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def test_a_gpu_before_hopper_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_native, "cuda_missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert lsa.missing() == "NVIDIA A100 has compute capability 8.0; the kernels need 9.0 (Hopper) or newer"


@pytest.mark.parametrize("package", ["cuda.bindings", "cuda.core", "cuda.pathfinder"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(lsa, "_missing_gpu", lambda: "")
    monkeypatch.setattr(lsa, "_missing_compiler", lambda: "")
    monkeypatch.setattr(lsa, "_installed", lambda module: module != package)
    assert lsa.missing() == (
        f"the Python package {package.replace('.', '-')} is not installed; pip install 'moecomm[cu13]'"
    )


def test_asked_for_by_name_it_raises_and_auto_goes_to_the_host() -> None:
    reason = lsa.missing()
    with pytest.raises(Unsupported, match="backend 'lsa' can't run here") as raised:
        backends.choose("lsa", None)
    assert reason in str(raised.value)
    assert backends.choose("auto", None) == ("host", f"no GPU backend can run here (lsa: {reason})")
    with pytest.raises(Unsupported, match="no GPU backend can run here"):
        backends.choose("auto", torch.device("cuda"))


class Reaching:
    """Backends, each of which says what is in its way when it opens, if anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **refuses: Exception | str) -> None:
        self._refuses, self.opened = refuses, []
        monkeypatch.setattr(backends, "missing", lambda name: str(refuses.get(name, "")) if name == "nvshmem" else "")
        monkeypatch.setattr(backends, "load", lambda name: SimpleNamespace(open=partial(self._open, name)))

    def _open(self, name: str, *_: object) -> str:
        self.opened.append(name)
        if isinstance(error := self._refuses.get(name), Exception):
            raise error
        return name

    def __call__(self, name: str = "lsa", why: str = "first", group: Rendezvous | None = None) -> tuple[object, str]:
        return backends.open_session(name, why, group or Alone(), shape_of(1), None, 1.0)


def test_auto_takes_the_first_that_reaches_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Reaching(monkeypatch)() == ("lsa", "first")
    away = Unsupported("rank 4 runs on another host")
    assert Reaching(monkeypatch, lsa=away)() == (
        "gin",
        "what comes before it can't reach all ranks (lsa: rank 4 runs on another host)",
    )
    reaching = Reaching(monkeypatch, lsa=away, gin=Unsupported("no GIN"), nvshmem="no NVSHMEM")
    with pytest.raises(Unsupported) as caught:
        reaching()
    assert str(caught.value) == (
        "no GPU backend can run here: lsa: rank 4 runs on another host; gin: no GIN; nvshmem: no NVSHMEM"
    )
    assert reaching.opened == ["lsa", "gin"], "nvshmem lacked something before it was opened"


def test_what_was_asked_for_on_some_rank_or_has_no_room_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    reaching = Reaching(monkeypatch, lsa=Unsupported("no"))
    with pytest.raises(Unsupported, match=r"^no$"):
        reaching(why="asked for")
    other = Alone()
    other.all_gather = lambda data: [data, b"\1"]  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match=r"^no$"):
        reaching(group=other)
    assert reaching("host") == ("host", "first") and reaching.opened == ["lsa", "lsa", "host"]
    reaching = Reaching(monkeypatch, lsa=NoRoom("full"))
    with pytest.raises(NoRoom):
        reaching()
    assert reaching.opened == ["lsa"]


def test_asking_imports_nothing_of_cuda() -> None:
    """Neither NVIDIA's packages nor the driver: import time, and forks that come later."""
    code = (
        "import sys, torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "before = set(sys.modules)\n"
        "from moecomm import backends\n"
        "assert backends.choose('auto', None)[0] == 'host'\n"
        "print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] in ('cuda', 'nccl')))\n"
    )
    done = run_python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def shape_of(ranks: int, **sizes: int) -> _native.Shape:
    wanted = {"slots": ranks, "topk": 1, "max_tokens": 8, "ring_tokens": 32, "staged_row_bytes": 32}
    return _native.Shape(ranks=ranks, **{**wanted, "heap_bytes": 4096, **sizes})


def test_mail_is_as_long_as_in_the_window() -> None:
    # 2 * 64 pieces of mail are a multiple of the 256 bytes that parts of a window are aligned to: no padding hides.
    window = _native.window_layout(shape_of(64))
    tagged_words = between_rounds.tagged_words(3, window.num_tagged_words)
    assert window.arrived - window.tagged_words == 2 * 64 * len(tagged_words)
    assert _native.leave_offset(window, 64, 3, 5) == window.tagged_words + 5 * len(tagged_words)
    assert _native.leave_offset(window, 64, 4, 63) == window.arrived - len(tagged_words)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("last_round", [0, 1, 6, 0x7FFFFFFF])
def test_leaving_ends_a_peers_round(last_round: int, op: str) -> None:
    """The bytes that the host copies into a peer's window are what the host executor judges as "that rank has left"."""
    sizes = {"hidden": 8, "num_experts": 2, "topk": 1, "max_tokens": 4}
    with LocalBuffers(2, **sizes, backend="host", timeout_s=60) as ranks:
        call = {"x": torch.ones(2, 8).bfloat16(), "topk_idx": torch.tensor([[0], [1]])}
        _, second = ranks.dispatch([call, call])
        buffer = ranks.buffers[1]
        context = buffer.rounds.session.context
        window = context.window
        ctypes.c_uint32.from_address(context.peers[1] + window.state).value = last_round
        tagged_words = between_rounds.tagged_words(last_round, window.num_tagged_words)
        ctypes.memmove(
            context.peers[1] + _native.leave_offset(window, 2, last_round, 0), tagged_words, len(tagged_words)
        )
        with pytest.raises(moecomm.PeerLost) as caught:
            buffer.dispatch(**call) if op == "dispatch" else buffer.combine(second.x, second.handle)
        assert (caught.value.rank, caught.value.peer, caught.value.op) == (1, 0, op)
        assert caught.value.round == (last_round + 1) & 0x7FFFFFFF


@pytest.mark.parametrize("last_round", [0, 5, 0x7FFFFFFE, 0x7FFFFFFF])
def test_leaving_ends_a_round_in_another_domain(last_round: int) -> None:
    """There the mail counts when its signal has come."""
    sizes = {"hidden": 8, "num_experts": 2, "topk": 1, "max_tokens": 4}
    with LocalBuffers(2, **sizes, backend="host", domain_ranks=1, timeout_s=60) as ranks:
        buffer = ranks.buffers[1]
        context = buffer.rounds.session.context
        window, base = context.window, context.peers[1]
        ctypes.c_uint32.from_address(base + window.state).value = last_round
        tagged_words = between_rounds.tagged_words(last_round, window.num_tagged_words)
        ctypes.memmove(base + _native.leave_offset(window, 2, last_round, 0), tagged_words, len(tagged_words))
        ctypes.memmove(
            base + between_rounds.signal_offset(window, 0), _native.leave_signal(last_round), between_rounds.WORD
        )
        with pytest.raises(moecomm.PeerLost) as caught:
            buffer.dispatch(torch.ones(2, 8).bfloat16(), torch.tensor([[0], [1]]))
        assert (caught.value.peer, caught.value.round) == (0, (last_round + 1) & 0x7FFFFFFF)


class Copies:
    """Copies between pinned memory and a window that is host memory, each followed by what happens meanwhile."""

    def __init__(self, meanwhile: Callable[[int], None]) -> None:
        self.meanwhile, self.count = meanwhile, 0

    def to_host(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def wait(self) -> None:
        self.count += 1
        self.meanwhile(self.count)


class Pinned:
    """Pinned memory of a session: a record, an abort word, and mail."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(4096)
        self.address = ctypes.addressof(self.memory)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.memory[offset : offset + nbytes]


@pytest.mark.parametrize("last_round", [1, 6, 0xFFFFFFFF])
def test_who_can_not_see_the_others_waits_for_their_last_mail(last_round: int) -> None:
    """Mail of the round before last, which lies at the same place, is none."""
    shape = shape_of(4, domain_ranks=2)
    layout = _native.window_layout(shape)
    window = ctypes.create_string_buffer(layout.bytes)
    at = ctypes.addressof(window)

    def come(rank: int, number: int) -> None:
        tagged_words = between_rounds.tagged_words(number, layout.num_tagged_words)
        ctypes.memmove(at + _native.leave_offset(layout, 4, last_round, rank), tagged_words, len(tagged_words))

    for rank in range(4):
        come(rank, last_round - 2)
    copies = Copies(lambda count: come({5: 3, 9: 0, 14: 1}.get(count, 2), last_round))
    session = session_of(
        context=SimpleNamespace(rank=2, window=layout),
        reach=SimpleNamespace(linger_s=FAR_S),
        _window=SimpleNamespace(address=at, peers=[0] * 4),
        _control=Pinned(),
        _copies=copies,
        _masks=SimpleNamespace(masked=()),
    )
    begin = time.monotonic()
    session._linger(last_round)
    assert copies.count == 16 and time.monotonic() - begin < ROOM_S
    session.reach.linger_s, session._copies = 0.2, Copies(lambda count: None)
    come(1, last_round - 2)
    begin = time.monotonic()
    session._linger(last_round)
    assert 0.2 <= time.monotonic() - begin < ROOM_S
    session.reach.linger_s, session._masks.masked = FAR_S, {1}
    session._linger(last_round)
    assert time.monotonic() - begin < ROOM_S


def test_a_loss_that_ends_the_wait_for_puts_names_only_the_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    dead: dict[int, str] = {}
    told: list[int] = []
    context: Any = SimpleNamespace(shape=shape_of(6, domain_ranks=2), window=_native.window_layout(shape_of(6)))
    window: Any = SimpleNamespace(address=0)
    peers: Any = SimpleNamespace(
        device=torch.device("cuda", 0),
        ignore=lambda *about: None,
        abort=lambda cause, rank: told.append(rank),
        dead_peers=lambda: dead,
        reach=SimpleNamespace(puts=True, shim="gin"),
        control=None,
    )
    masks = gpu_masks.GpuMasks(peers, context, window)
    monkeypatch.setattr(masks, "_write", lambda *about: None)
    monkeypatch.setattr(gpu_masks, "_native", Mock())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    reports: list[tuple[set[int], dict[int, str]]] = [
        (set(), {}),
        ({2, 3}, {}),  # by the deadline
        ({2, 3, 4}, {1: "its process has ended"}),  # a neighbor, of whom no puts are awaited
        ({2, 4}, {1: "its process has ended", 4: "its process has ended"}),
    ]

    def wait(*about: Any) -> set[int]:
        missing, found = reports[0]
        dead.update(found)
        return missing

    monkeypatch.setattr(between_rounds, "quiesce", wait)
    found = []
    while reports:
        dead.clear()
        found.append(masks.resume(7, {5}, 2))
        reports.pop(0)
    assert found == [set(), {2, 3}, {1}, {1, 4}]
    dead.clear()
    dead.update({3: "its process has ended", 5: "masked"})
    assert masks.resume(7, {5}, 4) == {3} and told == [3]


def session_of(**attributes: object) -> lsa.LsaSession:
    """A session that was never opened."""
    session = lsa.LsaSession.__new__(lsa.LsaSession)
    for name, value in {"device": torch.device("cuda", 0), **attributes}.items():
        setattr(session, name, value)
    return session


def test_blocks_and_chunks_come_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choose(*question: object, casts: bool = False) -> tuning.Choice:
        asked.append((*question, casts))
        return tuning.Choice(blocks=24, chunk_tokens=4)

    monkeypatch.setattr(tuning, "choose", choose)
    context = SimpleNamespace(shape=SimpleNamespace(ranks=8, domain_ranks=0))
    session = session_of(_gpu="NVIDIA H200", _ranks=8, _most_blocks=132, context=context)
    assert session.schedule("combine", num_tokens=77, layout="flat", num_sms=None) == (24, 4)
    assert asked == [("NVIDIA H200", 8, "combine", "flat", 77, False)]
    assert [session.schedule("dispatch", num_tokens=1, layout="flat", num_sms=n)[0] for n in (1, 16, 200)] == [
        1,
        16,
        132,
    ]
    session = session_of(_gpu="NVIDIA H200", _ranks=8, _most_blocks=132 // 8, context=context)  # ranks that share a GPU
    assert session.schedule("dispatch", num_tokens=1, layout="flat", num_sms=None) == (16, 4)


@pytest.mark.parametrize(
    ("op", "tokens", "ring", "by_table", "blocks"),
    [
        ("dispatch", 4096, 2496, 64, 64),
        ("dispatch", 4096, 768, 64, 32),
        ("dispatch", 4096, 192, 128, 32),
        ("dispatch", 768, 768, 128, 128),  # all tokens have places of their own
        ("combine", 4096, 2496, 24, 64),
        ("combine", 4096, 2496, 128, 128),
        ("combine", 4096, 768, 128, 64),
        ("combine", 4096, 192, 24, 64),
    ],
)
def test_blocks_between_domains_have_places_in_the_rings(
    op: str, tokens: int, ring: int, by_table: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "choose", lambda *_, casts: tuning.Choice(blocks=by_table, chunk_tokens=4))
    context = SimpleNamespace(shape=shape_of(4, domain_ranks=2, max_tokens=4096, ring_tokens=ring))
    reach = SimpleNamespace(least_chunks=())
    session = session_of(_gpu="NVIDIA H200", _ranks=4, _most_blocks=132, context=context, reach=reach)
    assert session.schedule(op, num_tokens=tokens, layout="expert", num_sms=None)[0] == blocks
    assert session.schedule(op, num_tokens=tokens, layout="expert", num_sms=48)[0] == 48


@pytest.mark.parametrize(("ranks", "most"), [(4, 64), (8, 96), (64, 320)])
def test_the_memory_besides_outputs(ranks: int, most: int) -> None:
    settings = Settings(ranks, 7168, 256, 8, 4096, torch.bfloat16, "lsa", None)
    row = settings.staged_row_bytes
    ring = lsa.ring_tokens(ranks, 4096, row)
    sizes = {"slots": 256, "topk": 8, "max_tokens": 4096, "ring_tokens": ring, "staged_row_bytes": row}
    shape = shape_of(ranks, **sizes, packet_bytes=lsa.packet_bytes(ranks, 4096, row))
    assert most - 3 << 20 <= _native.window_layout(shape).heap <= most << 20
    packets = 2 * ranks * shape.packet_bytes
    assert (ring + 32) * ranks * row + packets > 62 << 20, "what there is room for is used"


def test_the_ring_is_whole_chunks_and_no_longer_than_the_tokens() -> None:
    assert [lsa.ring_tokens(4, tokens, 1024) for tokens in (1, 32, 33, 100)] == [32, 32, 64, 128]
    assert lsa.ring_tokens(64, 4096, 1 << 20) == 32, "no row fits, and yet"
    assert lsa.ring_tokens(1, 1 << 20, 1 << 10) * 1024 + 2 * lsa.packet_bytes(1, 1 << 20, 1 << 10) == 62 << 20
    assert lsa.ring_tokens(3, 1 << 20, 1 << 10) % 32 == 0


class Event(int):
    """Event of the stream of that number; done when it has been asked often enough, or Ctrl-C comes first."""

    answers: ClassVar[list[bool]] = []

    def query(self) -> bool:
        if not self.answers:
            raise KeyboardInterrupt
        return self.answers.pop(0)


class Stream:
    """A stream that remembers what it waits for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waits: list[int] = []

    def record_event(self) -> Event:
        return Event(self.cuda_stream)

    def wait_event(self, event: int) -> None:
        self.waits.append(event)


class Cuda:
    """The current stream and context of a thread, and what has been launched, where there is no GPU."""

    def __init__(self) -> None:
        self.stream, self.context, self.captures = Stream(1), 77, False
        self.launched: list[tuple[int, ...]] = []
        self.entered: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Cuda:
        monkeypatch.setattr(_native, "cuda_context", lambda: self.context)
        monkeypatch.setattr(_native, "current_stream", lambda device: self.stream.cuda_stream)
        monkeypatch.setattr(_native, "cuda_capturing", lambda stream: self.captures)
        monkeypatch.setattr(_native, "cuda_launch", lambda *launch: self.launched.append(launch))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(cuda_driver, "bind_thread", lambda device: self.entered.append(f"bind {device}"))
        return self

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        self.entered.append(str(device))
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda().install(monkeypatch)


@pytest.fixture
def session(cuda: Cuda) -> lsa.LsaSession:
    return session_of(
        _last=None,
        _queue=_native.LaunchQueue(0, cuda.context),
        _captured=False,
        _cuda_context=cuda.context,
        _kernels=AnyKernel(),
        exclusive_gpu=True,
        _sms=132,
    )


class AnyKernel:
    """Finds a kernel for whatever it is asked for."""

    def dispatch(self, args: _native.DispatchArgs) -> SimpleNamespace:
        return SimpleNamespace(function=1000 + args.layout, block=512, shared_bytes=4096)

    def combine(self, args: _native.CombineArgs) -> SimpleNamespace:
        return SimpleNamespace(function=2000 + args.layout, block=256, shared_bytes=8192)


def test_rounds_are_launched_on_the_current_stream(session: lsa.LsaSession, cuda: Cuda) -> None:
    dispatch, combine = _native.DispatchArgs(), _native.CombineArgs()
    dispatch.layout = combine.layout = 2
    dispatch.workers, combine.workers = 16, 128
    run, other = session.dispatcher(dispatch), session.combiner(combine)
    assert cuda.launched == []
    run(dispatch)
    other(combine)
    assert cuda.launched == [(1002, 512, 4096, 1, dispatch, True, 4), (2002, 256, 8192, 1, combine, True, 1)]
    assert cuda.entered == []


@pytest.mark.parametrize("placed", [BALANCED, REPLICATED])
def test_experts_are_copied_between_the_choice_and_the_dispatch(
    placed: int, session: lsa.LsaSession, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is copied, one native call launches both."""
    sizes = {"topk": 2, "max_tokens": 64, "ring_tokens": 32, "staged_row_bytes": 64, "heap_bytes": 1 << 20}
    args = _native.DispatchArgs()
    args.ctx.shape, args.ctx.placed = _native.Shape(ranks=2, slots=6, **sizes), placed
    args.idx_bytes, args.workers = 8, 16
    order: list[str] = []
    monkeypatch.setattr(plain_kernel, "load", lambda kernel, device: order.append(f"load {kernel.header}") or 3000)
    monkeypatch.setattr(_native, "cuda_launch", lambda *launch: order.append(f"dispatch on {launch[3]}"))
    monkeypatch.setattr(_native, "cuda_launch_choice", lambda *launch: order.append(f"choice on {launch[3]}"))
    run = session.dispatcher(args)
    rounds = SimpleNamespace(on_cpu=False, session=session)
    routed: Any = Routed(SimpleNamespace(rounds=rounds), SimpleNamespace(run=run), args, None)  # type: ignore[arg-type]
    if placed == REPLICATED:
        routed.copies = lambda: order.append("copies")
    assert order == ["load dispatch/choose"], "before any round waits"
    order.clear()
    launch(routed)
    both = ["choice on 1", "dispatch on 1"]
    assert order == (["load dispatch/choose", both[0], "copies", both[1]] if placed == REPLICATED else both)


def test_ranks_that_share_a_gpu_leave_each_other_room(session: lsa.LsaSession, cuda: Cuda) -> None:
    """Neither early nor in clusters, of which fewer fit a GPU than blocks."""
    args = _native.CombineArgs()
    args.workers, session.exclusive_gpu = 64, False
    session.combiner(args)(args)
    assert cuda.launched == [(2000, 256, 8192, 1, args, False, 1)]


@pytest.mark.parametrize(("blocks", "cluster"), [(1, 1), (6, 2), (12, 4), (15, 1), (64, 4), (66, 2), (68, 1), (132, 1)])
def test_few_blocks_lie_together(blocks: int, cluster: int) -> None:
    assert lsa_kernels.cluster(blocks, 132) == cluster


def test_a_thread_without_the_device_gets_it(session: lsa.LsaSession, cuda: Cuda) -> None:
    args = _native.DispatchArgs()
    cuda.context = 0
    assert not session.capturing()
    assert cuda.entered == ["bind 0"]
    session.dispatcher(args)(args)
    assert cuda.entered == ["bind 0", "cuda:0", "bind 0"] and len(cuda.launched) == 1


def test_rounds_keep_their_order_over_streams(session: lsa.LsaSession, cuda: Cuda) -> None:
    first, again, second = Stream(1), Stream(1), Stream(2)
    args = _native.CombineArgs()
    run = session.combiner(args)
    for cuda.stream in (first, again, second, second, first):
        run(args)
    assert (first.waits, again.waits, second.waits) == ([2], [], [1])
    Event.answers[:] = [False, False, True]
    session.synchronize()
    assert Event.answers == []


def test_what_comes_before_a_round_keeps_its_order_as_well(session: lsa.LsaSession, cuda: Cuda) -> None:
    first, second = Stream(1), Stream(2)
    run = session.combiner(args := _native.CombineArgs())
    cuda.stream = first
    run(args)
    cuda.stream = second
    session.order()
    assert second.waits == [1] and len(cuda.launched) == 1
    run(args)
    assert second.waits == [1], "once"


def test_ctrl_c_ends_a_wait_for_the_device(session: lsa.LsaSession, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    session.context = _native.Context()
    session.context.rank = 2
    monkeypatch.setattr(session, "abort", lambda cause, culprit: told.append((cause, culprit)))
    session._order(1)
    Event.answers[:] = [False, False]
    with pytest.raises(KeyboardInterrupt):
        session.synchronize()
    assert told == [(3, 2)], "aborted, by this rank"


def test_a_captured_stream_is_left_alone(session: lsa.LsaSession, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, captured, waited = Stream(1), Stream(2), []
    cuda.stream = eager
    session._order(1)
    cuda.stream, cuda.captures = captured, True
    assert session.capturing()
    session._order(2)
    assert captured.waits == [] and session._last is eager
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    session.synchronize()
    assert waited == [session.device], "replays may run on any stream"


def test_the_last_round_is_read_beside_kernels_and_not_in_a_capture(cuda: Cuda) -> None:
    asked: list[int] = []

    def peek(pinned: object, offset: int, address: int, nbytes: int, within_s: float) -> bytes | None:
        asked.append(address)
        return None if len(asked) == 2 else (7).to_bytes(nbytes, "little")

    peers: Any = object.__new__(GpuPeers)
    peers.device, peers.control, peers.copies = torch.device("cuda", 0), "pinned", SimpleNamespace(peek=peek)
    context = _native.Context()
    context.set_shape(_native.Shape(2, 2, 1, 1, 32, 16, 0))
    session = session_of(_window=SimpleNamespace(address=1000), _peers=peers, context=context)
    assert [session.round_begun() for _ in range(3)] == [7, None, 7]
    assert asked == [1000 + context.window.state] * 3 and cuda.entered == ["cuda:0"] * 3
    session._counters = gpu_counters.GpuCounters(peers, 1000, context.window, 512)
    words = session.read_counters()
    assert words is not None and len(words) == context.window.staging - context.window.counters
    assert asked.pop() == 1000 + context.window.counters
    cuda.captures = True
    assert session.round_begun() is None and session.read_counters() is None and len(asked) == 3
    cuda.captures = False
    assert session._counters.close() and not session._counters.close()
    assert session.read_counters() is None and len(asked) == 3


def test_a_peek_gives_up_on_a_copy_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [600, 600, 0]
    driver = SimpleNamespace(
        cuStreamQuery=lambda stream: (answers.pop(0) if answers else 600,),
        cuMemcpyDtoHAsync=lambda *copy: (0,),
    )
    monkeypatch.setattr(cuda_driver, "driver", lambda: driver)
    copies: Any = object.__new__(cuda_driver.CopyStream)
    copies._stream = 5
    pinned: Any = SimpleNamespace(address=64, read=lambda offset, nbytes: bytes([offset, nbytes]))
    assert copies.peek(pinned, 8, 4096, 4, 10) == bytes([8, 4])
    assert copies.peek(pinned, 8, 4096, 4, 0.01) is None


def test_a_kernel_is_looked_up_by_what_it_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from moecomm.backends.lsa_kernels import Kernels
    from moecomm.gpu import jit

    loaded: list[jit.KernelSpec] = []

    def load(spec: jit.KernelSpec, device: torch.device) -> int:
        """Like jit.load: one kernel for each specification."""
        if spec not in loaded:
            loaded.append(spec)
        return 1 + loaded.index(spec)

    monkeypatch.setattr(jit, "load", load)
    kernels = Kernels(torch.device("cuda", 0))
    context = _native.Context()
    context.set_shape(shape_of(4, slots=16, topk=2, max_tokens=4096, packet_bytes=1 << 20))
    dispatch, combine = _native.DispatchArgs(), _native.CombineArgs()
    dispatch.ctx = combine.ctx = context
    dispatch.hidden = combine.hidden = 64
    dispatch.row_bytes, dispatch.idx_bytes, dispatch.num_tokens = 128, 8, 4000
    assert [kernels.dispatch(dispatch), kernels.combine(combine), kernels.dispatch(dispatch)] == [1, 2, 1]
    dispatch.num_tokens, dispatch.x = 3000, 4096  # what a kernel is not compiled for
    assert kernels.dispatch(dispatch) == 1
    dispatch.num_tokens = 100  # few tokens go in packets
    assert kernels.dispatch(dispatch) == 3 and loaded[2].packets
    dispatch.num_tokens = 513  # too many, where a bit a token travels beside the counts
    assert kernels.dispatch(dispatch) == 1
    dispatch.num_tokens, dispatch.repeat, dispatch.idx_bytes = 100, 1, 0  # there are no ids
    assert kernels.dispatch(dispatch) == 4 and not loaded[3].packets
    assert [spec.op for spec in loaded] == ["dispatch", "combine", "dispatch", "dispatch"]


def test_nobody_is_told_of_losses_after_the_end(session: lsa.LsaSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort word goes with the session, also when Ctrl-C has ended the wait for its rounds."""
    watched: list[int] = []
    for end in (KeyboardInterrupt, None):
        session._window, session._counters, session._masks = None, Mock(), Mock()
        session.reach = SimpleNamespace(watch=watched.append, linger_s=0.0)  # type: ignore[assignment]
        session._peers = GpuPeers.__new__(GpuPeers)
        session._peers.reach, session._peers.presence = session.reach, None
        monkeypatch.setattr(session, "synchronize", Mock(side_effect=end))
        monkeypatch.setattr(session, "_leave", Mock())
        with suppress(KeyboardInterrupt):
            session.close()
        assert watched == [0]
        watched.clear()
