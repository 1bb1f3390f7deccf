"""Ctrl-C at any moment of a call: the next one is not refused, and no rank takes a call for another."""

from __future__ import annotations

import dis
import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops, overlap
from moecomm.rounds.call_count import CallCount, CountedCall
from moecomm.rounds.failures import is_interrupt

from .backends.conftest import all_ranks, run_ranks
from .conftest import Ranks
from .few import few

SIZES: dict[str, Any] = {
    "hidden": 64,
    "num_experts": 4,
    "topk": 2,
    "max_tokens": 8,
    "dtype": torch.float32,
    "backend": "host",
    "timeout_s": 20.0,
}
X, IDS = torch.arange(1.0, 5.0)[:, None].repeat(1, 64), torch.arange(8).view(4, 2) % 4
HANDLES = {code for name, code in dis.opmap.items() if name.startswith("CALL") or name in ("JUMP_BACKWARD", "RESUME")}
CATCHES = dis.opmap.get("PUSH_EXC_INFO")  # where a call has raised, and no handler runs
PACKAGE = str(Path(moecomm.__file__).parent)


def step(buffer: moecomm.Buffer) -> None:
    routed = buffer.dispatch(X, IDS)
    assert torch.equal(buffer.combine(routed.x, routed.handle), 2 * X)


def interrupted(
    call: Callable[[], object],
    number: int,
    then: Callable[[], object] = lambda: None,
    begun: Callable[[], bool] = lambda: True,
    anywhere: bool = True,
) -> bool:
    """Make a call that Ctrl-C interrupts at the instruction of moecomm with this number.  True: there is such a one.

    Garbage of other tests waits until the call is over: an interrupt would be lost in a finalizer that collects it.

    Args:
        call: to make.
        number: of the instruction, from the first on at which `begun`.
        then: called while the interrupt is being handled, whose traceback refers to the frames of the call.
        begun: the call has.
        anywhere: at any instruction.  False: only behind those at which the interpreter runs handlers, because locks of
            Python stay taken where a block has been entered or left and its context has not.
    """
    before, left, counts, last = sys.gettrace(), number, False, dict[FrameType, int]()

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal left, counts
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        counts = counts or begun()
        if event == "opcode":
            before_it, last[frame] = last.get(frame), frame.f_code.co_code[frame.f_lasti]
            handles = anywhere or (before_it in HANDLES and last[frame] != CATCHES)
            if counts and handles:
                if left == 0:
                    sys.settrace(before)
                    raise KeyboardInterrupt
                left -= 1
        return trace

    collects = gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        then()
        return True
    finally:
        sys.settrace(before)
        last.clear()  # frames refer to `trace`: no cycle may keep what they hold
        if collects:
            gc.enable()
    return False


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 16, 64), torch.zeros(4, 64, 8)


CALLS: dict[str, Callable[[moecomm.Buffer], Callable[[], object]]] = {
    "dispatch": lambda buffer: partial(buffer.dispatch, X, IDS),
    "check": lambda buffer: buffer.check,
    "ops.dispatch": lambda buffer: partial(ops.dispatch, buffer, X, IDS),
    "moe": lambda buffer: partial(buffer.moe, X, IDS, None, *weights()),
    "ops.moe": lambda buffer: partial(ops.moe, buffer, X, IDS, torch.ones(4, 2), *weights()),
    "mask": lambda buffer: partial(buffer.mask, ()),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_next_call_is_not_refused_after_an_interrupt_at_any_instruction(name: str) -> None:
    buffer = moecomm.Buffer("self", **SIZES, on_timeout="mask")
    CALLS[name](buffer)()
    number, seen = 0, 0
    while interrupted(CALLS[name](buffer), number, buffer.check):
        seen += 1
        step(buffer)
        number += 1 if number < 400 else 13
    assert seen > 50
    turn = buffer.rounds.turn
    assert not turn.running and turn.depth == 0
    buffer.close()
    assert buffer.closed


def test_a_call_of_several_buffers_is_counted_after_an_interrupt_at_any_instruction_before_its_round() -> None:
    calls, number, seen = CallCount(), 0, Counter[str]()
    with moecomm.Buffer("self", **SIZES) as buffer:
        calls.add(buffer.rounds)
        turn = buffer.rounds.turn

        def call() -> None:
            with CountedCall(calls):
                buffer.dispatch(X, IDS)

        def counts() -> tuple[int, int]:
            buffer.check()  # counts calls that are yet to be
            return turn.made, turn.failed

        call()  # a first one, which makes a plan
        before = counts()
        while interrupted(call, number):
            assert not turn.running and turn.depth == calls.turn.running == 0
            made, failed = (now - then for now, then in zip(counts(), before, strict=True))
            assert (made, failed) in ((0, 0), (0, 1), (1, 0)), number
            seen["made" if made else "counted" if failed else "not begun"] += 1
            before = counts()
            number += 1
    assert seen["made"] > 10 and seen["counted"] > 10 and seen["not begun"] < 120, seen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the end of rounds that nobody got
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="a handler may run between a lock and its block")
def test_shrink_can_be_repeated_after_an_interrupt_at_any_instruction() -> None:
    number = 0
    with moecomm.Buffer("self", **SIZES) as buffer:
        while interrupted(buffer.shrink, number, anywhere=False):
            turn = buffer.rounds.turn
            assert not turn.running and turn.depth == 0
            buffer.shrink()
            number += 1
        step(buffer)
    assert number > 200


def test_close_gives_the_memory_back_after_an_interrupt_at_any_instruction_of_it() -> None:
    number = 0
    while True:
        buffer = moecomm.Buffer("self", **SIZES)
        was = interrupted(buffer.close, number)
        buffer.close()
        assert buffer.closed and buffer.rounds.session.owner is None
        if not was:
            break
        number += 1
    assert number > 50


@pytest.mark.parametrize("first", [False, True])
def test_ranks_stay_in_step_or_all_of_them_are_stopped(first: bool) -> None:
    """An interrupt before the round of a call of rank 1, or after it: no round is taken for that of another call.

    Before a call has begun, there is none that could be missed.
    """
    seen: Counter[str] = Counter()

    def body(group: Any, number: int) -> str:
        with moecomm.Buffer(group, **SIZES) as buffer:
            found, dispatch = "in step", partial(buffer.dispatch, X, IDS)
            try:
                if not first:
                    step(buffer)
                if group.rank == 0:
                    dispatch()
                elif not interrupted(dispatch, number, begun=lambda: buffer.rounds.turn.running):
                    found = "over"
                routed = buffer.dispatch(2 * X, IDS)
            except moecomm.Aborted:
                return "stopped"
            assert torch.equal(buffer.combine(routed.x, routed.handle), 4 * X)
            return found

    number, stride = 0, 37 if first else 1
    while "over" not in (found := run_ranks(2, partial(body, number=number))) or stride > 1:
        if "over" in found:  # the last instructions, behind the round, are taken one by one
            number, stride = number - stride, 1
        else:
            assert found in (["in step"] * 2, ["stopped"] * 2), number
            seen[found[0]] += 1
        number += stride
    assert seen["in step"] > 0 and seen["stopped"] > 0


ONES, SAME = torch.ones(8, 64), torch.tensor([[0, 1]] * 8)  # rank 0 has no room for rows of all these in one round
QUANTIZED: dict[str, Any] = {"quantize": "nvfp4", "extras": [torch.ones(8, 1)], "expert_alignment": 4}


def combine(buffer: moecomm.Buffer) -> Callable[[], object]:
    routed = buffer.dispatch(ONES, SAME)
    return partial(buffer.combine, routed.x, routed.handle)


def again(buffer: moecomm.Buffer) -> Callable[[], object]:
    return partial(buffer.dispatch, ONES, handle=buffer.dispatch(ONES, SAME).handle)


def ops_combine(buffer: moecomm.Buffer) -> Callable[[], object]:
    routed = ops.dispatch(buffer, ONES, SAME)
    return partial(ops.combine, routed.x, routed.handle)


def backward(buffer: moecomm.Buffer) -> Callable[[], object]:
    """Return the backward pass of a layer, which is one call."""
    mine = (w[:2].requires_grad_() for w in weights())
    out = ops.moe(buffer, ONES.clone().requires_grad_(), SAME, torch.ones(8, 2), *mine)
    return partial(out.backward, torch.ones_like(out), retain_graph=True)


Prepared = Callable[[moecomm.Buffer], Callable[[], object]]
SINGLE: dict[str, Prepared] = {
    "dispatch": lambda buffer: partial(buffer.dispatch, X, IDS),
    "moe": lambda buffer: partial(buffer.moe, X, IDS, None, *(w[:2] for w in weights())),
    "ops.moe": lambda buffer: partial(ops.moe, buffer, X, IDS, torch.ones(4, 2), *(w[:2] for w in weights())),
    "begin": lambda buffer: lambda: buffer.dispatch_end(buffer.dispatch_begin(X, IDS)),
}
CHUNKS: dict[str, Prepared] = {
    "dispatch": lambda buffer: partial(buffer.dispatch, ONES, SAME),
    "overflow": lambda buffer: partial(buffer.dispatch, ONES, SAME, overflow="chunks"),
    "quantized": lambda buffer: partial(buffer.dispatch, ONES, SAME, **QUANTIZED),
    "again": again,
    "combine": combine,
    "moe": lambda buffer: partial(buffer.moe, ONES, SAME, None, *(w[:2] for w in weights()), overflow="chunks"),
    "ops.dispatch": lambda buffer: partial(ops.dispatch, buffer, ONES, SAME),
    "ops.combine": ops_combine,
    "backward": backward,
}


def end(buffer: moecomm.Buffer) -> Callable[[], object]:
    return partial(buffer.dispatch_end, buffer.dispatch_begin(X, IDS))


def _stops_others(prepare: Prepared, ranks: int, since: str, **sizes: Any) -> int:
    """Interrupt a call of rank 1, which makes no further round, nor waits another rank for one.  Then all ranks go on.

    Args:
        prepare: returns the call.
        ranks: so many.
        since: "call" or "round": instructions are tried from its begin on, or from the end of its first round; "first":
            likewise, of the first call of a Buffer; "several": from where it says that others wait for the rest of it.
        sizes: more of the Buffer.

    Returns:
        how many calls of rank 0 were stopped.
    """
    stopped, there, met = 0, dict[int, bool](), threading.Barrier(ranks, timeout=30)

    def body(group: Any) -> None:
        nonlocal stopped
        with moecomm.Buffer(group, **SIZES, **{"capacity_factor": 1.0, **sizes}) as buffer:
            number, was = 0, True
            while was:
                if since != "first":
                    prepare(buffer)()  # makes plans
                call, turn = prepare(buffer), buffer.rounds.turn
                made = turn.made
                met.wait()
                begin = time.monotonic()
                if group.rank == 1:
                    told = {"call": lambda: turn.running + turn.depth > 0, "several": lambda: turn.several}  # noqa: B023
                    begun = told.get(since, lambda: turn.made > made)  # noqa: B023
                    there[number] = interrupted(call, number, begun=begun)
                else:
                    try:
                        call()
                    except moecomm.Aborted:
                        stopped += group.rank == 0
                assert buffer.shrink().lost == (), number
                assert time.monotonic() - begin < SIZES["timeout_s"] / 2, number
                met.wait()
                was = there[number]
                number += 1 + number // 16

    all_ranks(ranks, body)
    return stopped


@pytest.mark.parametrize("name", SINGLE)
def test_an_interrupt_in_no_wait_stops_the_other_rank_at_once(name: str) -> None:
    assert _stops_others(SINGLE[name], 2, "call") > 20


@pytest.mark.parametrize("since", ["call", "round", "first"])
@pytest.mark.parametrize("name", CHUNKS)
def test_an_interrupt_between_rounds_of_chunks_stops_the_other_ranks_at_once(name: str, since: str) -> None:
    assert _stops_others(CHUNKS[name], 3 if name == "overflow" else 2, since) > 20


def test_an_interrupt_in_dispatch_end_stops_ranks_for_which_this_one_forwards_rows() -> None:
    assert _stops_others(end, 4, "several", domain_ranks=2, capacity_factor=4.0) > 10


def test_an_interrupt_while_an_error_is_handled_stops_the_other_rank_at_once() -> None:
    """A call fails on rank 1 alone, where rank 0 waits in its round: an interrupt takes the place of the error."""
    there, met = dict[int, bool](), threading.Barrier(2, timeout=30)

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES) as buffer:
            number, was = 0, True
            while was:
                call = partial(buffer.dispatch, X, IDS[:3] if group.rank == 1 else IDS)
                met.wait()
                begin = time.monotonic()
                if group.rank == 1:
                    with suppress(moecomm.BadInput):
                        interrupted(call, number, begun=lambda: sys.exc_info()[0] is moecomm.BadInput)
                    there[number] = isinstance(buffer.rounds.failure(), moecomm.Aborted)
                    if not there[number]:  # the call was over
                        with suppress(moecomm.OutOfStep):
                            buffer.dispatch(X, IDS)
                else:
                    with suppress(moecomm.Aborted, moecomm.OutOfStep):
                        call()
                assert buffer.shrink().lost == (), number
                assert time.monotonic() - begin < SIZES["timeout_s"] / 2, number
                met.wait()
                was = there[number]
                number += 1

    all_ranks(2, body)
    assert len(there) > 50


def test_an_interrupt_in_dispatch_begin_stops_all_ranks() -> None:
    """Its caller can't end a dispatch that he has not got.  One that comes when the call is over is his own."""
    there, met, lost = dict[int, bool](), threading.Barrier(2, timeout=30), list[int]()

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **SIZES) as buffer:
            number, was = 0, True
            while was:
                met.wait()
                if group.rank == 1:
                    begin, begun = partial(buffer.dispatch_begin, X, IDS), lambda: buffer.rounds.turn.running > 0
                    was = there[number] = interrupted(begin, number, begun=begun, anywhere=False)
                    if was and buffer.rounds.begun is not None and buffer.rounds.failure() is None:
                        lost.append(number)
                else:
                    with suppress(moecomm.Aborted):
                        buffer.dispatch_begin(X, IDS)
                assert buffer.shrink().lost == ()
                met.wait()
                was, number = there[number], number + 1

    all_ranks(2, body)
    assert len(there) > 100 and min(lost, default=len(there)) >= len(there) - 3


def _refused() -> None:
    raise ValueError("a wrong argument")


def test_errors_of_signal_handlers_are_told_from_those_of_calls() -> None:
    def handle(_number: int, _frame: Any) -> None:
        _refused()

    def error_of(call: Callable[[], object]) -> BaseException:
        try:
            call()
        except ValueError as error:
            return error
        raise AssertionError("no error")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert is_interrupt(error_of(partial(signal.raise_signal, signal.SIGUSR1)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_interrupt(KeyboardInterrupt()) and is_interrupt(SystemExit())
    assert not is_interrupt(error_of(_refused))


def test_a_workspace_of_one_rank_goes_on_after_an_interrupt_at_any_instruction() -> None:
    x, w, number = torch.ones(4, 8).bfloat16(), torch.ones(4, 8).bfloat16(), 0
    with overlap.Workspace("self", 1 << 16, backend="host") as workspace:
        call = partial(overlap.matmul_all_reduce, x, w, workspace=workspace)
        right = call()
        while interrupted(call, number):
            assert torch.equal(call(), right)
            number += 3
    assert number > 300


def test_an_interrupt_in_a_round_of_a_workspace_stops_the_other_rank_at_once() -> None:
    """After the round both ranks go on."""
    found, there = Counter[str](), dict[int, bool]()
    met = threading.Barrier(2, timeout=30)
    x, w = torch.ones(4, 8).bfloat16(), torch.ones(4, 8).bfloat16()

    def body(group: Any) -> None:
        number, was = 0, True
        while was:
            with overlap.Workspace(group, 1 << 16, backend="host", timeout_s=20.0) as workspace:
                call = partial(overlap.matmul_all_reduce, x, w, workspace=workspace)
                right, turn = call(), workspace.turn
                met.wait()
                if group.rank == 1:
                    was = there[number] = interrupted(call, number, begun=lambda: turn.running + turn.depth > 0)  # noqa: B023
                else:
                    with suppress(moecomm.Aborted):
                        call()
                met.wait()
                was, number = there[number], number + 3
                try:
                    assert torch.equal(call(), right)
                    found["went on"] += 1
                except moecomm.Aborted:
                    found["stopped"] += 1
                met.wait()

    all_ranks(2, body)
    assert found["stopped"] > 50 and found["went on"] > 4


CALLS_OF_WINDOWS: dict[str, Callable[[moecomm.Window], object]] = {
    "barrier": moecomm.Window.barrier,
    "put": lambda window: window.put(torch.ones(4), 0, signal=0),
    "wait": lambda window: window.wait(0, 0),
    "check": moecomm.Window.check,
    "local": lambda window: window.local,
}


@pytest.mark.parametrize("name", CALLS_OF_WINDOWS)
def test_a_window_refuses_no_call_after_an_interrupt_at_any_instruction(name: str) -> None:
    number, was = 0, True
    while was:
        with moecomm.Window("self", 64, backend="host") as window:
            was = interrupted(partial(CALLS_OF_WINDOWS[name], window), number)
            number += 1
            assert window.turn.running == window.turn.depth == 0
            window.barrier()
        assert window.closed and window._opened.closed
    assert number > 10


def test_close_of_a_window_gives_the_memory_back_after_an_interrupt_at_any_instruction_of_it() -> None:
    number, was = 0, True
    while was:
        window = moecomm.Window("self", 64, backend="host")
        was = interrupted(window.close, number)
        window.close()
        assert window._opened.closed and window.turn.running == window.turn.depth == 0
        number += 1
    assert number > 20


def test_an_interrupt_in_a_barrier_stops_the_other_rank_at_once() -> None:
    """Before the barrier or in it.  After it both ranks go on."""
    found, there = Counter[str](), dict[int, bool]()
    met = threading.Barrier(2, timeout=30)

    def body(group: Any) -> None:
        number, was = 0, True
        while was:
            with moecomm.Window(group, 64, backend="host", timeout_s=20.0) as window:
                met.wait()
                begun = lambda: window.turn.depth > 0  # noqa: E731
                if group.rank == 1:
                    was = there[number] = interrupted(window.barrier, number, begun=begun)
                else:
                    with suppress(moecomm.Aborted):
                        window.barrier()
                met.wait()
                was, number = there[number], number + 1
                try:
                    window.barrier()
                    found["went on"] += 1
                except moecomm.Aborted:
                    found["stopped"] += 1
                met.wait()

    all_ranks(2, body)
    assert found["stopped"] > 10 and found["went on"] > 2


def test_old_rounds_end_without_python_code_which_would_lose_an_interrupt() -> None:
    folders, ran = (PACKAGE, weakref.__file__, str(Path(weakref.__file__).with_name("_weakrefset.py"))), list[str]()

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            ran.append(frame.f_code.co_qualname)

    with moecomm.Buffer("self", **SIZES) as buffer:
        step(buffer)
        held, there = [buffer.rounds], weakref.ref(buffer.rounds)
        buffer.shrink()
        gc.collect()
        assert there() is held[0]
        sys.setprofile(profile)
        try:
            held.clear()
            gc.collect()
        finally:
            sys.setprofile(None)
        assert there() is None and ran == []


@contextmanager
def ctrl_c_in(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block after this time, and never behind it."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupts(rank: int, group: Any, count: int) -> Counter[str]:
    """Interrupt calls of a Buffer at random.  Ranks that have failed, or are out of step, shrink."""

    def handle(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    def lost(_error: object) -> None:
        """An interrupt in the callback of a weak reference of another library, say, is raised nowhere: it comes again.

        Else this rank goes on with rounds while the other one waits in shrink() for it, until one of them gives up.
        """
        seen["lost"] += 1
        signal.setitimer(signal.ITIMER_REAL, 1e-4)

    signal.signal(signal.SIGALRM, handle)
    sys.unraisablehook = lost
    draw, seen = random.Random(rank), Counter[str]()
    buffer = moecomm.Buffer(group, **SIZES)
    for _ in range(count):
        with suppress(KeyboardInterrupt):  # one that comes behind its block
            try:
                with ctrl_c_in(draw.uniform(1e-5, 1e-3)):
                    while True:
                        step(buffer)
            except KeyboardInterrupt:
                seen["interrupts"] += 1
            except moecomm.MoecommError as error:
                seen[type(error).__name__] += 1
        turn = buffer.rounds.turn
        assert not turn.running and turn.depth == 0
        if buffer.num_ranks > 1:
            buffer.shrink()
        else:
            with suppress(moecomm.Aborted):
                buffer.check()
            if buffer.failed:
                buffer.shrink()
    step(buffer)
    buffer.close()
    return seen


@pytest.mark.timeout(1860)
@pytest.mark.parametrize(("size", "count"), few([(1, 300), (2, 150), (1, 80_000), (2, 12_000)], (1, 300)))
def test_no_interrupt_leaves_the_turn_taken(ranks: Ranks, size: int, count: int) -> None:
    ranks.start(size, _interrupts, count)
    found = ranks.results(size, timeout_s=60 if count < 1000 else 1800)
    assert sum(seen["interrupts"] for seen in found.values()) > count // 2
    assert all(seen["ConcurrentCall"] == 0 for seen in found.values())
