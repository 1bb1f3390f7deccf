"""Fixtures: ranks as threads and as processes, and GPU marks that skip, saying so, where there are too few GPUs."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import queue
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from . import shared_run, slow
from .compiled import compiling

GPU_MARKS = {"gpu1": 1, "gpu2": 2, "gpu4": 4, "gpu8": 8}
GPU_COUNTS = [
    pytest.param(2, marks=pytest.mark.gpu2),
    pytest.param(4, marks=pytest.mark.gpu4),
    pytest.param(8, marks=pytest.mark.gpu8),
]  # of processes, one each

if torch.cuda.device_count() == 0:  # which does not start CUDA
    # Here and in all processes that tests start: tensors are small, cores few and busy, and threads that share a
    # product wait for each other longer than one takes alone.  On GPUs a reference may be large.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def gpu_count() -> int:
    """The number of processes, one a GPU, of a test for several GPUs."""
    return min(8, torch.cuda.device_count())


def share_cores(processes: int) -> None:
    """Among processes that each compute a reference of large rows, on a machine with GPUs."""
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // processes)))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    shared_run.share(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    shared_run.tell(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return shared_run.scheduler(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow.mark(items)
    gpus, more_s = torch.cuda.device_count(), max(0, config.getoption("--gpu-cases") - 1000) / 10
    for item in items:
        limit = item.get_closest_marker("timeout")
        if more_s and limit and any(item.get_closest_marker(mark) for mark in GPU_MARKS):
            item.add_marker(pytest.mark.timeout(limit.args[0] + more_s), append=False)
        for mark, need in GPU_MARKS.items():
            if item.get_closest_marker(mark) and gpus < need:
                item.add_marker(pytest.mark.skip(reason=f"needs {need} GPU(s), this machine has {gpus}"))
    items.sort(key=turn)


def turn(item: pytest.Item) -> int:
    """Tests of the emulator come first, because one process runs them all and takes longest; tests that wait for what
    goes on beside the others come last.
    """
    if item.path.parent.name == "emulator":
        return -1
    return 2 if has_begun(item) else 1 if item.get_closest_marker("compiled") else 0


def has_begun(item: pytest.Item) -> bool:
    """Return whether it waits for what its module has begun before the first test."""
    return hasattr(getattr(item, "module", None), "begin")


def is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


def kernels_of(items: list[pytest.Item]) -> list[Any]:
    """The kernels that these tests compile: `compiled(kernels)` has them by the `name` of a test's case."""
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("compiled")) and mark.args]
    return [mark.args[0][item.callspec.params["name"]] for item, mark in marked]  # type: ignore[attr-defined]


class Begun:
    """The results of `begin(config, long)`, a context, of modules, by name.  `long`: a long test was selected."""

    def __init__(self, config: pytest.Config, long: bool, stack: ExitStack) -> None:
        self._config, self._long, self._stack = config, long, stack
        self._found: dict[str, Any] = {}

    def begin(self, name: str) -> None:
        self._found[name] = self._stack.enter_context(sys.modules[name].begin(self._config, self._long))

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            self.begin(name)
        return self._found[name]


@pytest.fixture(scope="session", autouse=True)
def begun(request: pytest.FixtureRequest) -> Iterator[Begun]:
    """The work that modules begin before the first test.

    Most tests wait, or use one core.  What takes long, needs no fixture and is no matter of deadlines runs beside them.
    One of several processes does not know its tests yet: it begins such work when a test asks for it.
    """
    items, alone = request.session.items, not shared_run.is_one_of_several(request.config)
    with ExitStack() as stack:
        if any(item.get_closest_marker("compiled") for item in items):
            stack.enter_context(compiling(kernels_of(items) if alone else ()))
        found = Begun(request.config, any(is_long(item) for item in items), stack)
        if alone:
            modules = {item.module for item in items if isinstance(item, pytest.Function) and has_begun(item)}
            for module in modules:
                found.begin(module.__name__)
        yield found


@pytest.fixture(scope="module", autouse=True)
def collected() -> None:
    """Objects from before a module's tests are left out of garbage collections.  Tests collect, to count what is left:
    with all of torch to look at, that takes half a second.
    """
    gc.collect()
    gc.freeze()


STACKS_S = 60  # the most that a rank takes to write its stacks and end, on a machine under load


class Ranks:
    """Processes of one gloo group.  Each runs `body(rank, group, *args)`; what it returns or raises comes back.

    `on_gpus`: each takes a GPU first, in turn.
    """

    def __init__(self, directory: Path, method: str, on_gpus: bool = False) -> None:
        self._directory, self._on_gpus = directory, on_gpus
        self._context: Any = multiprocessing.get_context(method)
        self._runs = 0
        self.processes: list[Any] = []
        self.died: Any = self._context.Value("d", lock=False)  # monotonic time at which a rank was killed
        self._queue: Any = None

    def start(self, ranks: int, body: Callable[..., Any], *args: Any) -> None:
        self._runs += 1
        self._queue = self._context.Queue()
        store = self._directory / f"store{self._runs}"
        self.processes = [
            self._context.Process(
                target=_rank_main, args=(self._queue, str(store), rank, ranks, self._on_gpus, body, args)
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def kill(self, rank: int) -> None:
        self.died.value = time.monotonic()
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def results(self, expected: int, timeout_s: float = 60) -> dict[int, Any]:
        """Return what the first `expected` ranks to finish returned, or raised; end the others.

        Where that takes too long, ranks write where each of their threads is, and end.  Their Buffers' `timeout_s` must
        be well below, so that a rank that waits for another says so itself.
        """
        try:
            found = dict(self._queue.get(timeout=timeout_s) for _ in range(expected))
        except queue.Empty:
            for process in self.processes:  # one after the other: their lines would mix
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)
                    process.join(timeout=STACKS_S)
            raise
        for rank in found:
            self.processes[rank].join(timeout=timeout_s)
        self.stop()
        return found

    def run(self, ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(ranks, body, *args)
        found = self.results(ranks)
        for result in found.values():
            if isinstance(result, BaseException):
                raise result
        return [found[rank] for rank in range(ranks)]

    def stop(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank_main(
    results: Any, store: str, rank: int, ranks: int, on_gpus: bool, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    faulthandler.register(signal.SIGUSR1, file=2, chain=True)  # then ends the process
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no listener that other machines reach
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
        )
        if on_gpus:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        result = body(rank, dist.group.WORLD, *args)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
        traceback.print_exc()
        result = error
    results.put((rank, result))
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Leaves nothing that torch.compile has compiled to other tests."""
    yield
    torch.compiler.reset()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """CPU processes of one gloo group, stopped at the end."""
    group = Ranks(tmp_path, "fork")
    yield group
    group.stop()


@pytest.fixture
def computing_ranks(tmp_path: Path) -> Iterator[Ranks]:
    """As `ranks`, forked from a process without threads, for bodies at the top of a module that multiply matrices.

    A product of torch in a process that was forked beside threads was seen to wait forever for one of them, in MKL.
    """
    group = Ranks(tmp_path, "forkserver")
    yield group
    group.stop()


@pytest.fixture
def gpu_ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Processes of one gloo group that take GPUs in turn; spawned, because CUDA does not survive a fork."""
    group = Ranks(tmp_path, "spawn", on_gpus=True)
    yield group
    group.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="random cases to run against the reference: 1000, or 8000 of long ones")
    parser.addoption(
        "--domain-cases", type=int, help="random cases on CPU ranks in several domains: 60, or 600 of long ones"
    )
    parser.addoption("--race-cases", type=int, help="random cases on CPU ranks under ThreadSanitizer: 400 of long ones")
    parser.addoption("--gpu-cases", type=int, default=1000, help="random cases on GPUs")
    parser.addoption(
        "--under-sanitizer",
        action="store_true",
        help="virtual ranks as compute-sanitizer needs them: docs/maintainers/testing.md",
    )
    parser.addoption(
        "--repeats", type=int, help="how often tests of failures repeat one: a few times, or more of long ones"
    )
    parser.addoption("--seed", type=int, default=0, help="which random cases")
