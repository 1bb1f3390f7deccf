"""Fixtures of tests of tuning tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moecomm.gpu import tuning


@pytest.fixture
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No table of whoever runs the tests, and nothing left of the last test."""
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path / "cache"))
    tuning.forget()
    yield
    tuning.forget()
