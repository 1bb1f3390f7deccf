"""Ranks as processes: groups of every kind, settings that differ, kills, deadlines, and nothing left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.dispatch import reference
from moecomm.ranks import settings
from moecomm.ranks.settings import Settings

from .conftest import Ranks
from .few import few
from .live import FAR_S, ROOM_S

SIZES: dict[str, Any] = {"hidden": 128, "num_experts": 12, "topk": 3, "max_tokens": 32, "backend": "host"}


def routing(rank: int, tokens: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return (
        torch.randn(tokens, 128, generator=g).bfloat16(),
        torch.rand(tokens, 12, generator=g).argsort(dim=1)[:, :3],
        torch.rand(tokens, 3, generator=g),
    )


def one_round(rank: int, group: Any, ranks: int) -> None:
    """A dispatch and a combine against the reference, for real processes."""
    with moecomm.Buffer(group, **SIZES) as buffer:
        for layout in ("flat", "expert", "batched"):
            everybody = [routing(r, 20 + r) for r in range(ranks)]
            routed = buffer.dispatch(*everybody[rank], layout=layout)
            x, idx, weights = map(list, zip(*everybody, strict=True))
            want = reference.dispatch(x, idx, weights, num_experts=12, layout=layout, max_tokens=32)[rank]
            valid = torch.ones(len(want.x), dtype=torch.bool) if layout == "flat" else want.src[:, 0] >= 0
            assert torch.equal(routed.x.view(-1, 128)[valid], want.x[valid])
            assert torch.equal(routed.src.view(-1, 2)[valid], want.src[valid])
            out = buffer.combine(routed.x, routed.handle)
            sent = torch.stack([(idx[rank] // (12 // ranks) == p).any(dim=1) for p in range(ranks)]).sum(dim=0)
            factor = sent if layout == "flat" else weights[rank].sum(dim=1)
            assert torch.allclose(out.float(), x[rank].float() * factor.unsqueeze(1), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_match_the_reference(ranks: Ranks, count: int) -> None:
    ranks.run(count, one_round, count)


def _in_sub_group(rank: int, group: Any) -> str:
    sub = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    other = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    del other
    one_round(rank // 2, sub, 2)
    return "done"


def test_sub_groups(ranks: Ranks) -> None:
    assert ranks.run(4, _in_sub_group) == ["done"] * 4


def _in_mesh(rank: int, group: Any) -> str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(moecomm.BadInput, match="group"):
        moecomm.Buffer(mesh, **SIZES)
    one_round(rank % 2, mesh["ep"], 2)
    return "done"


def test_device_mesh(ranks: Ranks) -> None:
    assert ranks.run(4, _in_mesh) == ["done"] * 4


DIFFERENT = {
    "hidden": 256,
    "num_experts": 24,
    "topk": 2,
    "max_tokens": 33,
    "dtype": torch.float32,
    "window_bytes": 1 << 20,
    "domain_ranks": 1,
    "wire": "exact",
    "capacity_factor": 2.0,
    "verify_every": 10,
    "on_timeout": "mask",
    "placement": moecomm.Placement([range(4), range(4, 8), range(8, 12)]),
}


# No argument sets these: releases of moecomm differ in the first ones, and machines with GPUs in the backend.
OTHERWISE = ("magic", "version", "backend")


def test_every_setting_is_among_them() -> None:
    alike = Settings(2, 128, 12, 3, 32, torch.bfloat16, "host", None)
    assert {*DIFFERENT, *OTHERWISE} == {*alike.compared()}


def _differ(field: str) -> None:
    """Let this process differ in what no argument sets."""
    if field == "magic":
        settings._MAGIC += 1
    elif field == "version":
        settings.VERSION += 1
    else:
        agree = Settings.agree
        Settings.agree = lambda self, group: agree(replace(self, backend="lsa"), group)  # type: ignore[method-assign]


def _open_with(rank: int, group: Any, field: str) -> tuple[str, float]:
    sizes = SIZES
    if rank == 1 and field in OTHERWISE:
        _differ(field)
    elif rank == 1:
        sizes = {**SIZES, field: DIFFERENT[field]}
    start = time.monotonic()
    with pytest.raises(moecomm.Mismatch) as caught:
        moecomm.Buffer(group, **sizes)
    return caught.value.field, time.monotonic() - start


@pytest.mark.parametrize("field", [*DIFFERENT, *OTHERWISE])
def test_different_settings_are_named(ranks: Ranks, field: str) -> None:
    for named, seconds in ranks.run(3, _open_with, field):
        assert named == field
        assert seconds < ROOM_S


KILLED = [(0, "between"), (0, "any time"), (2, "between"), (2, "any time")]


def _until_a_peer_dies(rank: int, group: Any, victim: int, kind: str, died: Any) -> tuple[str, int, float]:
    # Where a rank dies, the deadline is far: a rank that is merely late must not end the rounds first.
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=3 if kind == "idle" else FAR_S)
    if rank == victim and kind == "idle":
        time.sleep(FAR_S)
    begun = time.monotonic()
    try:
        for round_number in range(1_000_000):
            if rank == victim and kind == "between" and round_number == 50:
                died.value = time.monotonic()
                os.kill(os.getpid(), signal.SIGKILL)
            begun = time.monotonic()
            routed = buffer.dispatch(*routing(rank))
            buffer.combine(routed.x, routed.handle)
    except moecomm.RoundFailed as error:
        took = time.monotonic() - (died.value or begun)
        with pytest.raises(type(error)):  # the Buffer stays failed ...
            buffer.check()
        buffer.close()  # ... and closes
        return type(error).__name__, error.peer, took
    return "no error", -1, 0.0


@pytest.mark.parametrize(("victim", "kind"), few(KILLED, (0, "any time"), (2, "between")))
def test_survivors_of_a_killed_rank_name_it(ranks: Ranks, victim: int, kind: str) -> None:
    ranks.start(3, _until_a_peer_dies, victim, kind, ranks.died)
    if kind == "any time":
        time.sleep(1.5)
        ranks.kill(victim)
    for rank, result in ranks.results(2).items():
        assert rank != victim
        assert not isinstance(result, BaseException), result
        name, peer, seconds = result
        assert (name, peer) == ("PeerLost", victim)
        assert seconds < ROOM_S, "a death on the same host ends the wait, not the deadline"


def test_a_silent_rank_is_a_timeout(ranks: Ranks) -> None:
    ranks.start(3, _until_a_peer_dies, 1, "idle", ranks.died)
    for name, peer, seconds in ranks.results(2).values():
        assert (name, peer) == ("Timeout", 1)
        assert seconds < ROOM_S


def _leave_early(rank: int, group: Any) -> tuple[str, int] | None:
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=FAR_S)
    buffer.dispatch(*routing(rank))
    if rank == 1:
        buffer.close()
        return None
    start = time.monotonic()
    with pytest.raises(moecomm.PeerLost) as caught:
        buffer.dispatch(*routing(rank))
    assert time.monotonic() - start < ROOM_S
    return type(caught.value).__name__, caught.value.peer


def test_a_rank_that_closes_is_not_waited_for(ranks: Ranks) -> None:
    assert ranks.run(3, _leave_early) == [("PeerLost", 1), None, ("PeerLost", 1)]


def _fail_alone(rank: int, group: Any, how: str) -> str:
    with moecomm.Buffer(group, **SIZES) as buffer:
        x, ids, _ = routing(rank)
        if how == "and go on":
            with pytest.raises(moecomm.BadInput):
                buffer.dispatch(x.double(), ids)  # on all ranks
        buffer.dispatch(x, ids)
        try:
            with buffer if rank == 1 else contextlib.nullcontext():
                if rank == 1 and how == "a call":
                    buffer.dispatch(x.double(), ids)
                elif rank == 1 and how == "the program":
                    raise LookupError("no such batch")
                elif rank == 1:
                    return ""
                buffer.dispatch(x, ids)
        except (moecomm.PeerLost, moecomm.BadInput, LookupError) as error:
            return str(error) if rank != 1 else ""
    raise AssertionError


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("a call", ": it has left, after BadInput: x: got torch.float64; want torch.bfloat16 or torch.float8_e4m3fn"),
        ("the program", ": it has left, after LookupError: no such batch"),
        ("and go on", ""),
    ],
)
def test_the_error_with_which_a_rank_leaves_reaches_its_peers(ranks: Ranks, how: str, why: str) -> None:
    for said in ranks.run(3, _fail_alone, how)[::2]:
        assert re.fullmatch(
            rf"rank 1 is gone \(noticed by rank \d in dispatch, round 2, phase \w+\){re.escape(why)}", said
        )


FAILS = """
import datetime, sys, torch, torch.distributed as dist, moecomm
store = dist.FileStore(sys.argv[1], 2)
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
buffer = moecomm.Buffer(dist.group.WORLD, hidden=64, num_experts=4, topk=1, max_tokens=8, backend="host")
x, ids = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
buffer.dispatch(x, ids)
if rank == 1:
    raise LookupError("no such batch")
buffer.dispatch(x, ids)
"""


def test_an_exception_that_ends_a_process_reaches_its_peers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILS, str(tmp_path / "store")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen([*command, str(rank)], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said, _ = (process.communicate(timeout=240)[1] for process in started)
    assert "PeerLost: rank 1 is gone" in said and "it has left, after LookupError: no such batch" in said


def _end_before_the_others(rank: int, group: Any) -> str:
    """Rank 0 has no tokens: it is through with the combine, and gone, while the others are in the middle of it."""
    sizes = {"hidden": 2048, "num_experts": 12, "topk": 8, "max_tokens": 3000, "dtype": torch.float32}
    buffer = moecomm.Buffer(group, **sizes, backend="host", timeout_s=20)
    tokens = 3000 * (rank > 0)
    idx = torch.rand(tokens, 12, generator=torch.Generator().manual_seed(rank)).argsort(dim=1)[:, :8]
    x = torch.full((tokens, 2048), float(rank))
    routed = buffer.dispatch(x, idx)
    out = buffer.combine(routed.x.clone(), routed.handle)
    buffer.close()
    assert torch.equal(out, 8 * x)
    return "done"


@pytest.mark.long
def test_a_rank_that_is_done_may_end(ranks: Ranks) -> None:
    for _ in range(3):
        assert ranks.run(3, _end_before_the_others) == ["done"] * 3


def _fork_between_rounds(rank: int, group: Any) -> str:
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=5)
    if rank == 1:
        if (child := os.fork()) == 0:
            buffer.close()
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    time.sleep(0.2 * (rank == 1))  # the others are first to look for what rank 1 has to say
    routed = buffer.dispatch(*routing(rank))
    buffer.combine(routed.x, routed.handle)
    dist.barrier()
    buffer.close()
    return "done"


def test_a_forked_child_does_not_speak_for_its_parent(ranks: Ranks) -> None:
    assert ranks.run(3, _fork_between_rounds) == ["done"] * 3


def _use_in_a_child(rank: int, group: Any, domain_ranks: int | None) -> list[str]:
    """Rank 1 forks between a dispatch and its combine, and the child tries all that a Buffer can do."""
    buffer = moecomm.Buffer(group, **SIZES, domain_ranks=domain_ranks, timeout_s=5)
    x, idx, weights = routing(rank)
    routed = buffer.dispatch(x, idx, weights)
    want = buffer.combine(routed.x.clone(), routed.handle)
    said: list[str] = []
    if rank == 1:
        here, there = multiprocessing.Pipe()
        if (child := os.fork()) == 0:
            calls: tuple[Callable[[], Any], ...] = (
                lambda: buffer.dispatch(x, idx, weights),
                lambda: buffer.dispatch_begin(x, idx),
                lambda: buffer.combine(routed.x, routed.handle),
                lambda: buffer.empty(routed.handle),
                lambda: buffer.moe(x, idx, weights, torch.zeros(6, 16, 128), torch.zeros(6, 128, 8)),
                lambda: moecomm.ops.dispatch(buffer.name, x, idx, weights),
                buffer.check,
            )
            for call in calls:
                try:
                    call()
                    there.send(f"{call}: nothing")
                except moecomm.MoecommError as error:
                    there.send(str(error))
            buffer.abort()
            buffer.close()
            there.send("closed" if buffer.closed else "open")
            os._exit(0)
        there.close()
        assert os.waitpid(child, 0)[1] == 0
        said = [here.recv() for _ in range(8)]
    dist.barrier()
    assert not buffer.closed
    time.sleep(0.2 * (rank == 1))  # the others are first to look for what rank 1 has to say
    again = buffer.combine(routed.x, routed.handle)
    assert torch.equal(buffer.combine(buffer.dispatch(x, idx, weights).x, routed.handle), want)
    assert torch.equal(again, want)
    dist.barrier()
    buffer.close()
    with pytest.raises(moecomm.Closed, match="this Buffer is closed"):
        buffer.check()
    return said


@pytest.mark.parametrize("domain_ranks", [None, 1])
def test_a_forked_child_is_told_that_it_has_no_buffer(ranks: Ranks, domain_ranks: int | None) -> None:
    told = "this Buffer, opened before this process was forked, is closed; open a new one"
    assert ranks.run(2, _use_in_a_child, domain_ranks) == [[], [*[told] * 7, "closed"]]


def _fork_beside_a_round(rank: int, group: Any) -> list[str]:
    """Rank 0 forks while a thread of its is in a round: the child has a copy of its locks, and no such thread."""
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=20)
    x, idx, weights = routing(rank)
    if rank == 1:
        dist.barrier()
        buffer.dispatch(x, idx, weights)
        return []
    thread = threading.Thread(target=buffer.dispatch, args=(x, idx, weights))
    thread.start()
    while not buffer.rounds.turn.running:
        time.sleep(1e-3)
    here, there = multiprocessing.Pipe()
    if os.fork() == 0:
        said: list[str] = []
        for call in (lambda: buffer.dispatch(x, idx, weights), buffer.check, buffer.shrink, buffer.abort, buffer.close):
            try:
                call()
                said.append("fine")
            except moecomm.MoecommError as error:
                said.append(str(error))
        there.send(said)
        os._exit(0)
    found = here.recv() if here.poll(20) else ["the child hangs"]
    dist.barrier()
    thread.join()
    buffer.close()
    return found


def test_a_child_that_is_forked_beside_a_round_is_told_so_and_can_close(ranks: Ranks) -> None:
    told = "this Buffer, opened before this process was forked, is closed; open a new one"
    assert ranks.run(2, _fork_beside_a_round) == [[told, told, told, "fine", "fine"], []]


def _abort_from_a_thread(rank: int, group: Any) -> tuple[str, float]:
    import threading

    buffer = moecomm.Buffer(group, **SIZES, timeout_s=FAR_S)
    if rank == 1:
        dist.barrier()
        return "", 0.0
    aborted: list[float] = []

    def abort() -> None:
        aborted.append(time.monotonic())
        buffer.abort()

    threading.Timer(0.3, abort).start()
    with pytest.raises(moecomm.Aborted):
        buffer.dispatch(*routing(rank))
    seconds = time.monotonic() - aborted[0]
    dist.barrier()
    return "Aborted", seconds


def test_abort_from_another_thread(ranks: Ranks) -> None:
    name, seconds = ranks.run(2, _abort_from_a_thread)[0]
    assert name == "Aborted" and seconds < ROOM_S


def _close_from_a_thread(rank: int, group: Any) -> str:
    import threading

    buffer = moecomm.Buffer(group, **SIZES, timeout_s=20)
    if rank == 0:
        closing = threading.Timer(0.3, buffer.close)
        closing.start()
        with pytest.raises(moecomm.Aborted):
            buffer.dispatch(*routing(rank))
        closing.join()
    dist.barrier()
    with pytest.raises(moecomm.MoecommError) as caught:
        buffer.dispatch(*routing(rank))
    return type(caught.value).__name__


def test_closing_in_another_thread_ends_the_round(ranks: Ranks) -> None:
    assert ranks.run(2, _close_from_a_thread) == ["Closed", "Aborted"]


def _interrupted(rank: int, group: Any) -> str:
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=FAR_S)
    if rank == 1:
        time.sleep(FAR_S)
    start = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        import threading

        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        buffer.dispatch(*routing(rank))
    except KeyboardInterrupt:
        assert time.monotonic() - start < ROOM_S
        buffer.close()
        return "interrupted"
    return "no"


def test_ctrl_c(ranks: Ranks) -> None:
    ranks.start(2, _interrupted)
    assert ranks._queue.get(timeout=FAR_S) == (0, "interrupted")
    ranks.kill(1)


def test_nothing_is_left_behind(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = set(os.listdir("/dev/shm"))
    ranks.start(3, _until_a_peer_dies, 1, "any time", ranks.died)
    time.sleep(1.5)
    ranks.kill(1)
    ranks.results(2)
    end = time.monotonic() + ROOM_S
    while set(os.listdir("/dev/shm")) - before:  # others on this machine have files there for a moment
        assert time.monotonic() < end
        time.sleep(0.01)
    assert {p.name for p in temporary.iterdir() if not p.name.startswith("pymp-")} == set(), (
        "pymp-: multiprocessing's own"
    )
