"""The machine that runs rounds."""

from __future__ import annotations

import pytest

from moecomm.backends import host

from .machine import Machine


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine()


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens need forwarders, too, and rings are shorter than a round."""
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    monkeypatch.setattr(host, "ring_tokens", lambda *_: 32)
