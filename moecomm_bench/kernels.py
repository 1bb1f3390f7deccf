"""Kernels of the benchmark itself (csrc/bench)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from moecomm.gpu import linking
from moecomm.gpu.plain_kernel import PlainKernel

PIECE = 8192  # bytes of a bulk copy: kPiece, kPutPiece
_SLOTS = 4  # of a ring: kSlots, kPutSlots


@dataclass(frozen=True)
class BenchKernel(PlainKernel):
    """A kernel of the benchmark; `rings` warps do bulk copies, each through its own ring in dynamic shared memory."""

    namespace: ClassVar[str] = "moecomm::bench"
    rings: int = 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of the rings and of a barrier for each slot."""
        return self.rings * _SLOTS * (PIECE + 8)


ALL_TO_ALL = {
    "st.v4 write": BenchKernel("bench/all_to_all", "all_to_all<Method::store>", "AllToAllArgs", 1024),
    "ld.v4 read": BenchKernel("bench/all_to_all", "all_to_all<Method::load>", "AllToAllArgs", 1024),
    "TMA write": BenchKernel("bench/all_to_all", "all_to_all<Method::bulk_write>", "AllToAllArgs", 192, rings=6),
    "TMA read": BenchKernel("bench/all_to_all", "all_to_all<Method::bulk_read>", "AllToAllArgs", 192, rings=6),
}
PING_PONG = {
    "st, a warp": BenchKernel("bench/ping_pong", "ping_pong<false>", "PingPongArgs", 32),
    "st": BenchKernel("bench/ping_pong", "ping_pong<false>", "PingPongArgs", 512),
    "TMA": BenchKernel("bench/ping_pong", "ping_pong<true>", "PingPongArgs", 128, rings=4),
}
# By cluster size: blocks with so much shared memory that no other block fits on their multiprocessor.
HOLD = {size: BenchKernel("bench/sleep", "hold", "HoldArgs", 192, rings=6, cluster=size) for size in (1, 2, 4)}

# The start of single calls: one thread works.
START = {name: BenchKernel("bench/start", name, "StartArgs", 32) for name in ("start", "finish", "clock_step")}
DELAY = BenchKernel("bench/sleep", "delay", "DelayArgs", 32)


@lru_cache(maxsize=4)
def putting(shim: str) -> dict[str, BenchKernel]:
    """Return the ping-pong kernels through a library, by the name of its shim."""
    entry = f"ping_pong_through<{linking.TRANSPORTS[shim]}>"
    # GIN's queue for a peer has 256 entries, shared by all warps of a channel; NVSHMEM's stores need many warps.
    threads = {"put, a warp": 32, "put": 512 if shim == "nvshmem" else 128}
    return {
        name: BenchKernel("bench/ping_pong_through", entry, "PingPongArgs", count, transport=shim)
        for name, count in threads.items()
    }
