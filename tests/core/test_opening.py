"""Opening a Buffer ends in success on all ranks or in a named error on all ranks, in time, with nothing left behind."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm import _native
from moecomm.ranks import opening as opening_module
from moecomm.ranks.board import Part, StoreBoard
from moecomm.ranks.collective import close_descriptors
from moecomm.ranks.opening import gather, opening
from moecomm.ranks.pages import _KEPT, PAGE_BYTES, Pages
from moecomm.ranks.rendezvous import LocalRank, local_ranks, rendezvous

from ..backends.conftest import run_ranks
from ..conftest import Ranks
from ..few import few
from ..fresh_python import run_python
from ..live import FAR_S, ROOM_S

SIZES: dict[str, Any] = {"hidden": 128, "num_experts": 12, "topk": 3, "max_tokens": 32, "backend": "host"}
TIMEOUT_S = 2.0


def left_behind() -> tuple[list[str], int, int]:
    """List what an opening could leave in this process: descriptors (a Watcher's thread has one), threads, windows."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one that lists them
            continue
    windows = Path("/proc/self/maps").read_text().count("memfd:moecomm")
    ours = sorted(target for target in targets if any(kind in target for kind in ("memfd:", "pidfd", "eventfd")))
    return ours, threading.active_count(), windows


def attempt(group: Any, settings: dict[str, Any]) -> tuple[str, str, int | None, float]:
    """(name of the error or "open", its text, the rank it is about, seconds); an error leaves nothing behind."""
    before, start = left_behind(), time.monotonic()
    try:
        buffer = moecomm.Buffer(group, **{**SIZES, "timeout_s": TIMEOUT_S, **settings})
    except moecomm.MoecommError as error:
        took = time.monotonic() - start
        peer = error.peer if isinstance(error, moecomm.RoundFailed) else getattr(error, "rank", None)
        found = type(error).__name__, str(error), peer, took
    else:
        buffer.close()
        return "open", "", None, time.monotonic() - start
    assert left_behind() == before
    return found


def absent(rank: int, group: Any) -> tuple[Any, Any]:
    """Rank 2 comes when the others have given up, and then they call again; so do all."""
    first = None
    if rank != 2:
        first = attempt(group, {})
    group.barrier().wait()
    return first, [attempt(group, {"timeout_s": FAR_S})[0] for _ in range(2)]


def test_an_absent_rank_is_a_timeout_for_the_others_and_meets_them_in_the_next_opening(ranks: Ranks) -> None:
    for rank, (first, again) in enumerate(ranks.run(4, absent)):
        assert again == ["open", "open"]
        if rank == 2:
            continue
        name, text, peer, seconds = first
        assert (name, peer) == ("Timeout", 2), (rank, first)
        assert "for rank 2, which has not begun to open its Buffer" in text and seconds < ROOM_S


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "hidden": ({"hidden": -1}, "Mismatch", "hidden"),
    "hidden text": ({"hidden": "many"}, "BadInput", "hidden"),
    "topk": ({"topk": 0}, "Mismatch", "topk"),
    "num_experts": ({"num_experts": 13}, "Mismatch", "num_experts"),
    "dtype": ({"dtype": torch.int8}, "Mismatch", "dtype"),
    "max_tokens": ({"max_tokens": 2.5}, "BadInput", "max_tokens"),
    "backend": ({"backend": "tcp"}, "BadInput", "backend"),
    "device": ({"device": "nowhere"}, "BadInput", "device"),
    "timeout_s": ({"timeout_s": -1}, "BadInput", "timeout_s"),
    "timeout_s text": ({"timeout_s": "soon"}, "BadInput", "timeout_s"),
    "window_bytes": ({"window_bytes": 1 << 70}, "BadInput", "window_bytes"),
    "wire": ({"wire": "exact"}, "Mismatch", "wire"),
    "wire fp8": ({"wire": "fp8"}, "Mismatch", "wire"),
    "wire text": ({"wire": "int4"}, "BadInput", "wire"),
    "unsupported": ({"backend": "lsa"}, "Unsupported", "backend 'lsa' can't run here"),
}


def all_bad(rank: int, group: Any) -> dict[str, Any]:
    found = {name: attempt(group, bad if rank == 1 else {"timeout_s": FAR_S}) for name, (bad, _, _) in BAD.items()}
    return {**found, "good": attempt(group, {"timeout_s": FAR_S})}


def test_a_bad_argument_of_one_rank_is_named_by_all_at_once(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(4, all_bad)):
        assert found.pop("good")[0] == "open"
        for name, (kind, text, about, seconds) in found.items():
            assert (kind, BAD[name][2] in text, seconds < ROOM_S) == (BAD[name][1], True, True), (
                rank,
                name,
                kind,
                text,
            )
            if kind == "BadInput" and rank != 1:
                assert about == 1 and "(rank 1)" in text


def with_a_bad_group(rank: int, group: Any) -> tuple[Any, ...]:
    """Rank 1 of four passes what is no group; then all do; and ranks 1 and 2 have a group of their own."""
    sub = dist.new_group([1, 2])
    found = []
    for bad in ("world", None, 7, object()):
        found.append(attempt(bad if rank == 1 else group, {"timeout_s": FAR_S}))
        group.barrier().wait()
    good = attempt(group, {"timeout_s": FAR_S})
    if rank in (1, 2):
        found.append(attempt("world" if rank == 1 else sub, {"timeout_s": FAR_S}))
    group.barrier().wait()
    all_bad = attempt("world", {})
    if rank == 1:
        time.sleep(0.3)  # the others look for it meanwhile
    again = attempt(group, {"timeout_s": FAR_S})
    return found, good, all_bad, again


def test_a_bad_group_of_one_rank_is_named_by_all_at_once(ranks: Ranks) -> None:
    with pytest.raises(moecomm.BadInput, match="group"):
        moecomm.Buffer("world", **SIZES)  # nobody waits for this process, and its forks know nothing of it
    for rank, (found, good, all_bad, again) in enumerate(ranks.run(4, with_a_bad_group)):
        for kind, text, about, seconds in found:
            assert kind == "BadInput" and text.startswith("group") and seconds < ROOM_S, (rank, found)
            if rank != 1:
                assert "(rank 1)" in text or "(rank 0)" in text
                assert about in (0, 1)
        assert (good[0], all_bad[0], again[0]) == ("open", "BadInput", "open"), (rank, good, all_bad, again)


def with_a_late_answer(rank: int, group: Any) -> list[tuple[Any, ...]]:
    """Rank 1 passes what is no group, twice; the store answers rank 0 too late when it takes the first notice down."""
    replace = StoreBoard.replace

    def late(self: StoreBoard, key: str, old: bytes, new: bytes) -> bool:
        replace(self, key, old, new)
        StoreBoard.replace = replace  # type: ignore[method-assign]
        raise TimeoutError

    if rank == 0:
        StoreBoard.replace = late  # type: ignore[method-assign]
    found = []
    for _ in range(2):
        found.append(attempt("world" if rank == 1 else group, {"timeout_s": FAR_S}))
        group.barrier().wait()
    return [*found, attempt(group, {"timeout_s": FAR_S})]


def test_a_notice_that_is_taken_down_too_late_is_not_lost(ranks: Ranks) -> None:
    for found in ranks.run(2, with_a_late_answer):
        assert [kind for kind, *_ in found] == ["BadInput", "BadInput", "open"]
        assert all(seconds < ROOM_S for *_, seconds in found)


def killed(rank: int, group: Any, after_s: float, victim: int) -> Any:
    group.barrier().wait()
    if rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for _ in range(1000):
            moecomm.Buffer(group, **SIZES, timeout_s=FAR_S).close()
        return None
    start = time.monotonic()
    while (found := attempt(group, {"timeout_s": TIMEOUT_S}))[0] == "open":
        assert time.monotonic() - start < ROOM_S
    return found


@pytest.mark.long
def test_a_rank_killed_at_any_moment_of_its_openings(ranks: Ranks) -> None:
    draw = random.Random(0)
    for _ in range(6):
        victim = draw.randrange(4)
        ranks.start(4, killed, draw.uniform(0, 0.2), victim)
        for rank, found in ranks.results(3).items():
            assert not isinstance(found, BaseException), found
            name, _, peer, seconds = found
            assert rank != victim and name in ("PeerLost", "Timeout") and peer == victim, (victim, found)
            assert seconds < ROOM_S


def group_of_a_tcp_store(rank: int, ranks: int, port_file: str) -> dist.ProcessGroup:
    """A group whose store is served by rank 0, on the loopback interface."""
    port = Path(port_file)
    if rank == 0:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            number = listener.getsockname()[1]
            store = dist.TCPStore(
                "127.0.0.1", number, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        port.with_suffix(".new").write_text(str(number))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    return dist.ProcessGroup(dist.PrefixStore("other", store), rank, ranks)


def without_descriptors(rank: int, barrier: Any, port_file: str, spare: int) -> Any:
    group = group_of_a_tcp_store(rank, 3, port_file)
    attempt(group, {"timeout_s": FAR_S})  # torch opens some at the first use
    if rank == 1:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, limits[1]))
        for fd in held[:spare]:
            os.close(fd)
    barrier.barrier().wait()
    found = attempt_without_proc(group) if rank == 1 else attempt(group, {"timeout_s": FAR_S})
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    barrier.barrier().wait()
    again = attempt(group, {"timeout_s": FAR_S})
    barrier.barrier().wait()  # rank 0 has the store
    return found, again


def attempt_without_proc(group: Any) -> tuple[str, str, int | None, float]:
    """attempt() without looking into /proc, which takes descriptors."""
    start = time.monotonic()
    try:
        moecomm.Buffer(group, **SIZES, timeout_s=FAR_S).close()
    except moecomm.MoecommError as error:
        return type(error).__name__, str(error), None, time.monotonic() - start
    return "open", "", None, 0.0


@pytest.mark.parametrize("spare", [0, 1, 2, 3, 4, 5, 6, 7])
def test_a_rank_without_descriptors(ranks: Ranks, tmp_path: Path, spare: int) -> None:
    results = ranks.run(3, without_descriptors, str(tmp_path / "port"), spare)
    assert {found[0] for found, _ in results} in ({"open"}, {"Unsupported"}), results
    for found, again in results:
        assert found[3] < ROOM_S, "no rank waits for the deadline"
        assert again[0] == "open", again


def stopped(rank: int, group: Any) -> Any:
    group.barrier().wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return attempt(group, {})


def without_threads(rank: int, group: Any, what: str) -> tuple[str, str, str]:
    """Rank 1 can start no thread: of Python, which asks the store, or of the watcher of processes."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and what == "of Python":
            patch.setattr(threading.Thread, "start", no_thread)
        elif rank == 1:
            patch.setattr(_native, "Watcher", no_watcher)
        name, text, _, _ = attempt(group, {"timeout_s": 20.0})
        group.barrier().wait()
    return name, text, attempt(group, {"timeout_s": 20.0})[0]


def with_a_busy_store(rank: int, group: Any) -> str:
    """It answers late, but long before the deadline, whatever it is asked first."""
    asked = StoreBoard._call
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(
                StoreBoard, "count", lambda self, key, by: asked(self, slowly, self._store, self._prefix + key, by)
            )
        return attempt(group, {"timeout_s": 20.0})[0]


def slowly(store: Any, key: str, by: int) -> int:
    time.sleep(0.6)  # longer than a board has that only names an error
    return int(store.add(key, by)) - by


def test_a_store_that_answers_late_has_until_the_deadline(ranks: Ranks) -> None:
    assert ranks.run(2, with_a_busy_store) == ["open"] * 2


def no_thread(*_: Any, **__: Any) -> None:
    raise RuntimeError("can't start new thread")


def no_watcher(*_: Any, passed: list[int], **__: Any) -> None:
    close_descriptors(passed)  # as a Watcher does that raises
    no_thread()


def test_a_rank_that_can_start_no_thread(ranks: Ranks) -> None:
    assert ranks.run(3, without_threads, "of Python") == [("open", "", "open")] * 3
    for rank, (name, text, again) in enumerate(ranks.run(3, without_threads, "of the watcher")):
        where = "" if rank == 1 else "rank 1: "
        assert name == "Unsupported" and again == "open"
        assert text == f"{where}a thread that watches the processes of the other ranks: can't start new thread"


def with_destroyed_groups(rank: int, group: Any) -> list[tuple[str, str]]:
    sub = dist.new_group([0, 1])
    dist.destroy_process_group(sub)
    found = [attempt(sub, {}), attempt(group, {})]
    dist.destroy_process_group()
    return [(name, text) for name, text, _, _ in [*found, attempt(group, {}), attempt(sub, {})]]


def test_a_destroyed_process_group_is_bad_input(ranks: Ranks) -> None:
    refused = "BadInput", "group: got a process group that has been destroyed; want one that is there"
    assert ranks.run(2, with_destroyed_groups) == [[refused, ("open", ""), refused, refused]] * 2


def test_a_stopped_rank_is_a_timeout(ranks: Ranks) -> None:
    ranks.start(3, stopped)
    for name, _, peer, seconds in ranks.results(2).values():
        assert (name, peer) == ("Timeout", 1) and seconds < ROOM_S


def interrupted(rank: int, group: Any) -> Any:
    if rank != 1:
        return attempt(group, {"timeout_s": FAR_S})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), opening(rendezvous(group), FAR_S):
        time.sleep(FAR_S)
    return "interrupted"


def test_an_interrupt_of_one_rank_ends_the_opening_of_all(ranks: Ranks) -> None:
    first, second, third = ranks.run(3, interrupted)
    assert second == "interrupted"
    for name, text, peer, seconds in (first, third):
        assert (name, peer) == ("Aborted", 1) and "KeyboardInterrupt" in text and seconds < ROOM_S


def _store_of_rank_0(rank: int, group: Any, port_file: str, how: str) -> Any:
    """The process that has the store dies, or stops, while the others open."""
    other = group_of_a_tcp_store(rank, 3, port_file)
    start = time.monotonic()
    try:
        with opening(rendezvous(other), TIMEOUT_S) as opened:
            opened.all_gather(b"")
            group.barrier().wait()  # all know the process of rank 0
            start = time.monotonic()
            if rank == 0:
                os.kill(os.getpid(), how)
            opened.all_gather(b"")
    except moecomm.RoundFailed as error:
        return type(error).__name__, error.peer, time.monotonic() - start
    return "open"


@pytest.mark.parametrize("how", few((signal.SIGKILL, signal.SIGSTOP), signal.SIGKILL))
def test_the_rank_that_has_the_store(ranks: Ranks, tmp_path: Path, how: int) -> None:
    ranks.start(3, _store_of_rank_0, str(tmp_path / "port"), how)
    for name, peer, seconds in ranks.results(2).values():
        assert (name, peer) == (("PeerLost", 0) if how == signal.SIGKILL else ("Timeout", -1))
        assert seconds < ROOM_S


MOST_WAITS = 1000  # of ranks for the board, 0.05 s each


class Clock:
    """In place of the module `time`: it goes on when all ranks that are to give up wait, and the others have ended."""

    def __init__(self) -> None:
        self._lock, self._now, self._waiting = threading.Lock(), 0.0, set[int]()
        self.giving_up: set[int] = set()
        self.others: set[int] = set()
        self._waits = 0

    def monotonic(self) -> float:
        return self._now

    @contextmanager
    def waits(self, rank: int) -> Iterator[None]:
        with self._lock:
            self._waiting.add(rank)
            self._waits += 1
            assert self._waits < MOST_WAITS, "ranks wait for ever"
            if self._waiting == self.giving_up and not self.others:
                self._now += FAR_S + 1
        yield
        with self._lock:
            self._waiting.discard(rank)


class Watched(Part):
    """The board of a rank, in whose access of some number comes Ctrl-C, before or after it is made."""

    def __init__(self, group: LocalRank, clock: Clock, number: int | None, is_before: bool) -> None:
        super().__init__(group.board(), "")
        self._rank, self._clock, self._number, self._is_before, self.accesses = group.rank, clock, number, is_before, 0

    def _made(self, access: Callable[..., Any], *args: Any) -> Any:
        self.accesses += 1
        is_interrupted = self.accesses - 1 == self._number
        if is_interrupted and self._is_before:
            raise KeyboardInterrupt
        found = access(*args)
        if is_interrupted:
            raise KeyboardInterrupt
        return found

    def write(self, key: str, value: bytes, instead_of: str = "") -> None:
        self._made(super().write, key, value, instead_of)

    def read_or(self, keys: Sequence[str], other: str) -> Any:
        return self._made(super().read_or, keys, other)

    def look(self, keys: Sequence[str]) -> Any:
        return self._made(super().look, keys)

    def decide(self, key: str, value: bytes) -> Any:
        return self._made(super().decide, key, value)

    def count(self, key: str, by: int) -> Any:
        return self._made(super().count, key, by)

    def wait(self, limit_s: float) -> None:
        with self._clock.waits(self._rank):
            super().wait(limit_s)


def one_opening(group: LocalRank, clock: Clock, fault: str, number: int | None, is_before: bool) -> str:
    """Return how an opening ends on this rank.  `number`, `is_before`: of an interrupt; see Watched."""
    watched = SimpleNamespace(**vars(group), in_process=True, global_ranks=list)
    watched.board = lambda prefix="": Watched(group, clock, number, is_before)
    try:
        with opening(watched, "soon" if fault == "bad" else FAR_S) as opened:  # type: ignore[arg-type]
            opened.all_gather(b"")
            opened.settle()
    except (moecomm.MoecommError, KeyboardInterrupt) as error:
        return type(error).__name__
    finally:
        clock.others.discard(group.rank)
    return "open"


RAISES = {"bad": "BadInput", "interrupted": "KeyboardInterrupt"}
TOLD = {"BadInput": "BadInput", "KeyboardInterrupt": "Aborted"}


class Model:
    """A model of openings in step, in which ranks may leave calls out."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._begun = [0] * ranks
        self._failures: list[tuple[set[str], set[int]]] = []  # of each opening: errors, and who never hears of them

    def step(self, faults: dict[int, str]) -> tuple[dict[int, set[str]], set[int]]:
        """Return the ends that each rank may find that calls, and the ranks that give up."""
        ends: dict[int, set[str]] = {}
        for rank, fault in faults.items():
            given_up = [nth for nth, (_, absent) in enumerate(self._failures) if rank in absent]
            self._begun[rank] = max([self._begun[rank], *(nth + 1 for nth in given_up)])
            if self._begun[rank] < len(self._failures):  # an error that it has not heard of
                ends[rank] = {RAISES[fault]} if fault else self._failures[self._begun[rank]][0]
            self._begun[rank] += 1
        there = faults.keys() - ends.keys()
        raised = {RAISES[faults[rank]] for rank in there if faults[rank]}
        absent = set(range(self.ranks)) - there if not raised else set()
        told = {TOLD[kind] for kind in raised} or ({"Timeout"} if absent else {"open"})
        ends |= {rank: {RAISES[faults[rank]]} if faults[rank] else told for rank in there}
        if there:
            self._failures.append((told, absent if told != {"open"} else set()))
        return ends, there if told == {"Timeout"} else set()


@pytest.mark.parametrize("cases", few((300, 10_000), 300))
def test_openings_that_ranks_leave_out_fail_in_or_are_interrupted_in(
    cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second opening after that, at the latest, that all ranks make together, they meet again."""
    for seed in range(cases):
        draw, clock = random.Random(seed), Clock()
        monkeypatch.setattr(opening_module, "time", clock)
        groups = local_ranks(draw.randint(2, 4))
        model = Model(len(groups))
        for _ in range(draw.randint(2, 8)):
            kinds = draw.choices(("", "out", "bad", "interrupted"), (6, 2, 1, 1), k=len(groups))
            is_before, number = draw.random() < 0.5, draw.randrange(3)
            make_step(groups, model, clock, kinds, number, is_before)
        make_step(groups, model, clock, [""] * len(groups))
        assert make_step(groups, model, clock, [""] * len(groups)) == ["open"] * len(groups)


def make_step(
    groups: list[LocalRank], model: Model, clock: Clock, kinds: list[str], number: int = 0, is_before: bool = True
) -> list[str]:
    """Let all ranks open at once, but for those that leave it out; compare with the model, and return the ends."""
    faults = {rank: kind for rank, kind in enumerate(kinds) if kind != "out"}
    wanted, clock.giving_up = model.step(faults)
    clock.others = faults.keys() - clock.giving_up

    def body(group: LocalRank) -> str:
        fault = faults.get(group.rank)
        if fault is None:
            return "left out"
        at = number if fault == "interrupted" else None
        return one_opening(groups[group.rank], clock, fault, at, is_before)

    found = run_ranks(len(groups), body)
    for rank, ends in wanted.items():
        assert found[rank] in ends, (kinds, found, wanted)
    return found


def test_a_rank_finds_the_opening_of_its_peers_whatever_pages_have_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the others have agreed without it: then it is late, and waits for nobody."""
    memory = [ctypes.create_string_buffer(PAGE_BYTES) for _ in range(2)]
    pages, clock = [Pages(list(map(ctypes.addressof, memory)), rank) for rank in range(2)], Clock()
    groups: list[Any] = [SimpleNamespace(rank=rank, ranks=2) for rank in range(2)]
    for group, page in zip(groups, pages, strict=True):
        group.board = partial(Part, page, "1/")
    monkeypatch.setattr(opening_module, "time", clock)
    clock.giving_up = {0}
    for _ in range(2 * _KEPT):
        assert one_opening(groups[0], clock, "", None, True) == "Timeout"
    clock.giving_up = set()
    assert run_ranks(2, lambda group: one_opening(groups[group.rank], clock, "", None, True)) == ["open", "open"]
    for _ in range(2 * _KEPT):
        clock.giving_up = {0}
        assert one_opening(groups[0], clock, "", None, True) == "Timeout"
        clock.giving_up = set()
    pages[0].decide("2/members", b"{}")
    assert one_opening(groups[1], clock, "", None, True) == "Timeout"


def in_two_openings(groups: list[LocalRank], number: int, is_before: bool, group: LocalRank) -> list[str]:
    """Return the ends of two openings, of which the first is interrupted on rank 0."""
    numbers = None if group.rank else number, None
    return [one_opening(groups[group.rank], Clock(), "", at, is_before) for at in numbers]


@pytest.mark.parametrize("is_before", [True, False])
def test_an_interrupt_in_any_access_to_the_board_ends_the_opening_of_all(is_before: bool) -> None:
    for number in range(100):
        groups = local_ranks(2)
        body = partial(in_two_openings, groups, number, is_before)
        (found, again) = zip(*run_ranks(2, body), strict=True)
        assert again == ("open", "open"), number
        if found == ("open", "open"):
            break
        assert found in (("KeyboardInterrupt", "Aborted"), ("KeyboardInterrupt", "open")), (number, found)
    assert 8 < number < 99


def test_gathers_keep_apart_and_leave_nothing() -> None:
    groups = local_ranks(3)

    def body(group: Any) -> list[list[bytes]]:
        return [gather(groups[group.rank], b"%d of %d" % (turn, group.rank), 20.0) for turn in range(50)]

    found = run_ranks(3, body)
    assert found == [[[b"%d of %d" % (turn, rank) for rank in range(3)] for turn in range(50)]] * 3
    assert {key.split("/")[0] for key in groups[0]._shared.values} == {"begun", "49"}


ENDS = """
import torch.distributed as dist
from moecomm.ranks.board import StoreBoard
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
board = StoreBoard(store, "")
board.erase([str(key) for key in range(3000)])  # nobody waits for that
"""


def test_a_process_ends_well_while_its_board_is_in_calls_of_the_store() -> None:
    ended = run_python("-c", ENDS)
    assert (ended.returncode, ended.stderr) == (0, ""), ended


OF_LAYER: dict[str, Any] = {"hidden": 64, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 4}


def without_a_group() -> list[str]:
    """Return what a Buffer, a layer and a gathered state say of group=None."""
    calls = (
        lambda: moecomm.Buffer(None, **SIZES),
        lambda: moecomm.Buffer(**SIZES),
        lambda: moecomm.nn.ExpertParallel(None, **OF_LAYER),
        lambda: moecomm.nn.shared_buffer(None, **SIZES),
        lambda: moecomm.nn.gather_state({}),
    )
    said = []
    for call in calls:
        with pytest.raises(moecomm.BadInput, match="group: got None") as caught:
            call()
        said.append(str(caught.value))
    return said


def test_no_group_among_launched_processes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for text in without_a_group():
        assert "a job of 4 processes" in text and "init_process_group()" in text and '"self"' in text
    with moecomm.Buffer("self", **SIZES) as buffer:
        assert buffer.num_ranks == 1
    assert moecomm.nn.shared_buffer("self", **SIZES).num_ranks == 1
    layer = moecomm.nn.ExpertParallel("self", **OF_LAYER)
    assert set(moecomm.nn.gather_state(layer.state_dict(), "self")) == set(layer.state_dict())
    monkeypatch.setenv("WORLD_SIZE", "1")
    with moecomm.Buffer(**SIZES) as buffer:
        assert buffer.num_ranks == 1
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(moecomm.BadInput, match="WORLD_SIZE"):
        moecomm.Buffer(**SIZES)


def _without_a_group(rank: int, group: Any) -> list[str]:
    return without_a_group()


def test_no_group_beside_the_default_group_is_an_error(ranks: Ranks) -> None:
    for said in ranks.run(2, _without_a_group):
        assert all("a job of 2 processes" in text and "group.WORLD" in text for text in said)
