"""Shims from what the extra `shims` installs: none of the tests of this folder skips."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..fresh_python import PACKAGES, run_python

pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kernels_link_with_the_packages_of_the_extra(tmp_path: Path) -> None:
    """GDAKI's and IBGDA's code included, for sm_90a.  It downloads the packages."""
    extra = re.search(r"^shims = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert extra
    packages = re.findall(r'"([^"]+)"', extra[1])
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), *packages], check=True
    )
    paths = [str(tmp_path), str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    tests = [HERE / name for name in ("test_linking.py", "test_build.py")]
    how = ("-m", "pytest", "--rootdir", ROOT, "-n", "0", "-m", "long or not long")
    ran = run_python(*how, *tests, timeout_s=1500, PYTHONPATH=os.pathsep.join(paths))
    counted = (ran.stdout.splitlines() or [""])[-1]
    passed = ran.returncode == 0 and re.search(r"\d+ passed", counted) and "skipped" not in counted
    assert passed, ran.stdout + ran.stderr
