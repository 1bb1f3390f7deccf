"""The shims of this tree, compiled once.  Without compiler or headers their tests skip, saying what the build said.

With pyproject's extra `shims` installed none skips.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moecomm import shims
from moecomm.shims.build import build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the shims of this tree."""
    into = tmp_path_factory.mktemp("shims")
    build(into, Path(__file__).parent.parent.parent / "csrc", {})
    return into


@pytest.fixture
def directory(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as that of moecomm."""
    monkeypatch.setattr(shims, "DIRECTORY", built)
    return built
