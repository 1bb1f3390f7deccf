"""put + signal: the bytes arrive, a time is half a round trip, and nobody waits for ever."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecomm import _native, backends, shims
from moecomm.backends import nic
from moecomm_bench import latency
from moecomm_bench.receive_buffer import ReceiveBuffer

from ..conftest import Ranks
from ..live import ROOM_S

MOST = 1 << 20
SIZES = [1, 3, 16, 4096, 70000, MOST]


def _play(rank: int, group: Any, backend: str) -> list[tuple[str, bool, float, float]]:
    """(way, all bytes arrived, microseconds by its own clock, by ours) of every way at every size."""
    device = torch.device("cpu") if backend == "host" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found = []
    with ReceiveBuffer(group, latency.nbytes(MOST), backend, device) as receive_buffer:
        player = latency.Player(receive_buffer, MOST, device)
        for size in SIZES:
            for method, blocks in latency._ways(size, backend):
                if method == "TMA" and size % 16:
                    continue
                landed = receive_buffer.tensor[latency._SIGNAL_BYTES :][:MOST]
                landed.zero_()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                dist.barrier(group)
                begin = time.perf_counter()
                us = player.play(size, method, blocks, 20)
                whole = (time.perf_counter() - begin) * 1e6
                dist.barrier(group)
                arrived = player.arrived(size) and not landed[size:].any()
                found.append((f"{method}, {blocks}: {size}", bool(arrived), us, whole))
    return found


def test_what_is_put_arrives(ranks: Ranks) -> None:
    for found in ranks.run(2, _play, "host"):
        assert len(found) == len(SIZES)
        assert [way for way, arrived, *_ in found if not arrived] == []
        for _, _, us, whole in found:
            assert 0 < us * 2 * 20 <= whole


@pytest.mark.gpu2
@pytest.mark.parametrize("backend", ["lsa", "gin", "nvshmem"])
def test_what_is_put_arrives_on_gpus(gpu_ranks: Ranks, backend: str) -> None:
    if reason := backends.missing(backend):
        pytest.skip(f"{backend}: {reason}")
    if backend != "lsa" and (reason := shims.find(backend).missing):
        pytest.skip(reason)
    for found in gpu_ranks.run(2, _play, backend):
        assert len(found) > 2 * len(SIZES)
        assert [way for way, arrived, *_ in found if not arrived] == []
        for _, _, us, whole in found:
            assert 0 < us * 2 * 20 <= whole


def _rows(rank: int, group: Any, backend: str) -> list[dict[str, Any]]:
    return latency.run_rank(group, backend=backend, sizes=[4, 1 << 16], replays=3)


@pytest.mark.gpu2
@pytest.mark.parametrize("backend", ["lsa", "gin"])
def test_a_put_through_the_proxy_says_where_its_time_goes(gpu_ranks: Ranks, backend: str) -> None:
    if reason := backends.missing(backend):
        pytest.skip(f"{backend}: {reason}")
    if backend == "gin" and nic.has_rdma():
        pytest.skip("puts go through a NIC")
    small, large = latency.merge(gpu_ranks.run(2, _rows, backend))
    if backend == "lsa":
        assert "plugin" not in small and "plugin" not in large
        return
    assert small["plugin"]["operations"] == 2 and large["plugin"]["operations"] >= 2
    for row in (small, large):
        part = row["plugin"]
        assert part["bytes"] == row["bytes"] and part["one_way_us"] == pytest.approx(row["us"]["p50"], abs=2e-3)
        names = ("posting_us", "driver_us", "copying_us", "word_us", "rest_us")
        assert all(part[name] > 0 for name in names)
        assert sum(part[name] for name in names) == pytest.approx(part["one_way_us"], abs=1e-2)
        assert 0 < part["polling"] < 1 and 0 < part["empty"] < 1


def ping_pong(**other: Any) -> int | None:
    """Against nobody: one block is the peer's and ours, and no signal comes."""
    memory = _native.host_alloc(1024)
    given = {
        "here": memory.address,
        "there": memory.address + 512,
        "source": memory.address,
        "nbytes": 8,
        "before": 0,
        "warmup": 0,
        "rounds": 1,
        "starts": True,
        "timeout_ns": 50_000_000,
        "abort_here": memory.address + 256,
        "abort_host": memory.address + 260,
    }
    if other.pop("aborted", False):
        _native.store_word(given["abort_host"], 1)
    return _native.host_ping_pong(**given | other)


def test_a_wait_ends_at_its_deadline() -> None:
    begin = time.monotonic()
    assert ping_pong() is None
    assert 0.05 <= time.monotonic() - begin < ROOM_S


def test_a_wait_ends_when_it_is_called_off() -> None:
    begin = time.monotonic()
    assert ping_pong(timeout_ns=240_000_000_000, aborted=True) is None
    assert time.monotonic() - begin < ROOM_S


def test_each_size_takes_its_fastest_way() -> None:
    def rank(times: dict[tuple[int, str], float]) -> list[dict[str, Any]]:
        return [{"bytes": size, "method": way, "sms": 1, "us": [us] * 3} for (size, way), us in times.items()]

    a = rank({(1, "st"): 1.0, (1, "TMA"): 3.0, (4000, "st"): 9.0, (4000, "TMA"): 2.0})
    b = rank({(1, "st"): 2.0, (1, "TMA"): 1.0, (4000, "st"): 1.0, (4000, "TMA"): 4.0})
    merged = latency.merge([a, b])
    found = [(row["bytes"], row["method"], row["us"]["p50"], row["gbs"]) for row in merged]
    assert found == [(1, "st", 2.0, 0.0005), (4000, "TMA", 4.0, 1.0)]
