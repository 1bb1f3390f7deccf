"""The machine that runs rounds."""

from __future__ import annotations

import pytest

from moecomm.backends import host
from moecomm.testing import check

from .machine import Machine


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine()


@pytest.fixture(autouse=True)
def wires_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let random cases draw what kernels have."""
    monkeypatch.setattr(check, "takes_fp8", lambda rounds: not rounds.settings.is_multi_domain)


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens need forwarders, too, and rings are shorter than a round."""
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    monkeypatch.setattr(host, "ring_tokens", lambda *_: 32)
