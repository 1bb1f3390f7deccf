"""The lsa backend where there is no GPU: what it says, and the parts of it that are plain bytes and numbers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from moecomm import _native, backends
from moecomm.backends import leave, lsa
from moecomm.errors import Unsupported


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_missing_is_a_sentence_to_act_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert lsa.missing() == "this torch is built without CUDA; install a CUDA build from https://pytorch.org"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_native, "cuda_available", lambda: "libcuda.so.1 can't be loaded; install the NVIDIA driver")
    assert lsa.missing() == "libcuda.so.1 can't be loaded; install the NVIDIA driver"
    monkeypatch.setattr(_native, "cuda_available", lambda: "")
    assert lsa.missing() == "torch sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def test_a_gpu_before_hopper_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_native, "cuda_available", lambda: "")
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
        f"the Python package {package.replace('.', '-')} is not installed; "
        "pip install moecomm[cu13] (or [cu12] for a driver of CUDA 12)"
    )


def test_asked_for_by_name_it_raises_and_auto_goes_to_the_host() -> None:
    reason = lsa.missing()
    with pytest.raises(Unsupported, match="backend 'lsa' can't run here") as raised:
        backends.choose("lsa", None)
    assert reason in str(raised.value)
    assert backends.choose("auto", None) == ("host", f"no GPU backend can run here (lsa: {reason})")
    with pytest.raises(Unsupported, match="no GPU backend can run here"):
        backends.choose("auto", torch.device("cuda"))


def test_asking_imports_nothing_of_cuda(python: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    """Neither NVIDIA's packages nor the driver: import time, and forks that come later."""
    code = (
        "import sys, torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "before = set(sys.modules)\n"
        "from moecomm import backends\n"
        "assert backends.choose('auto', None)[0] == 'host'\n"
        "print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] in ('cuda', 'nccl')))\n"
    )
    done = python(code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_notice_is_as_long_as_in_the_window() -> None:
    # 2 * 64 notices are a multiple of the 256 bytes that parts of a window are aligned to: padding hides no difference.
    shape = _native.Shape(ranks=64, experts=64, topk=1, max_tokens=8, staged_row_bytes=16, heap_bytes=256)
    window = _native.window_layout(shape)
    assert window.counts - window.notices == 2 * 64 * leave.NOTICE_BYTES


@pytest.mark.parametrize("last_round", [0, 1, 6, 0xFFFFFFFF])
def test_leaving_ends_a_peers_round(last_round: int) -> None:
    """The bytes that the host copies into a peer's window are what the host executor judges as "that rank has left"."""
    shape = _native.Shape(ranks=2, experts=2, topk=1, max_tokens=8, staged_row_bytes=32, heap_bytes=4096)
    window = _native.window_layout(shape)
    memory, control = [_native.host_alloc(window.bytes) for _ in range(2)], _native.host_alloc(128)
    outputs = _native.host_alloc(4096)
    for own in memory:
        ctypes.c_uint32.from_address(own.address + window.state).value = last_round
    notice = leave.notice(last_round)
    ctypes.memmove(memory[1].address + leave.notice_offset(window, 2, last_round, 0), notice, len(notice))

    args = _native.CombineArgs()
    context = _native.Context()
    context.set_shape(shape)
    context.rank, context.peers = 1, [own.address for own in memory]
    context.record, context.abort_host, context.timeout_ns = control.address, control.address + 64, 2_000_000_000
    args.ctx = context
    args.hidden, args.type, args.wire, args.layout, args.workers = 8, 2, 2, 1, 1
    args.out, args.y = outputs.address, outputs.address + 2048
    args.route.source_base = outputs.address + 1024
    _native.host_combine(args)

    record = _native.record(control.address)
    assert record is not None
    assert (record.code, record.rank, record.peer) == (2, 1, 0)  # peer_lost
    assert record.round == (last_round + 1) & 0xFFFFFFFF


def test_blocks_of_a_round() -> None:
    session = lsa.LsaSession.__new__(lsa.LsaSession)
    session._most_blocks = 132
    assert [session.workers(None, tokens) for tokens in (0, 1, 64, 65, 128, 256, 8192)] == [8, 8, 32, 33, 64, 64, 64]
    assert [session.workers(requested, 128) for requested in (1, 16, 200)] == [1, 16, 132]
    session._most_blocks = 132 // 8  # eight ranks on one GPU: all their kernels are resident at once
    assert [session.workers(None, tokens) for tokens in (1, 128, 8192)] == [8, 16, 16]
    assert session.workers(132, 1) == 16


class Event(int):
    """Of the stream of that number; done when it has been asked often enough, or Ctrl-C comes first."""

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


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> lsa.LsaSession:
    session = lsa.LsaSession.__new__(lsa.LsaSession)
    session.device, session._last, session._captured = torch.device("cuda", 0), None, False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return session


def test_rounds_keep_their_order_over_streams(session: lsa.LsaSession) -> None:
    first, again, second = Stream(1), Stream(1), Stream(2)
    for stream in (first, again, second, second, first):
        session._order(stream)  # type: ignore[arg-type]
    assert (first.waits, again.waits, second.waits) == ([2], [], [1])
    Event.answers[:] = [False, False, True]
    session.synchronize()
    assert Event.answers == []


def test_ctrl_c_ends_a_wait_for_the_device(session: lsa.LsaSession, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    session.context = _native.Context()
    session.context.rank = 2
    monkeypatch.setattr(session, "abort", lambda cause, culprit: told.append((cause, culprit)))
    session._order(Stream(1))  # type: ignore[arg-type]
    Event.answers[:] = [False, False]
    with pytest.raises(KeyboardInterrupt):
        session.synchronize()
    assert told == [(3, 2)], "aborted, by this rank"


def test_a_captured_stream_is_left_alone(session: lsa.LsaSession, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, captured, waited = Stream(1), Stream(2), []
    session._order(eager)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    session._order(captured)  # type: ignore[arg-type]
    assert captured.waits == [] and session._last is eager
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    session.synchronize()
    assert waited == [session.device], "replays may run on any stream"


def test_a_kernel_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from moecomm.backends.lsa_kernels import Kernels

    loaded = []
    jit = SimpleNamespace(
        KernelSpec=lambda **fields: fields, load=lambda spec, device: loaded.append(spec) or len(loaded)
    )
    monkeypatch.setitem(sys.modules, "moecomm.jit", jit)  # type: ignore[arg-type]
    monkeypatch.setattr("moecomm.jit", jit, raising=False)
    kernels = Kernels(torch.device("cuda", 0))
    dispatch, combine = _native.DispatchArgs(), _native.CombineArgs()
    dispatch.hidden = combine.hidden = 64
    assert [kernels.dispatch(dispatch), kernels.combine(combine), kernels.dispatch(dispatch)] == [1, 2, 1]
    dispatch.num_tokens, dispatch.x = 7, 4096  # what a kernel is not compiled for
    assert kernels.dispatch(dispatch) == 1
    dispatch.repeat = 1
    assert kernels.dispatch(dispatch) == 3
    assert [spec["op"] for spec in loaded] == ["dispatch", "combine", "dispatch"]
