"""The machine that runs rounds, and marks of all tests of this folder."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from moecomm.backends import host

from .machine import Machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacks = platform.machine() != "x86_64" or shutil.which("g++") is None
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skipif(lacks, reason="wants x86-64 and g++"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine()


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens need forwarders, too, and rings are shorter than a round."""
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    monkeypatch.setattr(host, "ring_tokens", lambda *_: 32)
