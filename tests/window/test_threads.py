"""Windows of CPU ranks that are threads: memory, signals, barriers and errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import moecomm

from ..backends.conftest import all_ranks, run_ranks
from ..core.test_opening import left_behind
from ..live import shorten

HOST: dict[str, Any] = {"backend": "host", "timeout_s": 20.0}
RANKS = 3


def on_ranks(body: Callable[[moecomm.Window], Any], ranks: int = RANKS, nbytes: int = 4096, **given: Any) -> list[Any]:
    """Return what body(window) returned on each rank; raise the first error."""

    def run(group: Any) -> Any:
        with moecomm.Window(group, nbytes, **{**HOST, **given}) as window:
            return body(window)

    return all_ranks(ranks, run)


def expected(rank: int) -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).view(4, 6) + 100 * rank


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_reads_what_the_others_wrote(ranks: int) -> None:
    def body(window: moecomm.Window) -> bool:
        assert not window.local.any() and window.local.shape == (4096,) and window.local.dtype == torch.uint8
        window.tensor((4, 6), torch.float32, offset=512).copy_(expected(window.rank))
        window.barrier()
        for peer in range(window.num_ranks):
            theirs = window.tensor((4, 6), torch.float32, rank=peer, offset=512)
            assert torch.equal(theirs, expected(peer))
            assert torch.equal(window.peer(peer)[512:608].view(torch.float32).view(4, 6), expected(peer))
        window.barrier()
        return True

    assert all(on_ranks(body, ranks))


def test_puts_and_signals_arrive_in_order() -> None:
    """Each rank puts to all others many times; whoever sees a signal sees the bytes."""
    turns = 200

    def body(window: moecomm.Window) -> int:
        me, ranks, wrong = window.rank, window.num_ranks, 0
        for turn in range(turns):
            row = torch.full((64,), me * 1000 + turn, dtype=torch.int64)
            for peer in range(ranks):
                window.put(row, peer, offset=512 * me, signal=me)
            for peer in range(ranks):
                window.wait(peer, turn + 1, peer=peer)
                wrong += int((window.tensor((64,), torch.int64, offset=512 * peer) != peer * 1000 + turn).any())
            window.barrier()
        assert [window.signal_value(index) for index in range(ranks + 1)] == [turns] * ranks + [0]
        return wrong

    assert on_ranks(body) == [0] * RANKS


def test_signals_are_added_and_set() -> None:
    def body(window: moecomm.Window) -> None:
        for _ in range(50):
            window.signal(0, 255, 3)
        window.barrier()
        if window.rank == 0:
            assert window.signal_value(255) == 150 * window.num_ranks
        window.barrier()
        if window.rank == 1:
            window.set_signal(0, 255, 7)
            window.set_signal(0, 254, (1 << 63) - 1)
        if window.rank == 0:
            window.wait(254, (1 << 63) - 1)
            assert window.signal_value(255) == 7

    on_ranks(body)


def test_puts_take_any_tensor() -> None:
    def body(window: moecomm.Window) -> None:
        columns = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()
        window.put(columns, 0, offset=16)
        assert torch.equal(window.tensor((4, 3), torch.bfloat16, offset=16), columns)
        window.put(np.arange(5, dtype=np.int32), 0, offset=100)
        assert window.tensor((5,), torch.int32, offset=100).tolist() == [0, 1, 2, 3, 4]
        window.put(torch.tensor(True), 0, offset=4095)
        assert window.tensor((), torch.bool, offset=4095).item() is True
        window.put(torch.empty(0), 0, offset=4096)
        window.put(torch.ones(2, requires_grad=True), 0)
        assert not window.tensor((2,), torch.float32).requires_grad

    on_ranks(body, 1)


BAD: dict[str, tuple[Callable[[moecomm.Window], Any], str]] = {
    "rank": (lambda w: w.peer(1), "rank"),
    "rank below": (lambda w: w.signal(-1, 0), "rank"),
    "rank text": (lambda w: w.tensor((1,), torch.uint8, rank="0"), "rank"),
    "signal": (lambda w: w.signal(0, 256), "index"),
    "signal of put": (lambda w: w.put(torch.ones(1), 0, signal=-1), "signal"),
    "amount": (lambda w: w.signal(0, 0, -1), "amount"),
    "value": (lambda w: w.wait(0, 1.5), "value"),
    "value below": (lambda w: w.wait(0, -1), "value"),
    "value above": (lambda w: w.set_signal(0, 0, 1 << 63), "value"),
    "amount above": (lambda w: w.put(torch.ones(1), 0, signal=0, amount=1 << 63), "amount"),
    "peer": (lambda w: w.wait(0, 1, peer=3), "peer"),
    "shape": (lambda w: w.tensor((1025,), torch.float32), "shape"),
    "shape text": (lambda w: w.tensor("12", torch.uint8), "shape"),
    "shape below": (lambda w: w.tensor((-1,), torch.uint8), "shape"),
    "dtype": (lambda w: w.tensor((1,), "float"), "dtype"),
    "offset": (lambda w: w.tensor((1,), torch.float32, offset=2), "offset"),
    "offset of put": (lambda w: w.put(torch.ones(1), 0, offset=4096), "shape"),
    "source": (lambda w: w.put([1], 0), "source"),
    "source device": (lambda w: w.put(torch.ones(1, device="meta"), 0), "source"),
}


def test_bad_arguments_are_named_and_change_nothing() -> None:
    with moecomm.Window("self", 4096, **HOST) as window:
        for name, (call, argument) in BAD.items():
            with pytest.raises(moecomm.BadInput) as caught:
                call(window)
            assert caught.value.argument == argument, name
        window.barrier()
        assert not window.local.any() and not window.failed


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"nbytes": 4097}, moecomm.Mismatch, "nbytes"),
        ({"signals": 16}, moecomm.Mismatch, "signals"),
        ({"nbytes": 4096.5}, moecomm.BadInput, "nbytes"),
        ({"signals": "many"}, moecomm.BadInput, "signals"),
        ({"backend": "tcp"}, moecomm.BadInput, "backend"),
        ({"device": "nowhere"}, moecomm.BadInput, "device"),
        ({"backend": "lsa"}, moecomm.Unsupported, "lsa"),
    ],
)
def test_ranks_that_differ_raise_the_same_error(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    before = left_behind()

    def run(group: Any) -> None:
        asked: dict[str, Any] = {"nbytes": 4096, **HOST, **(given if group.rank == 1 else {})}
        moecomm.Window(group, **asked)

    found = run_ranks(RANKS, run)
    assert [type(error) for error in found] == [kind] * RANKS and all(text in str(error) for error in found), found
    del found
    gc.collect()
    assert left_behind() == before


@pytest.mark.parametrize(("nbytes", "signals"), [(0, 256), (1 << 50, 256), (4096, 0), (4096, 65537)])
def test_sizes_that_no_window_has(nbytes: int, signals: int) -> None:
    with pytest.raises(moecomm.BadInput):
        moecomm.Window("self", nbytes, signals=signals, **HOST)


def test_a_window_does_not_open_with_a_buffer() -> None:
    sizes = {"hidden": 64, "num_experts": 4, "topk": 1, "max_tokens": 8, "backend": "host", "timeout_s": 20.0}

    def run(group: Any) -> None:
        if group.rank == 0:
            moecomm.Buffer(group, **sizes)
        else:
            moecomm.Window(group, 4096, **HOST)

    assert [type(error) for error in run_ranks(2, run)] == [moecomm.Mismatch] * 2


def test_a_silent_rank_is_a_timeout_that_names_it() -> None:
    done = threading.Barrier(RANKS)

    def run(group: Any) -> Any:
        window = moecomm.Window(group, 64, **HOST)
        shorten(window, 0.3)
        try:
            if group.rank == 2:
                done.wait()
                return None
            with pytest.raises(moecomm.Timeout) as caught:
                window.barrier()
            done.wait()
            with pytest.raises(moecomm.Timeout):
                window.signal(0, 0)  # nothing more goes
            assert window.failed
            return caught.value
        finally:
            window.close()

    first, second, _ = run_ranks(RANKS, run)
    for rank, error in enumerate((first, second)):
        assert (error.rank, error.peer, error.op, error.phase) == (rank, 2, "barrier", "barrier"), error
    assert "gave up after 0.3 s" in str(first) + str(second)


def test_a_rank_that_gives_up_ends_the_waits_of_all() -> None:
    done = threading.Barrier(RANKS)

    def run(group: Any) -> Any:
        with moecomm.Window(group, 64, backend="host", timeout_s=0.2 if group.rank == 0 else 60.0) as window:
            if group.rank == 2:
                done.wait()
                return None
            with pytest.raises(moecomm.Timeout) as caught:
                window.barrier()
            done.wait()
            return caught.value.peer, str(caught.value)

    (first, text), (second, repeated), _ = run_ranks(RANKS, run)
    assert (first, second) == (2, 2) and "gave up after 0.2 s" in text
    assert "another rank timed out waiting for rank 2 (noticed by rank 1" in repeated


def test_a_signal_that_does_not_come_is_a_timeout() -> None:
    with moecomm.Window("self", 64, backend="host", timeout_s=0.2) as window:
        window.signal(0, 3, 2)
        with pytest.raises(moecomm.Timeout, match=r"signal 3 to reach 5, .* 2; gave up after 0\.2 s") as caught:
            window.wait(3, 5)
        assert (caught.value.peer, caught.value.op, caught.value.round) == (-1, "wait", 3)
        with pytest.raises(moecomm.Timeout):
            window.barrier()


def test_who_waits_for_a_rank_that_has_closed_is_told_at_once() -> None:
    def run(group: Any) -> Any:
        window = moecomm.Window(group, 64, **HOST)
        if group.rank == 0:
            window.signal(1, 5)  # still arrives
            window.close()
            return None
        window.wait(5, 1, peer=0)
        with pytest.raises(moecomm.PeerLost, match="rank 0 is gone") as caught:
            window.wait(5, 2, peer=0)
        window.close()
        return caught.value.peer

    assert run_ranks(2, run) == [None, 0]


def test_a_rank_may_close_while_others_are_in_the_same_barrier() -> None:
    """All have come, so nobody misses the rank that is first to leave."""
    for _ in range(30):
        assert on_ranks(lambda window: window.barrier(), 4) == [None] * 4


def test_abort_ends_the_waits_of_all_ranks() -> None:
    together = threading.Barrier(RANKS)

    def run(group: Any) -> Any:
        window = moecomm.Window(group, 64, **HOST)
        if group.rank == 0:
            window.abort()
        with pytest.raises(moecomm.Aborted) as caught:
            window.wait(0, 1)
        together.wait()  # a rank that has closed is lost, whatever it did before
        window.close()
        return caught.value.peer

    assert run_ranks(RANKS, run) == [0] * RANKS


def test_zero_has_come_already() -> None:
    """Even if the rank that is named has closed, and at once."""

    def run(group: Any) -> None:
        window = moecomm.Window(group, 64, **HOST)
        if group.rank == 0:
            window.wait(0, 0)
            window.barrier()
            with pytest.raises(moecomm.PeerLost, match="rank 1 is gone") as caught:
                window.barrier()
            assert caught.value.op == "barrier"
        else:
            window.barrier()
        window.close()

    assert run_ranks(2, run) == [None, None]
    with moecomm.Window("self", 64, backend="host", timeout_s=1e-6) as window:
        window.wait(0, 0, peer=0)


def test_a_message_about_values_says_how_large_they_may_be() -> None:
    with moecomm.Window("self", 64, **HOST) as window, pytest.raises(moecomm.BadInput, match=f"0 to {(1 << 63) - 1}"):
        window.wait(0, 1 << 63)


def test_abort_and_views_while_another_thread_closes() -> None:
    """The end of close() waits for them: they write to memory that it unmaps."""

    def closed_meanwhile(call: Callable[[moecomm.Window], Any], *, raises: bool) -> None:
        window = moecomm.Window("self", 64, **HOST)
        opened, closing = window._opened, threading.Thread(target=window.close)

        def bytes_while_closing(rank: int) -> torch.Tensor:
            begin()
            return bytes_of(rank)

        def begin(*cause: int) -> None:
            """Begin to close the Window, and see that it waits."""
            if not closing.is_alive() and not window.closed:
                closing.start()
                closing.join(0.1)
                assert closing.is_alive() and not opened.closed
            if cause:
                abort(*cause)

        bytes_of, abort = opened.bytes_of, opened.calls.abort
        opened.bytes_of, opened.calls.abort = bytes_while_closing, begin  # type: ignore[method-assign]
        call(window)
        closing.join()
        assert opened.closed
        if raises:
            with pytest.raises(moecomm.Closed):
                call(window)
        else:
            call(window)

    closed_meanwhile(moecomm.Window.abort, raises=False)
    closed_meanwhile(lambda window: window.local, raises=True)


def test_close_ends_a_wait_of_another_thread() -> None:
    window = moecomm.Window("self", 64, **HOST)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            window.wait(0, 1)
        except moecomm.MoecommError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while window.turn.running + window.turn.depth == 0:
        pass
    window.close()
    thread.join()
    assert [type(error) for error in found] == [moecomm.Aborted] and window.closed


def test_only_one_thread_is_in_a_barrier() -> None:
    def run(group: Any) -> None:
        with moecomm.Window(group, 64, **HOST) as window:
            if group.rank == 0:
                thread = threading.Thread(target=window.barrier)
                thread.start()
                while window.turn.running + window.turn.depth == 0:
                    pass
                with pytest.raises(moecomm.ConcurrentCall, match="this Window is in another call"):
                    window.barrier()
                window.signal(1, 0)  # other calls go on
                thread.join()
            else:
                window.wait(0, 1)
                window.barrier()

    assert run_ranks(2, run) == [None, None]


def test_after_close_tensors_stay_and_calls_do_not() -> None:
    def run(group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        window = moecomm.Window(group, 4096, **HOST)
        window.local.fill_(window.rank + 1)
        window.barrier()
        kept = window.local, window.peer(1 - window.rank)
        window.barrier()
        window.close()
        window.close()
        calls: list[Callable[[], Any]] = [
            window.barrier,
            window.check,
            lambda: window.local,
            lambda: window.peer(0),
            lambda: window.wait(0, 0),
            lambda: window.put(torch.ones(1), 0),
            lambda: window.handle,
        ]
        for call in calls:
            with pytest.raises(moecomm.Closed, match="this Window is closed"):
                call()
        return kept

    kept = run_ranks(2, run)
    gc.collect()
    for rank, (own, peer) in enumerate(kept):
        assert (own == rank + 1).all() and (peer == 2 - rank).all()


def test_nothing_is_left_when_all_is_gone() -> None:
    before = left_behind()
    windows = run_ranks(2, lambda group: moecomm.Window(group, 1 << 20, **HOST))
    reference = weakref.ref(windows[0])
    del windows
    gc.collect()
    assert reference() is None and left_behind() == before


def test_what_a_window_says_of_itself() -> None:
    with moecomm.Window("self", 100, **HOST) as window:
        assert (window.rank, window.num_ranks, window.nbytes, window.num_signals) == (0, 1, 100, 256)
        assert window.backend == "host" and window.device == torch.device("cpu") and window.timeout_s == 20.0
        assert "open" in repr(window) and "100 bytes" in repr(window)
        assert window.pointers.tolist() == [window.local.data_ptr()]
        assert len(window.handle) == 112 and window.handle_address != 0
    assert "closed" in repr(window)
