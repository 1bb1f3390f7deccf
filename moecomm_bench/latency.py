"""put + signal between two ranks: from the first byte until the peer has seen the signal behind the last byte."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from moecomm import _native, config, rma_plugin
from moecomm.errors import Timeout
from moecomm.gpu import plain_kernel
from moecomm.ranks.rendezvous import rendezvous
from moecomm.tools.progress import progress
from moecomm_bench import kernels, proxy_times
from moecomm_bench.clock import percentiles, rounded
from moecomm_bench.ranks import device_of
from moecomm_bench.receive_buffer import ReceiveBuffer

SIZES = [1 << power for power in range(27)]  # 1 B to 64 MB
_SIGNAL_BYTES = 256  # kPayload
_TIMEOUT_NS = 30_000_000_000
_BUDGET_BYTES = 2 << 30  # bytes moved for one size in one replay, at most
_BUDGET_S = 0.1  # approximate seconds of a replay, because a proxy takes milliseconds where many blocks put
_MOST_ROUNDS, _FEWEST_ROUNDS = 500, 8
# (kernel, blocks, smallest and largest size) to try; the result of a size is its fastest.
_WAYS = (
    ("st, a warp", 1, 1, 1 << 12),
    ("st", 1, 1 << 10, 1 << 16),
    ("st", 8, 1 << 12, 1 << 20),
    ("TMA", 1, 1 << 12, 1 << 20),
    ("TMA", 8, 1 << 15, 1 << 23),
    ("TMA", 32, 1 << 17, 1 << 40),
)
# The same table for put and signal of a library.
_PUTS = (
    ("put, a warp", 1, 1, 1 << 40),
    ("put", 1, 1 << 12, 1 << 40),
    ("put", 4, 1 << 15, 1 << 40),
    ("put", 32, 1 << 18, 1 << 40),
)


class _PingPongArgs(ctypes.Structure):
    """PingPongArgs of csrc/bench/ping_pong.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("here", "there", "source", "abort_here", "abort_host", "timeout_ns")),
        *((name, ctypes.c_uint64) for name in ("result", "before")),
        ("bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("warmup", "rounds", "starts", "pad")),
        *((name, ctypes.c_uint64) for name in ("window", "link", "which")),
    )


def run_rank(group: dist.ProcessGroup, **job: Any) -> list[dict[str, Any]]:
    """Run one rank; returns rows {bytes, method, sms, us}, with `us` by replay. Ranks 0 and 1 move data, other ranks
    wait.

    Through GIN's proxy also `plugin`: what our RMA plugin counted in each replay (proxy_times.Taken, or None).
    """
    device, sizes = device_of(group, job["backend"]), job["sizes"]
    ways = [(size, *way) for size in sizes for way in _ways(size, job["backend"])]
    ranks = rendezvous(group)
    rows = []
    with (
        config.variables({"MOECOMM_RMA_TIMES": "1"}),
        progress(group, len(ways)) as step,
        ReceiveBuffer(group, nbytes(max(sizes)), job["backend"], device) as receive_buffer,
    ):
        player = Player(receive_buffer, max(sizes), device) if group.rank() < 2 else None
        proxied = receive_buffer.shim == "gin_proxy"
        for size, method, blocks in ways:
            step(f"put + signal: {size} bytes, {method}")
            rounds = _rounds(size)
            dist.barrier(group)
            if player is not None:
                rounds = _rounds(size, player.play(size, method, blocks, _FEWEST_ROUNDS))
            rounds = min(int.from_bytes(data, "little") for data in ranks.all_gather(rounds.to_bytes(8, "little")))
            us, plugin = [], []
            for _ in range(job["replays"]):
                dist.barrier(group)
                if proxied:
                    rma_plugin.take_times()
                dist.barrier(group)
                if player is not None:
                    us.append(player.play(size, method, blocks, rounds))
                dist.barrier(group)  # the peer has seen our last signal
                if proxied:
                    taken = rma_plugin.take_times()
                    plugin.append(taken and {**taken, "puts": _warmup(rounds) + rounds})
            row = {"bytes": size, "method": method, "sms": blocks, "us": us}
            rows.append(row | ({"plugin": plugin} if proxied else {}))
        dist.barrier(group)
    return rows


def _ways(size: int, backend: str) -> list[tuple[str, int]]:
    if backend == "host":
        return [("memcpy", 1)]
    ways = _WAYS if backend == "lsa" else _PUTS
    return [(method, blocks) for method, blocks, least, most in ways if least <= size <= most]


def nbytes(most_bytes: int) -> int:
    """Return the bytes of a ReceiveBuffer: the signal, the peer's data, and ours, which a library needs there too."""
    return 2 * (_SIGNAL_BYTES + -(-most_bytes // _SIGNAL_BYTES) * _SIGNAL_BYTES)


def _rounds(size: int, us: float = 0.0) -> int:
    """Return the timed round trips of a replay, if half of one takes `us` microseconds."""
    most = min(_MOST_ROUNDS, _BUDGET_BYTES // size // 2)
    return max(_FEWEST_ROUNDS, min(most, int(_BUDGET_S * 1e6 / 2 / us)) if us > 0 else most)


def _warmup(rounds: int) -> int:
    return max(2, rounds // 10)


class Player:
    """One side of the ping-pong. Both sides make equal calls of play()."""

    def __init__(self, receive_buffer: ReceiveBuffer, most_bytes: int, device: torch.device) -> None:
        self._receive_buffer, self._device = receive_buffer, device
        self._source = receive_buffer.tensor[len(receive_buffer.tensor) // 2 :][:most_bytes]
        self._source.copy_(torch.arange(most_bytes, device=device).to(torch.uint8))
        self._kernels = kernels.putting(receive_buffer.shim) if receive_buffer.shim else kernels.PING_PONG
        self._result = torch.zeros(2, dtype=torch.int64, device=device)
        self._signals = 0

    def play(self, size: int, method: str, blocks: int, rounds: int) -> float:
        """Return the microseconds of half a round trip, over `rounds` round trips. Raises Timeout."""
        receive_buffer, warmup = self._receive_buffer, _warmup(rounds)
        known = {
            "here": receive_buffer.addresses[receive_buffer.rank],
            "there": receive_buffer.addresses[1 - receive_buffer.rank],
            "source": self._source.data_ptr(),
            "before": self._signals,
            "warmup": warmup,
            "rounds": rounds,
            "timeout_ns": _TIMEOUT_NS,
            "abort_here": receive_buffer.abort_words[0],
            "abort_host": receive_buffer.abort_words[1],
        }
        self._signals += (warmup + rounds) * blocks
        if self._device.type == "cpu":
            nanoseconds = _native.host_ping_pong(nbytes=size, starts=receive_buffer.rank == 0, **known) or 0
        else:
            nanoseconds = self._on_gpu(self._kernels[method], blocks, size, known)
        if nanoseconds == 0:
            peer, text = (
                1 - receive_buffer.rank,
                f"rank {receive_buffer.rank} waited for rank {1 - receive_buffer.rank}: its put",
            )
            raise Timeout(text, rank=receive_buffer.rank, peer=peer, phase="payload", op="put", round=0)
        return nanoseconds / 1e3 / rounds / 2

    def _on_gpu(self, kernel: kernels.BenchKernel, blocks: int, size: int, known: dict[str, int]) -> int:
        self._result.zero_()
        puts = self._receive_buffer.puts if self._receive_buffer.shim else {}
        args = _PingPongArgs(
            bytes=size, starts=self._receive_buffer.rank == 0, result=self._result.data_ptr(), **known, **puts
        )
        plain_kernel.launch(kernel, blocks, args)
        nanoseconds, waited = self._result.tolist()
        return 0 if waited else int(nanoseconds)

    def arrived(self, size: int) -> bool:
        """Return True if the peer's `size` bytes are in our receive buffer."""
        return torch.equal(self._receive_buffer.tensor[_SIGNAL_BYTES : _SIGNAL_BYTES + size], self._source[:size])


def merge(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge both ranks to one row per size, {bytes, method, sms, us, gbs}: the fastest method, by the slower rank.

    Through GIN's proxy also `plugin`, proxy_times.of_put of that method.
    """
    best: dict[int, dict[str, Any]] = {}
    for parts in zip(*by_rank[:2], strict=True):
        us, size = percentiles([part["us"] for part in parts]), parts[0]["bytes"]
        row = {name: parts[0][name] for name in ("bytes", "method", "sms")}
        row |= {"us": us, "gbs": rounded(size / us["p50"] / 1e3, 4)}
        if "plugin" in parts[0]:
            plugin = proxy_times.of_put([part["us"] for part in parts], [part["plugin"] for part in parts])
            row |= {"plugin": plugin} if plugin else {}
        if size not in best or us["p50"] < best[size]["us"]["p50"]:
            best[size] = row
    return list(best.values())
