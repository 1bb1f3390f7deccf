"""Memory that a Buffer releases and restores: values, bytes, addresses, and how both calls fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.backends import windows
from moecomm.backends.windows.nccl import NcclWindow
from moecomm.testing import LocalBuffers, check_case, random_case

from ..backends.conftest import run_ranks
from ..conftest import Ranks
from ..few import few
from ..live import FAR_S, ROOM_S

SIZES: dict[str, Any] = {"hidden": 1024, "num_experts": 12, "topk": 2, "max_tokens": 256}
HOST: dict[str, Any] = {**SIZES, "backend": "host", "timeout_s": FAR_S}
SHORT: dict[str, Any] = {**HOST, "timeout_s": 2}


def one_round(buffer: moecomm.Buffer, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 1024, generator=g).bfloat16()
    topk_idx = torch.rand(200, 12, generator=g).argsort(dim=1)[:, :2]
    routed = buffer.dispatch(x, topk_idx, torch.rand(200, 2, generator=g))
    return buffer.combine(routed.x, routed.handle)


def window(buffer: moecomm.Buffer) -> Any:
    return buffer.rounds.session.owner


def resident(buffer: moecomm.Buffer) -> int:
    """Bytes of memory that this rank's window takes."""
    return os.fstat(window(buffer).fd).st_blocks * 512


def heap_address(buffer: moecomm.Buffer) -> int:
    g = torch.zeros(1, 1024, dtype=torch.bfloat16)
    return buffer.dispatch(g, torch.tensor([[0, 7]]), layout="flat").x.data_ptr() - window(buffer).address


def a_pause(rank: int, group: Any) -> None:
    """Rounds before and after, in two pauses of which the second follows a round at once."""
    with moecomm.Buffer(group, **HOST) as buffer:
        begin, layout = window(buffer).address, buffer.rounds.session.context.window
        before = [one_round(buffer, seed) for seed in range(3)]
        at, full = heap_address(buffer), buffer.nbytes
        for _ in range(2):
            assert resident(buffer) > layout.staging + (100 << 10)
            buffer.release_memory()
            assert buffer.released and repr(buffer).startswith("<moecomm.Buffer released,")
            assert resident(buffer) <= buffer.nbytes < layout.staging + 4096 < full
            buffer.release_memory()  # again: nothing happens
            buffer.check()
            with pytest.raises(moecomm.MemoryReleased, match=r"call restore\(\)"):
                one_round(buffer)
            buffer.restore()
            buffer.restore()
            assert not buffer.released and buffer.nbytes == full
            after = [one_round(buffer, seed) for seed in range(3)]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert (window(buffer).address, heap_address(buffer)) == (begin, at)
        buffer.check()


def test_processes_release_and_restore(ranks: Ranks) -> None:
    ranks.run(3, a_pause)


def test_threads_release_and_restore() -> None:
    assert run_ranks(3, lambda group: a_pause(group.rank, group)) == [None] * 3


def test_a_rank_alone_releases_and_restores() -> None:
    a_pause(0, "self")


@pytest.mark.parametrize("domain_ranks", few([4, 2, 1], 4, 2))
def test_random_rounds_between_pauses_match_the_reference(domain_ranks: int) -> None:
    """Staging, packets, rings and signals go on where they were."""
    sizes: dict[str, Any] = {"ranks": 4, "hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": 40}
    with LocalBuffers(**sizes, domain_ranks=domain_ranks, backend="host", timeout_s=20) as local:
        for number in range(12):
            check_case(local, random_case(number, **sizes, dtype=torch.bfloat16))
            local.release_memory()
            local.restore()


@pytest.mark.parametrize("call", ["release", "restore"])
def test_memory_moves_when_all_ranks_have_come(call: str) -> None:
    """A rank that has not come may still be in a round, and read memory of those that have."""
    came: list[int] = []
    seen: list[list[int]] = []

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **HOST) as buffer:
            session: Any = buffer.rounds.session
            move = getattr(session, call)

            def moves(ranks: Any) -> None:
                seen.append(list(came))
                move(ranks)

            setattr(session, call, moves)
            time.sleep(0.1 * group.rank)
            if call == "restore":
                buffer.release_memory()
                time.sleep(0.1 * group.rank)
            came.append(group.rank)
            buffer.release_memory() if call == "release" else buffer.restore()

    assert run_ranks(3, body) == [None] * 3
    assert [sorted(ranks) for ranks in seen] == [[0, 1, 2]] * 3


def test_outputs_that_are_still_referenced_are_named_on_every_rank() -> None:
    def body(group: Any) -> None:
        with moecomm.Buffer(group, **HOST) as buffer:
            x = torch.zeros(4, 1024, dtype=torch.bfloat16)
            routed = buffer.dispatch(x, torch.tensor([[0, 7]] * 4))
            if group.rank == 0:
                del routed
            with pytest.raises(moecomm.BadInput, match=r"outputs \(rank 1\)|outputs: got \d{4,} bytes") as caught:
                buffer.release_memory()
            assert caught.value.rank == (1 if group.rank == 0 else None)
            assert not buffer.released and not buffer.failed
            routed = None  # type: ignore[assignment]
            buffer.release_memory()
            buffer.restore()
            one_round(buffer)

    assert run_ranks(2, body) == [None, None]


def test_memory_of_captured_graphs_is_no_output() -> None:
    """Their tensors may be referenced: replays fill them again."""
    with moecomm.Buffer("self", **HOST) as buffer:
        buffer.rounds.memory._capturing = lambda: True
        captured = buffer.rounds.memory.allocate(1000, 70_000)
        buffer.rounds.memory._capturing = lambda: False
        assert buffer.rounds.memory.used > 71_000 and buffer.rounds.memory.held == 0
        buffer.release_memory()
        buffer.restore()
        assert {block.offset for block in captured}.isdisjoint({heap_address(buffer)})


def test_a_call_while_released_keeps_ranks_in_step_or_is_named() -> None:
    def body(group: Any, only: int | None) -> str:
        with moecomm.Buffer(group, **HOST) as buffer:
            buffer.release_memory()
            if only in (None, group.rank):
                with pytest.raises(moecomm.MemoryReleased):
                    one_round(buffer)
            buffer.restore()
            try:
                one_round(buffer)
            except moecomm.OutOfStep as error:
                return type(error).__name__
            return "fine"

    assert run_ranks(2, lambda group: body(group, None)) == ["fine"] * 2
    assert run_ranks(2, lambda group: body(group, 1)) == ["OutOfStep"] * 2


CALLS = ("release_memory", "restore")


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_does_not_come_is_a_timeout(call: str) -> None:
    def body(group: Any) -> Any:
        buffer = moecomm.Buffer(group, **SHORT)
        if call == "restore":
            buffer.release_memory()
        if group.rank != 2:
            start = time.monotonic()
            with pytest.raises(moecomm.Timeout, match=rf"for rank 2, which has not called {call}\(\)") as caught:
                getattr(buffer, call)()
            assert time.monotonic() - start < ROOM_S and (caught.value.peer, caught.value.op) == (2, call)
            assert buffer.failed
            with pytest.raises(moecomm.Timeout):
                one_round(buffer)
        buffer.close()
        return None

    assert run_ranks(3, body) == [None] * 3


@pytest.mark.parametrize("call", CALLS)
def test_abort_ends_the_wait(call: str) -> None:
    def body(group: Any) -> None:
        buffer = moecomm.Buffer(group, **HOST)
        if call == "restore":
            buffer.release_memory()
        if group.rank == 0:
            timer = threading.Timer(0.2, buffer.abort)
            timer.start()
            start = time.monotonic()
            with pytest.raises(moecomm.Aborted, match=rf"rank 0 was stopped by abort\(\) or an interrupt \({call}\)"):
                getattr(buffer, call)()
            assert time.monotonic() - start < ROOM_S
            timer.join()
        buffer.close()

    assert run_ranks(2, body) == [None] * 2


def test_other_calls_of_the_group_are_a_mismatch() -> None:
    def body(group: Any) -> None:
        first, second = (moecomm.Buffer(group, **SHORT) for _ in range(2))
        with pytest.raises(moecomm.Mismatch, match=r"Buffer [01] of the group.*Buffer [01] of the group") as caught:
            (second if group.rank else first).release_memory()
        assert caught.value.field == "call"
        first.release_memory()
        if group.rank:
            with pytest.raises(moecomm.Mismatch, match="open"):
                moecomm.Buffer(group, **SHORT)
        else:
            with pytest.raises(moecomm.Mismatch, match="restore"):
                first.restore()
        first.restore()
        for buffer in (first, second):
            one_round(buffer)
            buffer.close()

    for found in run_ranks(2, lambda group: body(group)):
        assert found is None or "rank" in str(found), found


def killed(rank: int, group: Any, call: str, died: Any) -> tuple[str, int, float]:
    buffer = moecomm.Buffer(group, **HOST)
    if call == "restore":
        buffer.release_memory()
    if rank == 1:
        time.sleep(0.2)
        died.value = time.monotonic()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        getattr(buffer, call)()
    except moecomm.RoundFailed as error:
        took = time.monotonic() - died.value
        buffer.close()
        return type(error).__name__, error.peer, took
    raise AssertionError("nobody was missed")


def between(rank: int, group: Any, call: str, died: Any) -> tuple[str, int, float]:
    """Rank 1 dies when all have agreed, where memory is about to move."""

    def die(*_: Any) -> None:
        died.value = time.monotonic()
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        name = {"release_memory": "release", "restore": "restore"}[call]
        setattr(__import__("moecomm.backends.host", fromlist=["x"]).HostSession, name, die)
    return killed(rank if rank != 1 else -1, group, call, died)


@pytest.mark.parametrize("body", [killed, between])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed_is_named(ranks: Ranks, call: str, body: Any) -> None:
    ranks.start(3, body, call, ranks.died)
    found = ranks.results(2)
    assert sorted(found) == [0, 2]
    for result in found.values():
        assert result[:2] == ("PeerLost", 1) and result[2] < 5, result


def test_close_while_released_and_release_after_close() -> None:
    def body(group: Any) -> None:
        buffer = moecomm.Buffer(group, **HOST)
        buffer.release_memory()
        buffer.close()
        for call in CALLS:
            with pytest.raises(moecomm.Closed):
                getattr(buffer, call)()

    assert run_ranks(2, body) == [None] * 2


def test_one_thread_at_a_time() -> None:
    with moecomm.Buffer("self", **HOST) as buffer:
        refused: list[Exception] = []

        def other() -> None:
            try:
                buffer.restore()
            except moecomm.ConcurrentCall as error:
                refused.append(error)

        with _native.Call(buffer.rounds, 0):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert len(refused) == 1


def test_a_release_that_the_system_refuses_ends_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Any) -> None:
        buffer = moecomm.Buffer(group, **HOST)
        session: Any = buffer.rounds.session
        if group.rank == 1:
            session._window = _Refusing(session._window)
        with pytest.raises(moecomm.Unsupported, match="no holes"):
            buffer.release_memory()
        with pytest.raises(moecomm.Unsupported, match="no holes"):
            one_round(buffer)
        session._window = getattr(session._window, "real", session._window)
        buffer.close()

    assert run_ranks(2, body) == [None] * 2


class _Refusing:
    def __init__(self, real: _native.HostWindow) -> None:
        self.real, self.address, self.fd = real, real.address, real.fd

    def release(self, offset: int) -> int:
        raise OSError("no holes")


def test_windows_of_libraries_are_refused_by_name() -> None:
    registered = NcclWindow.__new__(NcclWindow)
    with pytest.raises(moecomm.Unsupported, match=r"kind 'nccl'.*backend 'lsa' with MOECOMM_WINDOW=vmm"):
        windows.releasable(registered)


def test_members_name_a_buffer() -> None:
    with moecomm.Buffer("self", **HOST) as buffer:
        assert buffer.rounds.members.number == 0
