"""Windows on GPUs: virtual ranks of one GPU, driven from one thread, and one process a GPU.  Every wait is bounded."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
import moecomm.backends
from moecomm.backends.windows import nccl

from ..backends.conftest import run_ranks
from ..conftest import Ranks, gpu_count
from ..emulator.test_windows import EVERYTHING
from ..window.test_examples import heated, reference

sys.path.append(str(Path(__file__).parents[2] / "examples"))
RANKS = 4


def load_kernels() -> None:
    """Compile and load the kernels of calls, so that no later opening waits for that."""
    moecomm.Window("self", 64, backend="lsa", timeout_s=60.0).close()


def _allocations() -> int:
    """Return how often torch has taken memory from the driver so far."""
    return int(torch.cuda.memory_stats()["num_device_alloc"])


@contextmanager
def windows(ranks: int, nbytes: int, **options: Any) -> Iterator[tuple[list[moecomm.Window], Callable[..., list[Any]]]]:
    """Open Windows of virtual ranks; the function enqueues what a callable does with each, on a stream a rank.

    All ranks share one GPU, so the callables must only enqueue: an allocation of device memory may wait for a kernel
    that waits for a rank that is not enqueued yet.  `waiting=False`: of callables in which no rank waits.
    """
    given = {"backend": "lsa", "timeout_s": 10.0, **options}
    load_kernels()
    opened = run_ranks(ranks, lambda group: moecomm.Window(group, nbytes, **given))
    for window in opened:
        assert isinstance(window, moecomm.Window), window
    streams = [torch.cuda.Stream() for _ in opened]

    def each(enqueue: Callable[[moecomm.Window], Any], *, waiting: bool = True) -> list[Any]:
        found, before = [], _allocations()
        for window, stream in zip(opened, streams, strict=True):
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                found.append(enqueue(window))
        torch.cuda.synchronize()
        assert not waiting or _allocations() == before, (
            "an allocation may wait for a kernel that waits for a later rank"
        )
        return found

    try:
        yield opened, each
    finally:
        torch.cuda.synchronize()
        for window in opened:
            window.close()


@pytest.mark.gpu1
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2, RANKS])
def test_virtual_ranks_put_signal_and_wait(ranks: int) -> None:
    rows = torch.randint(0, 1 << 40, (20, ranks, 1000), device="cuda")
    found = torch.empty_like(rows[0])
    with windows(ranks, 1 << 16) as (opened, each):
        for window in opened:
            assert window.backend == "lsa/local" and window.device.type == "cuda" and not window.local.any()
        for turn, wanted in enumerate(rows, 1):

            def exchange(window: moecomm.Window, turn: int = turn, wanted: torch.Tensor = wanted) -> None:
                me, last = window.rank, (window.rank - 1) % ranks
                window.barrier()
                window.put(wanted[me], (me + 1) % ranks, offset=256, signal=me, amount=2)
                window.wait(last, 2 * turn, peer=last)
                window.set_signal((me + 1) % ranks, 255, turn)
                found[me].copy_(window.tensor((1000,), torch.int64, offset=256))

            each(exchange)
            for window, arrived in zip(opened, found, strict=True):
                assert torch.equal(arrived, wanted[window.rank - 1])
                assert window.signal_value((window.rank - 1) % ranks) == 2 * turn
                assert window.signal_value(255) == turn
                window.check()


@pytest.mark.gpu1
@pytest.mark.timeout(120)
def test_virtual_ranks_read_from_peers_in_a_graph() -> None:
    with windows(2, 1 << 16) as (opened, each):
        out = [torch.zeros(256, device="cuda") for _ in opened]
        mine = [torch.zeros(256, device="cuda") for _ in opened]
        graphs = []

        def exchange(window: moecomm.Window) -> None:
            window.barrier()  # the peer has read what it wanted
            window.tensor((256,), torch.float32).copy_(mine[window.rank])
            window.barrier()
            out[window.rank].copy_(window.tensor((256,), torch.float32, rank=1 - window.rank))

        each(exchange)
        for window in opened:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], capture_error_mode="thread_local"):
                exchange(window)
                for call in (window.check, lambda window=window: window.signal_value(0)):
                    with pytest.raises(moecomm.BadInput, match="during a capture"):
                        call()
        for turn in range(50):
            for rank in range(2):
                mine[rank].fill_(10 * turn + rank)
            each(lambda window: graphs[window.rank].replay())
            assert [float(row[7]) for row in out] == [10 * turn + 1, 10 * turn]
        for window in opened:
            window.check()


def everything(arguments: Sequence[int]) -> Callable[[moecomm.Window], None]:
    """Return what launches the kernel of the emulator's test, on two blocks; it is loaded already."""
    from cuda.core import LaunchConfig, Stream, launch
    from window_source import cubin

    major, minor = torch.cuda.get_device_capability()
    kernel = cubin(EVERYTHING, f"sm_{major}{minor}a").get_kernel("everything")

    def run(window: moecomm.Window) -> None:
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        launch(stream, LaunchConfig(grid=2, block=64, shmem_size=8192), kernel, window.handle_address, *arguments)

    return run


@pytest.mark.gpu1
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_function_of_the_device_interface(ranks: int) -> None:
    nbytes = 1040
    with windows(ranks, 5 * nbytes) as (opened, each):
        mine = torch.randint(0, 256, (ranks, nbytes), dtype=torch.uint8, device="cuda")
        for window in opened:
            window.local[:nbytes] = mine[window.rank]
            window.local[nbytes:] = 7
        launch = everything((nbytes, 1))
        with moecomm.Window("self", 5 * nbytes, backend="lsa") as alone:  # loads the kernel
            launch(alone)
            alone.check()
        each(launch)
        for window in opened:
            window.check()
            theirs = mine[window.rank - 1]
            arrived, odd, bulk, raw = window.local[nbytes:].view(4, nbytes)
            assert torch.equal(arrived, theirs) and torch.equal(bulk, theirs)
            assert torch.equal(odd[1 : nbytes - 2], theirs[1 : nbytes - 2]) and odd[0] == 7 and odd[nbytes - 2] == 7
            assert torch.equal(raw[4 : nbytes - 4], theirs[4 : nbytes - 4]) and raw[3] == 7
            assert [window.signal_value(i) for i in range(5)] == [1, 1, 5, 1, 2]


@pytest.mark.gpu1
@pytest.mark.timeout(120)
def test_the_examples_on_virtual_ranks() -> None:
    import window_halo
    import window_ring
    from window_source import Compiled

    device, cells, steps, columns = torch.device("cuda", 0), 96, 30, 1024
    ring, heat = (
        Compiled(example.SOURCE, name, device) for example, name in ((window_ring, "ring"), (window_halo, "heat"))
    )
    with windows(1, 1 << 16) as (_, each):  # loads the kernels
        each(lambda window: (ring(window.handle_address, 64, 0), heat(window.handle_address, cells, 1)))
    with windows(RANKS, 1 << 16) as (opened, each):
        wanted = torch.rand(RANKS, columns, device=device)
        for window in opened:
            window.tensor((RANKS, columns), torch.float32)[window.rank] = wanted[window.rank]
        each(lambda window: ring(window.handle_address, 4 * columns, 0))
        for window in opened:
            window.check()
            assert torch.equal(window.tensor((RANKS, columns), torch.float32), wanted)
    with windows(RANKS, 1 << 16) as (opened, each):
        for window in opened:
            fields = window.tensor((2, cells + 2 * window_halo.HALO), torch.float32)
            fields[0, 32:-32] = heated(window.rank, cells).to(device)
        each(lambda window: heat(window.handle_address, cells, steps))
        for window in opened:
            window.check()
            fields = window.tensor((2, cells + 2 * window_halo.HALO), torch.float32)
            found = fields[steps % 2, 32:-32].cpu()
            torch.testing.assert_close(found, reference(RANKS, cells, steps)[window.rank])


@pytest.mark.gpu1
@pytest.mark.timeout(60)
def test_a_virtual_rank_that_does_not_come_is_named_and_the_context_lives() -> None:
    with windows(3, 4096, timeout_s=2.0) as (opened, each):
        each(lambda window: window.barrier() if window.rank != 2 else None)
        for window in opened[:2]:
            with pytest.raises(moecomm.Timeout) as caught:
                window.check()
            assert (caught.value.peer, caught.value.op) == (2, "barrier")
            with pytest.raises(moecomm.Timeout):
                window.barrier()
        assert torch.ones(8, device="cuda").sum().item() == 8


@pytest.mark.gpu1
@pytest.mark.timeout(60)
def test_a_virtual_rank_that_has_closed_is_named() -> None:
    with windows(2, 4096) as (opened, _):
        opened[1].close()
        opened[0].wait(0, 1, peer=1)
        with pytest.raises(moecomm.PeerLost, match="rank 1 is gone"):
            opened[0].check()


@pytest.mark.gpu1
@pytest.mark.timeout(60)
def test_abort_ends_a_kernel_of_another_rank() -> None:
    with windows(2, 4096, timeout_s=30.0) as (opened, _):
        opened[0].wait(0, 1)
        begin = time.monotonic()
        opened[1].abort()
        with pytest.raises(moecomm.Aborted) as caught:
            opened[0].check()
        assert caught.value.peer == 1 and time.monotonic() - begin < 5


@pytest.mark.gpu1
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("aborted", "least_s", "most_s"), [(False, 1.5, 6.0), (True, 0.0, 1.0)])
def test_close_waits_for_enqueued_waits(aborted: bool, least_s: float, most_s: float) -> None:
    with windows(1, 4096, timeout_s=2.0) as (opened, _):
        opened[0].wait(0, 1)
        begin = time.monotonic()
        if aborted:
            opened[0].abort()
        opened[0].close()
        assert least_s <= time.monotonic() - begin < most_s


@pytest.mark.gpu1
@pytest.mark.timeout(60)
def test_tensors_outlive_the_window() -> None:
    with windows(2, 1 << 20) as (opened, _):
        for window in opened:
            window.local.fill_(window.rank + 1)
        kept = [(window.local, window.peer(1 - window.rank)) for window in opened]
    gc.collect()
    for rank, (own, peer) in enumerate(kept):
        assert (own == rank + 1).all() and (peer == 2 - rank).all()


KINDS = ["vmm", "nccl", "gin", "nvshmem"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """One that can run here."""
    how = str(request.param)
    reason = nccl.missing() if how == "nccl" else moecomm.backends.missing(how) if how in moecomm.backends.NAMES else ""
    if reason:
        pytest.skip(f"{how}: {reason}")
    return how


def options_of(kind: str, timeout_s: float) -> dict[str, Any]:
    load_kernels()
    if kind in moecomm.backends.NAMES:
        return {"backend": kind, "timeout_s": timeout_s}
    os.environ["MOECOMM_WINDOW"] = kind
    return {"backend": "lsa", "timeout_s": timeout_s}


def _examples(rank: int, group: Any, kind: str) -> str:
    import window_halo
    import window_ring

    options, ranks = options_of(kind, 60), group.size()
    gather = window_ring.AllGather(group, 8192, **options)
    for call in range(20):
        rows = gather(torch.full((8192,), rank + 10.0 * call, device="cuda"))
        assert torch.equal(rows, (torch.arange(ranks) + 10.0 * call).cuda()[:, None].expand(-1, 8192))
    gather.window.close()
    cells, steps = 512, 200
    found = window_halo.spread(group, heated(rank, cells).cuda(), steps, **options)
    torch.testing.assert_close(found.cpu(), reference(ranks, cells, steps)[rank])
    with moecomm.Window(group, 1 << 20, **options) as window:
        for turn in range(1, 101):
            source = torch.full((1 << 17,), rank * 1000 + turn, dtype=torch.int64, device="cuda")
            window.put(source, (rank + 1) % ranks, signal=0)
            window.wait(0, turn, peer=(rank - 1) % ranks)
            here = window.tensor((1 << 17,), torch.int64)
            assert bool((here == (rank - 1) % ranks * 1000 + turn).all())
            window.barrier()
        window.check()
    return "done"


@pytest.mark.gpu2
@pytest.mark.timeout(180)
def test_processes_gather_exchange_halos_and_put(gpu_ranks: Ranks, kind: str) -> None:
    count = gpu_count()
    gpu_ranks.start(count, _examples, kind)
    assert gpu_ranks.results(count, timeout_s=150) == dict.fromkeys(range(count), "done")


def _until_a_peer_dies(rank: int, group: Any, kind: str, how: str) -> Any:
    window = moecomm.Window(group, 4096, **options_of(kind, 3))
    window.barrier()
    window.check()
    if rank == 1 and how == "silent":
        time.sleep(30)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        window.barrier()
        window.check()
    except moecomm.RoundFailed as error:
        took = time.monotonic() - begin
        alive = torch.ones(8, device="cuda").sum().item()
        window.close()
        return type(error).__name__, error.peer, took, alive
    return "no error"


@pytest.mark.gpu2
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["killed", "silent"])
def test_survivors_name_the_rank_and_keep_their_context(gpu_ranks: Ranks, kind: str, how: str) -> None:
    count = gpu_count()
    gpu_ranks.start(count, _until_a_peer_dies, kind, how)
    for rank, result in gpu_ranks.results(count - 1, timeout_s=90).items():
        assert not isinstance(result, BaseException), result
        name, peer, seconds, alive = result
        assert rank != 1 and peer == 1 and alive == 8
        assert name == ("PeerLost" if how == "killed" else "Timeout")
        assert seconds < (2.0 if how == "killed" else 5.0)


def _triton(rank: int, group: Any) -> str:
    from window_halo_triton import spread
    from window_ring_triton import AllGather

    ranks, cells, steps = group.size(), 1000, 200
    for memory in (None, "torch"):  # with signals behind the memory, and elsewhere
        options: dict[str, Any] = {"backend": "lsa", "timeout_s": 60, "memory": memory}
        gather = AllGather(group, 1000, **options)
        for call in range(20):
            rows = gather(torch.full((1000,), rank + 10.0 * call, device="cuda"))
            assert torch.equal(rows, (torch.arange(ranks) + 10.0 * call).cuda()[:, None].expand(-1, 1000))
        gather.window.close()
        found = spread(group, heated(rank, cells).cuda(), steps, **options)
        torch.testing.assert_close(found.cpu(), reference(ranks, cells, steps)[rank])
    return "done"


@pytest.mark.gpu2
@pytest.mark.timeout(150)
def test_the_examples_in_triton(gpu_ranks: Ranks) -> None:
    pytest.importorskip("triton")
    count = gpu_count()
    gpu_ranks.start(count, _triton)
    assert gpu_ranks.results(count, timeout_s=120) == dict.fromkeys(range(count), "done")


def _alone_in_triton(rank: int, group: Any) -> str:
    """A wait that nobody ends is a Timeout, and a rank alone gathers its row."""
    from window_ring_triton import AllGather, ring

    import moecomm.triton as mt

    torch.cuda.set_device(0)
    gather = AllGather("self", 1000, backend="lsa", timeout_s=60.0)
    assert torch.equal(gather(torch.arange(1000.0, device="cuda"))[0], torch.arange(1000.0, device="cuda"))
    gather.window.close()
    windows = run_ranks(2, lambda ranks: moecomm.Window(ranks, 1 << 16, backend="lsa", timeout_s=2.0))
    ring[(1,)](mt.handle(windows[0]), 1000, 0, 1024)
    with pytest.raises(moecomm.Timeout) as caught:
        windows[0].check()
    for window in windows:
        window.close()
    return f"{caught.value.peer}"


@pytest.mark.gpu1
@pytest.mark.timeout(120)
def test_a_wait_in_triton_that_nobody_ends_is_a_timeout(gpu_ranks: Ranks) -> None:
    pytest.importorskip("triton")
    gpu_ranks.start(1, _alone_in_triton)
    assert gpu_ranks.results(1, timeout_s=100) == {0: "1"}
