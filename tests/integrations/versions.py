"""Runs the signature tests against the newest and the oldest supported version of each framework.

    python -m tests.integrations.versions [framework ...]

Each version is installed without its dependencies into a folder of its own, which goes in the end.  The tests read
sources there, and import nothing of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[2]
CALLS = "tests/integrations/test_call_sites.py"


class Framework(NamedTuple):
    """Versions, the oldest first, and the tests that read their sources."""

    package: str
    versions: tuple[str, ...]
    tests: tuple[str, ...]


# vLLM and SGLang have some hundred MB a version; their older versions have other interfaces.
FRAMEWORKS = {
    "torchtitan": Framework("torchtitan", ("0.3.0",), ("tests/integrations/test_torchtitan.py", CALLS)),
    "transformer-engine": Framework("transformer-engine", ("2.19.0", "2.20.2"), ("tests/compat/test_te_ep.py",)),
    "sglang": Framework("sglang", ("0.5.22", "0.5.23"), ("tests/integrations/test_sglang.py", CALLS)),
    "vllm": Framework("vllm", ("0.33.0",), ("tests/integrations/test_vllm_signatures.py", CALLS)),
    "flashinfer": Framework("flashinfer-python", ("0.7.2",), ("tests/integrations/test_flashinfer.py",)),
    "megatron": Framework("megatron-core", ("0.16.1",), (CALLS,)),
}
# Tests that read sources, by their names.
SELECTED = "installed or signatures or its_dispatcher or overrides or metadata or deepeps or looks_for or of_vllm"


def check(framework: Framework, version: str) -> bool:
    """Return whether the tests pass beside this version."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"{framework.package}=={version}"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, wanted]
        if subprocess.run(pip, check=False).returncode:
            print(f"{wanted}: not installed", flush=True)
            return False
        # Behind what is installed: a framework must not bring its own copy of anything else.
        paths = [str(ROOT), str(Path(torch.__file__).parents[1]), folder]
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTED, *framework.tests]
        ran = subprocess.run(
            tests,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            check=False,
            capture_output=True,
            text=True,
        )
        last = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ran.stderr.strip()[-200:]
        print(f"{wanted}: {last}", flush=True)
        if ran.returncode:
            print(ran.stdout)
        return ran.returncode == 0


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in FRAMEWORKS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(FRAMEWORKS)}", file=sys.stderr)
        return 2
    chosen = [FRAMEWORKS[name] for name in names or FRAMEWORKS]
    passed = [check(framework, version) for framework in chosen for version in framework.versions]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
