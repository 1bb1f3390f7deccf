"""The compiler that kernels are built with."""

from __future__ import annotations

import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from moecomm.gpu import loader


def test_threads_import_the_compiler_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one process compile at once.  A second thread finds cuda.core in sys.modules before its names are."""
    importing = threading.Lock()

    def import_module(name: str) -> SimpleNamespace:
        assert importing.acquire(blocking=False), f"{name} is half imported"
        time.sleep(0.01)
        importing.release()
        return SimpleNamespace(Program=name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(loader._core) for _ in range(4)]
        assert [core.result().Program for core in found] == ["cuda.core"] * 4
