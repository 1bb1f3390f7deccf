"""Programs in a fresh interpreter, with the moecomm that is tested: installed, or built in place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import moecomm

PACKAGES = Path(moecomm.__file__).parent.parent


def beside_packages(cwd: Path = PACKAGES, **variables: str) -> dict[str, Any]:
    """Where a Python starts, and its environment.  `-c` and `-m` look into that folder first: never the repository,
    whose moecomm may not have been built.
    """
    return {"cwd": cwd, "env": {**os.environ, "PYTHONPATH": str(PACKAGES), **variables}}


def run_python(
    *words: str | Path, cwd: Path = PACKAGES, timeout_s: int = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` with these environment variables.  Do not judge its exit code."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout_s, "check": False}
    return subprocess.run([sys.executable, *words], **how, **beside_packages(cwd, **variables))
