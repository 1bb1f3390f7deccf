"""The all-to-all ceiling: every rank moves bytes to, or from, all peers at once, by every available method."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moecomm.base.choices import BackendName
from moecomm.base.protocol import MAX_RANKS
from moecomm.gpu import cuda_driver
from moecomm.gpu.plain_kernel import launch
from moecomm.tools.progress import Step, progress
from moecomm_bench import kernels
from moecomm_bench.clock import Call, Clock, percentiles, rounded
from moecomm_bench.ranks import device_of, together
from moecomm_bench.receive_buffer import ReceiveBuffer

Move = tuple[int, int, int]  # destination, source, bytes
SMS = [4, 8, 16, 24, 32, 64, 132]
PART_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}  # to each peer
_CHAIN, _REPLAYS = 4, 7


class _CeilingArgs(ctypes.Structure):
    """AllToAllArgs of csrc/bench/all_to_all.cuh."""

    _fields_ = (
        ("blocks", ctypes.c_uint64 * MAX_RANKS),
        ("local", ctypes.c_uint64),
        ("bytes", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("ranks", ctypes.c_int32),
    )


def ways_count(backend: str, threads: int) -> int:
    """Return how many methods `measure` tries."""
    return 2 * len(_thread_counts(threads)) if backend == "host" else len(kernels.ALL_TO_ALL) * len(SMS) + 2


def run_rank(group: dist.ProcessGroup, **job: Any) -> list[dict[str, Any]]:
    """Run one rank of the benchmark `all-to-all`."""
    device = device_of(group, job["backend"])
    with progress(group, ways_count(job["backend"], torch.get_num_threads())) as step:
        return measure(group, job["backend"], device, step, job["part_bytes"])


def measure(
    group: dist.ProcessGroup, backend: BackendName, device: torch.device, step: Step, part_bytes: int | None = None
) -> list[dict[str, Any]]:
    """Measure all methods; returns rows {method, sms, bytes, us}.

    `bytes` leave (or reach) a rank in `us` microseconds, a list by replay. `part_bytes` go to each peer, rounded down
    to whole pieces.
    """
    if group.size() == 1:
        return []
    part = part_bytes or PART_BYTES[device.type]
    part = max(part // kernels.PIECE, 1) * kernels.PIECE
    clock = Clock(group, device, graph=False, cold=False, chain=_CHAIN, replays=_REPLAYS)
    rows = []
    with ReceiveBuffer(group, part * group.size(), backend, device) as receive_buffer:
        local = torch.full((part * group.size(),), group.rank() + 1, dtype=torch.uint8, device=device)
        for method, workers, call in ways(receive_buffer, local, part):
            step(f"all-to-all: {method}, {workers}")
            if together(group, call)[1]:
                continue  # some drivers cannot copy to some kinds of windows
            row = {"method": method, "sms": workers, "bytes": part * (group.size() - 1)}
            rows.append({**row, "us": clock(call, receive_buffer.meet)})
        dist.barrier(group)  # no rank closes its window while peers still move bytes
    return rows


def ways(receive_buffer: ReceiveBuffer, local: torch.Tensor, part: int) -> Iterator[tuple[str, int, Call]]:
    """Yield (method, SMs or threads, call) for every method to move `part` bytes between any two ranks.

    A write moves part `peer` of `local` to part `rank` of that peer's buffer; a read moves in the opposite direction.
    """
    return _on_gpu(receive_buffer, local, part) if local.is_cuda else _on_cpu(receive_buffer, local, part)


def _on_gpu(receive_buffer: ReceiveBuffer, local: torch.Tensor, part: int) -> Iterator[tuple[str, int, Call]]:
    blocks = (ctypes.c_uint64 * MAX_RANKS)(*receive_buffer.addresses)
    args = _CeilingArgs(blocks, local.data_ptr(), part, receive_buffer.rank, receive_buffer.ranks)
    most = torch.cuda.get_device_properties(local.device).multi_processor_count
    for method, kernel in kernels.ALL_TO_ALL.items():
        for sms in SMS:
            yield method, min(sms, most), partial(launch, kernel, min(sms, most), args)
    moves = [
        (receive_buffer.addresses[peer] + receive_buffer.rank * part, local.data_ptr() + peer * part, part)
        for peer in _others(receive_buffer)
    ]
    streams = [torch.cuda.Stream() for _ in moves]  # type: ignore[no-untyped-call]
    yield "copy engines, a peer after the other", 0, partial(_copy, moves)
    yield "copy engines, all peers at once", 0, partial(_copy_beside, moves, streams)


def _others(receive_buffer: ReceiveBuffer) -> list[int]:
    """Return the peers in rotation order, rank + 1 first, so that not all ranks move to the same peer."""
    return [(receive_buffer.rank + turn) % receive_buffer.ranks for turn in range(1, receive_buffer.ranks)]


def _copy(moves: list[Move]) -> None:
    for to, source, nbytes in moves:
        cuda_driver.call("cuMemcpyDtoDAsync", to, source, nbytes, torch.cuda.current_stream().cuda_stream)


def _copy_beside(moves: list[Move], streams: list[torch.cuda.Stream]) -> None:
    current = torch.cuda.current_stream()
    for move, stream in zip(moves, streams, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            _copy([move])
    for stream in streams:
        current.wait_stream(stream)


def _thread_counts(most: int) -> list[int]:
    return sorted({1, *(n for n in (2, 4, 8, 16, 32) if n <= most), max(1, most)})


def _on_cpu(receive_buffer: ReceiveBuffer, local: torch.Tensor, part: int) -> Iterator[tuple[str, int, Call]]:
    counts = _thread_counts(torch.get_num_threads())
    with ThreadPoolExecutor(counts[-1]) as pool:
        for method in ("memcpy write", "memcpy read"):
            for threads in counts:
                each, moves = -(-part // threads), []
                for peer in _others(receive_buffer):
                    there, here = (
                        receive_buffer.addresses[peer] + receive_buffer.rank * part,
                        local.data_ptr() + peer * part,
                    )
                    to, source = (there, here) if method == "memcpy write" else (here, there)
                    moves += [(to + at, source + at, min(each, part - at)) for at in range(0, part, each)]
                yield method, threads, partial(_move_all, pool if threads > 1 else None, moves)


def _move_all(pool: ThreadPoolExecutor | None, moves: list[Move]) -> None:
    list(map(_move, moves) if pool is None else pool.map(_move, moves))


def _move(move: Move) -> None:
    ctypes.memmove(*move)  # releases the GIL


def merge(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the rows of all ranks to {method, sms, us, gbs}: GB/s that leave a rank, by the slowest; best first."""
    rows = []
    for parts in zip(*by_rank, strict=True):
        us = percentiles([part["us"] for part in parts])
        gbs = parts[0]["bytes"] / us["p50"] / 1e3
        rows.append({"method": parts[0]["method"], "sms": parts[0]["sms"], "us": us, "gbs": rounded(gbs, 2)})
    return sorted(rows, key=lambda row: -float(row["gbs"]))
