"""The shims of this tree, compiled once.  Without compiler or headers their tests skip, saying what the build said.

With pyproject's extra `shims` installed none skips.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from moecomm import shims

ROOT = Path(__file__).parent.parent.parent


def build_shims(into: Path, environment: Mapping[str, str] | None = None) -> None:
    """What building a wheel does, into `into`/moecomm/shims."""
    line = [sys.executable, "setup.py", "--quiet", "build_shims", f"--build-lib={into}"]
    told = subprocess.run(
        line, cwd=ROOT, env=os.environ | (environment or {}), capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the shims of this tree."""
    into = tmp_path_factory.mktemp("build")
    build_shims(into)
    return into / "moecomm" / "shims"


@pytest.fixture
def directory(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as that of moecomm."""
    monkeypatch.setattr(shims, "DIRECTORY", built)
    return built
