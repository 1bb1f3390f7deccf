"""Fixtures of the backends' tests: a driver without a GPU, and ranks that are threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from moecomm.gpu import cuda_driver
from moecomm.ranks.rendezvous import LocalRank, local_ranks
from tests.backends.fake_driver import FakeDriver


@pytest.fixture
def install_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FakeDriver], FakeDriver]]:
    """Makes `cuda.bindings.driver` the one given, and torch's two calls that need a GPU harmless."""

    def install(fake: FakeDriver) -> FakeDriver:
        bindings, package = ModuleType("cuda.bindings"), ModuleType("cuda")
        bindings.driver = fake  # type: ignore[attr-defined]
        package.bindings = bindings  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda", package)
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)  # type: ignore[arg-type]
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
        cuda_driver.driver.cache_clear()
        return fake

    yield install
    cuda_driver.driver.cache_clear()


def run_ranks(ranks: int, body: Callable[[LocalRank], Any]) -> list[Any]:
    """Return what body returned or raised on each rank; every rank is a thread named rank<n>."""
    found: list[Any] = [None] * ranks

    def run(group: LocalRank) -> None:
        try:
            found[group.rank] = body(group)
        except BaseException as error:  # noqa: BLE001 - the test looks at it; pytest.raises() fails by no Exception
            found[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,), name=f"rank{group.rank}") for group in local_ranks(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
        assert not thread.is_alive(), "a rank hangs"
    return found


def all_ranks(ranks: int, body: Callable[[LocalRank], Any]) -> list[Any]:
    """Return what body returned on each rank; raise what the first of them raised."""
    found = run_ranks(ranks, body)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found
