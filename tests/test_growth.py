"""Windows that grow by agreement ahead of a round that takes more than their reserve.

CPU ranks stand in for GPUs, whose peers map further memory late: they make the rounds at which ranks meet.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import moecomm
from moecomm import Placement
from moecomm.backends.host import HostSession
from moecomm.dispatch import growth
from moecomm.testing.cases import random_placement

from .backends.conftest import all_ranks, run_ranks
from .conftest import Ranks
from .few import few
from .little_room import agreeing_windows, fixed_windows
from .test_interrupts import interrupted
from .wide_rounds import Sent, random_rounds

pytestmark = pytest.mark.filterwarnings("ignore:a window of:UserWarning")
SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 7, "topk": 2, "max_tokens": 48, "device": "cpu", "timeout_s": 20}
WIDE, WIDER = (2000,), (6000,)


@pytest.fixture(autouse=True)
def agreeing() -> Iterator[None]:
    with agreeing_windows():
        yield


def opened(group: Any, **more: Any) -> moecomm.Buffer:
    return moecomm.Buffer(group, **{**SIZES, **more})


def dispatched(buffer: moecomm.Buffer, sent: Sent, **how: Any) -> Any:
    routed = buffer.dispatch(**sent.given(buffer.rank, buffer.device), **how)
    sent.check(routed)
    return routed


def wants(
    buffer: moecomm.Buffer, found: type[BaseException], sent: Sent, match: str | None = None, **how: Any
) -> BaseException:
    with pytest.raises(found, match=match) as caught:
        dispatched(buffer, sent, **how)
    return caught.value


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", few(range(20), 1, 2))
def test_random_widths_beside_kept_outputs(ranks: int, seed: int) -> None:
    def body(group: Any) -> bool:
        with opened(group, num_experts=4 + seed % 5) as buffer:
            before = buffer.nbytes
            random_rounds(buffer, seed, 24)
            return buffer.nbytes > before

    assert all(all_ranks(ranks, body))


@pytest.mark.parametrize("choice", ["token", "nearest", "balanced"])
@pytest.mark.parametrize("seed", few(range(12), 1))
def test_random_widths_beside_placements_that_change(choice: Any, seed: int) -> None:
    """With replicas, and slots that are empty on some ranks."""

    def placement(at: int) -> Placement:
        slots, held = 4, random_placement(at, ranks=3, num_experts=7, slots=4).experts
        return Placement(held, slots=slots, choice=choice)

    def body(group: Any) -> bool:
        with opened(group, placement=placement(seed)) as buffer:
            before = buffer.nbytes
            for at in range(3):
                random_rounds(buffer, 10 * seed + at, 8)
                buffer.set_placement(placement(seed + 100 * at))
            return buffer.nbytes > before

    assert all(all_ranks(3, body))


@pytest.mark.parametrize("keep", [1, 2, 4])
@pytest.mark.parametrize(
    ("hidden", "topk", "tokens", "width", "meets"),
    [(32, 2, 600, 7, 0), (32, 2, 600, 64, 3), (1024, 8, 256, 64, 0), (32, 1, 2000, 900, 3)],
)
def test_a_first_round_larger_than_the_window(
    hidden: int, topk: int, tokens: int, width: int, meets: int, keep: int
) -> None:
    """Later rounds of its kind are one round each."""

    def body(group: Any) -> None:
        sizes = {"hidden": hidden, "num_experts": 6 if topk < 6 else 12, "topk": topk, "max_tokens": tokens}
        with opened(group, **sizes) as buffer:
            sent, held = Sent(buffer, 3, (width,), tokens), []
            for at in range(keep + 3):
                rounds = buffer.rounds.flight.rounds
                held.append(dispatched(buffer, sent))
                assert buffer.rounds.flight.rounds - rounds == (1 + meets if at == 0 else 1)
                held = held[-keep:]
                for routed in held:
                    sent.check(routed)

    all_ranks(2, body)


class Known:
    """KnownCalls of a Buffer; `found`: whether each dispatch was one of them."""

    def __init__(self, buffer: moecomm.Buffer) -> None:
        self.found: list[bool] = []
        self._known = buffer.rounds.known_calls
        self.combine = self._known.combine
        buffer.rounds.known_calls = self  # type: ignore[assignment]

    def dispatch(self, *given: Any) -> Any:
        routed, is_over = self._known.dispatch(*given)
        self.found.append(routed is not None)
        return routed, is_over


def test_later_rounds_of_the_kind_are_native() -> None:
    def body(group: Any) -> list[bool]:
        with opened(group) as buffer:
            sent, known = Sent(buffer, 3, WIDE), Known(buffer)
            for _ in range(4):
                handle = dispatched(buffer, sent).handle
            for seed in range(3):
                again = sent.again(seed, WIDER)
                given = again.given(buffer.rank, buffer.device)
                again.check(buffer.dispatch(given["x"], handle=handle, extras=given["extras"]))
            return known.found

    assert all_ranks(2, body) == [[False, True, True, True, False, True, True]] * 2


def test_rooms_of_max_rows_that_all_ranks_name_alike() -> None:
    """Beside kept outputs, which differ by rank."""

    def body(group: Any) -> None:
        with opened(group, max_tokens=300, capacity_factor=0.5, num_experts=8) as buffer:
            kept = []
            for step in range(12):
                sent = Sent(buffer, step, (), 300)
                kept.append((sent, dispatched(buffer, sent, max_rows=300 * 2 * buffer.num_ranks)))
                kept = kept[-1 - 3 * buffer.rank :]
                for one, routed in kept:
                    one.check(routed)

    all_ranks(2, body)


def test_a_rank_alone_that_names_more_rows() -> None:
    """It finds room of its own, or raises on every rank: a Mismatch that says why."""

    def body(group: Any) -> str:
        with opened(group, max_tokens=300, num_experts=8, window_bytes=700_000) as buffer:
            sent, wide = Sent(buffer, 1, (4,), 300), Sent(buffer, 2, (900,), 10)
            rows = {"max_rows": 1200} if group.rank == 0 else {"max_rows": 1100}
            kept = dispatched(buffer, sent, **rows)
            rows = {"max_rows": 1200} if group.rank == 0 else {"max_rows": 40}
            error = wants(buffer, moecomm.Mismatch, wide, "needs a larger window", **rows)
            sent.check(kept)
            return str(error)

    first, second = all_ranks(2, body)
    assert first.startswith("call: this rank has dispatch that needs a larger window, rank 1 has dispatch;"), first
    assert second.startswith("call: this rank has dispatch, rank 0 has dispatch that needs a larger window;"), second


def test_memory_that_is_out_on_one_rank_is_told_on_all() -> None:
    """The Buffer stays usable, and grows when there is memory again."""
    out = [True]

    def body(group: Any) -> None:
        with opened(group) as buffer:
            window: Any = buffer.rounds.session.extensions._window
            take = window._take
            window._take = lambda *how: None if group.rank == 1 and out else take(*how)
            narrow, wide = Sent(buffer, 1, (3,)), Sent(buffer, 2, WIDE)
            kept = dispatched(buffer, narrow)
            for _ in range(2):
                error = wants(buffer, moecomm.BadInput, wide, "window_bytes")
                assert "open the Buffer with window_bytes=" in str(error)
                kept_too = dispatched(buffer, narrow)
            group.all_gather(b"")
            out.clear()
            for _ in range(3):
                wide.check(dispatched(buffer, wide))
            narrow.check(kept)
            narrow.check(kept_too)

    all_ranks(2, body)


def test_a_peer_that_cannot_map_it_is_told_on_all() -> None:
    def body(group: Any) -> None:
        with opened(group) as buffer:
            window: Any = buffer.rounds.session.extensions._window
            extent = window.extent
            window.extent = lambda rank: max(0, extent(rank) - (4096 if group.rank == 1 and rank == 0 else 0))
            wants(buffer, moecomm.BadInput, Sent(buffer, 2, WIDE), "window_bytes")
            window.extent = extent
            dispatched(buffer, Sent(buffer, 3, WIDE))

    all_ranks(2, body)


def test_windows_that_cannot_grow_say_how_to_open_them() -> None:
    with fixed_windows(), patch.object(HostSession, "agrees", False):

        def body(group: Any) -> None:
            with opened(group) as buffer:
                sent = Sent(buffer, 2, WIDE)
                nbytes = int(
                    str(wants(buffer, moecomm.BadInput, sent, "^window_bytes: ")).rpartition("window_bytes=")[2]
                )
            with opened(group, window_bytes=nbytes) as buffer:
                dispatched(buffer, sent)

        all_ranks(2, body)


def test_a_capture_cannot_grow() -> None:
    def body(group: Any) -> None:
        with opened(group) as buffer:
            session, sent = buffer.rounds.session, Sent(buffer, 2, WIDE)
            capturing = session.capturing
            session.capturing = lambda: True  # type: ignore[method-assign]
            buffer.rounds.memory._capturing = lambda: True
            wants(buffer, moecomm.BadInput, sent, "window_bytes")
            session.capturing = capturing  # type: ignore[method-assign]
            buffer.rounds.memory._capturing = capturing
            dispatched(buffer, sent)

    all_ranks(2, body)


def other_calls() -> dict[str, tuple[Callable[[moecomm.Buffer, Sent], Any], type[BaseException]]]:
    def fails_first(buffer: moecomm.Buffer, sent: Sent) -> None:
        given = sent.given(buffer.rank, buffer.device)
        with pytest.raises(moecomm.BadInput):
            buffer.dispatch(**{**given, "topk_idx": given["topk_idx"].float()})
        wants(buffer, moecomm.OutOfStep, sent)

    def narrow(buffer: moecomm.Buffer, sent: Sent) -> None:
        wants(buffer, moecomm.Mismatch, Sent(buffer, 9, ()))

    def aborts(buffer: moecomm.Buffer, sent: Sent) -> None:
        buffer.abort()
        wants(buffer, moecomm.Aborted, sent)

    return {
        "another dispatch": (narrow, moecomm.Mismatch),
        "an error of its own": (fails_first, moecomm.OutOfStep),
        "closes": (lambda buffer, _: buffer.close(), moecomm.PeerLost),
        "aborts": (aborts, moecomm.Aborted),
    }


@pytest.mark.parametrize("name", other_calls())
@pytest.mark.parametrize("meets", [0, 1, 2])
def test_a_rank_that_does_something_else(name: str, meets: int) -> None:
    """Ahead of the first meeting, of the second and of the third."""

    act, found = other_calls()[name]

    def body(group: Any) -> None:
        with opened(group, timeout_s=5) as buffer:
            wide = Sent(buffer, 2, WIDE)
            if group.rank == 1:
                left = [meets]

                def leave(rounds: Any) -> None:
                    if left[0] == 0:
                        raise KeyError("instead")
                    left[0] -= 1
                    meet(rounds)

                meet, rounds = growth._meet, buffer.rounds
                session = rounds.session
                grow = session.grow
                if meets:
                    session.grow = lambda n, m, r, _: grow(n, m, r, lambda: leave(rounds))  # type: ignore[method-assign]
                    with pytest.raises(KeyError):
                        dispatched(buffer, wide)
                    if name == "closes":
                        return
                    session.grow = grow  # type: ignore[method-assign]
                    error = wants(buffer, moecomm.MoecommError, wide)
                    assert isinstance(error, (moecomm.OutOfStep, moecomm.RoundFailed, moecomm.Mismatch))
                else:
                    act(buffer, wide)
            else:
                error = wants(buffer, moecomm.MoecommError, wide)
                assert isinstance(error, found if meets == 0 or name == "closes" else moecomm.OutOfStep), error
            if name == "closes":
                return
            with opened(group) as again:
                dispatched(again, wide)

    all_ranks(2, body)


def test_ctrl_c_between_meetings_ends_the_waits_of_all() -> None:
    def body(group: Any) -> BaseException | None:
        with opened(group, timeout_s=60) as buffer:
            wide = Sent(buffer, 2, WIDE)
            if group.rank == 0:
                return wants(buffer, moecomm.Aborted, wide)
            window: Any = buffer.rounds.session.extensions._window

            def interrupted(*_: Any) -> Any:
                raise KeyboardInterrupt

            window._take = interrupted
            return wants(buffer, KeyboardInterrupt, wide)

    found = run_ranks(2, body)
    assert isinstance(found[0], moecomm.Aborted) and isinstance(found[1], KeyboardInterrupt), found


@pytest.mark.parametrize("first", few(range(0, 41, 2), 12))
def test_ctrl_c_at_any_instruction_leaves_ranks_in_step_or_stops_all(first: int) -> None:
    def body(group: Any, number: int) -> str:
        with opened(group) as buffer:
            call, found = partial(dispatched, buffer, Sent(buffer, 2, WIDE)), "in step"
            try:
                if group.rank == 0:
                    call()
                elif not interrupted(call, number, begun=lambda: buffer.rounds.turn.running):
                    found = "over"
                call()
                dispatched(buffer, Sent(buffer, 3, WIDER))
            except moecomm.Aborted:
                return "stopped"
            return found

    number, seen = first, Counter[str]()
    while "over" not in (found := run_ranks(2, partial(body, number=number))):
        assert found in (["in step"] * 2, ["stopped"] * 2), (number, found)
        seen[found[0]] += 1
        number += 401
    assert seen["stopped"] > 5


def _is_killed(rank: int, group: Any, signal_number: int, meets: int, waits: bool) -> str:
    """Rank 1 gets a signal ahead of a meeting, or in it while rank 0 is late."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background without it
    meet, left = growth._meet, [meets]

    def met(rounds: Any) -> None:
        left[0] -= 1
        if left[0] == -1 and rank == 0 and waits:
            time.sleep(0.6)
        if left[0] == -1 and rank == 1:
            kill = (os.getpid(), signal_number)
            threading.Timer(0.2, os.kill, kill).start() if waits else os.kill(*kill)
        meet(rounds)

    with patch.object(growth, "_meet", met), opened(group, timeout_s=60) as buffer:
        began = time.monotonic()
        with pytest.raises((moecomm.RoundFailed, KeyboardInterrupt)) as caught:
            dispatched(buffer, Sent(buffer, 2, WIDE))
        assert time.monotonic() - began < 30
        return type(caught.value).__name__


@pytest.mark.parametrize("waits", [False, True], ids=["ahead", "in"])
@pytest.mark.parametrize("meets", [0, 1, 2])
def test_a_process_that_is_killed_while_windows_grow(ranks: Ranks, meets: int, waits: bool) -> None:
    ranks.start(2, _is_killed, signal.SIGKILL, meets, waits)
    assert ranks.results(1) == {0: "PeerLost"}


@pytest.mark.parametrize("waits", [False, True], ids=["ahead", "in"])
@pytest.mark.parametrize("meets", [0, 1, 2])
def test_a_process_that_gets_ctrl_c_while_windows_grow(ranks: Ranks, meets: int, waits: bool) -> None:
    assert ranks.run(2, _is_killed, signal.SIGINT, meets, waits) == ["Aborted", "KeyboardInterrupt"]


@pytest.mark.parametrize("meets", [0, 1, 2])
def test_a_rank_that_does_not_come_in_time(meets: int) -> None:
    meet, together = growth._meet, threading.Barrier(2)

    def body(group: Any) -> None:
        left = [meets]

        def met(rounds: Any) -> None:
            left[0] -= 1
            if left[0] == -1:
                together.wait()
            meet(rounds)

        with opened(group, timeout_s=0.3) as buffer:
            session, sent = buffer.rounds.session, Sent(buffer, 2, WIDE)
            grow = session.grow
            if group.rank == 1:
                late = lambda: met(buffer.rounds)  # noqa: E731
                session.grow = lambda n, m, r, _: grow(n, m, r, late)  # type: ignore[method-assign]
                wants(buffer, moecomm.RoundFailed, sent)
            else:
                wants(buffer, moecomm.Timeout, sent)
                together.wait()
        with opened(group) as again:
            dispatched(again, sent)

    all_ranks(2, body)


def test_sizes_that_rise_step_by_step_take_memory_in_few_growths() -> None:
    def body(group: Any) -> None:
        with opened(group) as buffer:
            dispatched(buffer, Sent(buffer, 0, (1000,)))
            before, rounds, steps = buffer.nbytes, buffer.rounds.flight.rounds, 24
            for width in range(1000, 1000 + 10 * steps, 10):
                dispatched(buffer, Sent(buffer, width, (width,)))
            assert buffer.nbytes <= 3 * before
            assert buffer.rounds.flight.rounds - rounds <= steps + 3

    all_ranks(2, body)


def test_growth_that_fails_again_and_again_takes_memory_once() -> None:
    """On the ranks that have some."""

    def body(group: Any) -> None:
        with opened(group) as buffer:
            window: Any = buffer.rounds.session.extensions._window
            take = window._take
            if group.rank == 1:
                window._take = lambda *how: None
            sizes = []
            for _ in range(5):
                wants(buffer, moecomm.BadInput, Sent(buffer, 2, WIDE), "window_bytes")
                sizes.append(buffer.nbytes)
            assert len(set(sizes)) == 1
            window._take = take
            dispatched(buffer, Sent(buffer, 2, WIDE))
            assert group.rank == 1 or buffer.nbytes == sizes[0]

    all_ranks(2, body)


def test_survivors_go_on_without_a_rank_that_left() -> None:
    """With on_timeout="mask": the call fails, later ones are made without that rank, in windows as they are."""

    def body(group: Any) -> None:
        buffer = opened(group, num_experts=6, on_timeout="mask", timeout_s=5)
        if group.rank == 2:
            buffer.close()
            return
        wide, narrow = Sent(buffer, 2, WIDE), Sent(buffer, 3, (3,))
        wants(buffer, moecomm.MoecommError, wide)
        wants(buffer, moecomm.BadInput, wide, "window_bytes")
        given = {**narrow.given(group.rank, buffer.device)}
        buffer.dispatch(**given)
        buffer.close()

    all_ranks(3, body)


def test_ranks_that_are_left_grow_after_shrink() -> None:
    def body(group: Any) -> None:
        buffer = opened(group, timeout_s=5)
        wide = Sent(buffer, 2, WIDE)
        if group.rank == 2:
            buffer.close()
            return
        wants(buffer, moecomm.PeerLost, wide)
        buffer.shrink()
        for step in range(3):
            sent = Sent(buffer, step, WIDE)
            sent.check(dispatched(buffer, sent))
        buffer.close()

    all_ranks(3, body)


def test_masked_ranks_come_back_to_windows_of_one_size() -> None:
    """Beside a masked rank no window grows by agreement.  When it is back all grow."""
    together = threading.Barrier(3)

    def body(group: Any) -> None:
        with opened(group, num_experts=6) as buffer:
            narrow, wide = (lambda seed: Sent(buffer, seed, (3,))), (lambda seed: Sent(buffer, seed, WIDE))
            dispatched(buffer, narrow(0))
            if group.rank < 2:
                buffer.mask([2])
                wants(buffer, moecomm.BadInput, wide(1), "window_bytes")
            together.wait()
            buffer.unmask([2])
            kept = [(sent, dispatched(buffer, sent)) for sent in map(wide, range(2, 6))]
            sent = Sent(buffer, 9, WIDER)
            kept.append((sent, dispatched(buffer, sent)))
            for one, routed in kept:
                one.check(routed)

    all_ranks(3, body)


@pytest.mark.parametrize("choice", ["token", "balanced"])
def test_a_masked_rank_whose_experts_have_replicas(choice: Any) -> None:
    """Memory that has grown before serves rounds beside a masked rank; ranks agree on more when it is back."""
    together = threading.Barrier(3)

    def body(group: Any) -> None:
        held = [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 0, 1]]
        with opened(group, num_experts=6, placement=Placement(held, choice=choice)) as buffer:

            def rounds(seed: int, widths: tuple[int, ...]) -> None:
                for at in range(3):
                    sent = Sent(buffer, seed + at, widths)
                    routed = dispatched(buffer, sent, layout="expert")
                    sent.check_sums(buffer, routed)
                    kept.append((sent, routed))
                for one, routed in kept:
                    one.check(routed)

            kept: list[tuple[Sent, Any]] = []
            rounds(1, WIDE)
            if group.rank < 2:
                buffer.mask([2])
                kept.clear()
                made = buffer.rounds.flight.rounds
                rounds(4, WIDE)
                assert buffer.rounds.flight.rounds - made == 6
                wants(buffer, moecomm.BadInput, Sent(buffer, 9, WIDER), "window_bytes")
            kept.clear()
            together.wait()
            buffer.unmask([2])
            rounds(20, WIDE)
            rounds(30, WIDER)

    all_ranks(3, body)


def test_memory_is_released_and_restored_with_what_was_added() -> None:
    def body(group: Any) -> None:
        with opened(group) as buffer:
            dispatched(buffer, Sent(buffer, 2, WIDE))
            buffer.release_memory()
            buffer.restore()
            kept = []
            for step, widths in enumerate((WIDE, (), WIDE, WIDER, WIDE)):
                sent = Sent(buffer, step, widths)
                kept.append((sent, dispatched(buffer, sent)))
            for sent, routed in kept:
                sent.check(routed)

    all_ranks(2, body)


@pytest.mark.parametrize("more", [{"verify_every": 1}, {"capacity_factor": 0.5}], ids=str)
def test_verified_rounds_and_chunks(more: dict[str, Any]) -> None:
    def body(group: Any) -> None:
        with opened(group, **more) as buffer:
            kept = []
            for step, widths in enumerate((WIDE, (3,), WIDE, WIDER)):
                sent = Sent(buffer, step, widths)
                if "capacity_factor" in more:
                    sent.ids = [torch.arange(2).expand(len(ids), 2) for ids in sent.ids]
                kept.append((sent, dispatched(buffer, sent, layout="expert")))
                for one, routed in kept:
                    one.check(routed)

    all_ranks(4, body)


def test_several_buffers_grow_each_for_itself() -> None:
    def body(group: Any) -> None:
        with opened(group) as one, opened(group, hidden=128) as other:
            for step, widths in enumerate(((), WIDE, WIDER, (3,))):
                mine, theirs = Sent(one, step, widths), Sent(other, step, widths[::-1])
                first, second = dispatched(one, mine), dispatched(other, theirs)
                mine.check(first)
                theirs.check(second)
            one.close()
            dispatched(other, Sent(other, 7, (9000,)))

    all_ranks(2, body)


def test_a_dispatch_in_halves_grows_ahead() -> None:
    def body(group: Any) -> None:
        with opened(group) as buffer:
            for step, widths in enumerate((WIDE, (), WIDER)):
                sent = Sent(buffer, step, widths)
                routed = buffer.dispatch_end(buffer.dispatch_begin(**sent.given(buffer.rank, buffer.device)))
                sent.check(routed)

    all_ranks(2, body)
