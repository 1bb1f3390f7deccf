"""Fixtures: vLLM's parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.integrations import vllm_stub as stub


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[stub.MicroBatches]:
    """vLLM's parts in the place of vLLM, installed or not."""
    found = stub.MicroBatches()
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "deep_ep", "nixl_ep")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in stub.modules(found).items():
        monkeypatch.setitem(sys.modules, name, module)
    stub.forget_integration()
    yield found
    for name in [name for name in sys.modules if name.split(".")[0] in ("deep_ep", "nixl_ep")]:
        del sys.modules[name]
    stub.forget_integration()
