"""Which steps of tests/gpu/run passed, failed or were skipped: when, at which commit, on what.

The runner adds a row for each step to gpu-tests.json among the logs.  It begins with the rows of
bench/results/gpu-tests.json, so that a copy of it there keeps both.  Of a step on a machine, the last row of each
outcome is kept, in the order of time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.gpu.processes import ENVIRONMENT, ROOT

NAME = "gpu-tests.json"
KEPT = ROOT / "bench" / "results" / NAME
_KEY = ("step", "on", "outcome")
_PASSED = re.compile(r"\b(\d+) passed\b")  # in the last line of pytest
_ORIGIN = "import json; from moecomm_bench import results; print(json.dumps(results.origin()))"
_writing = threading.Lock()


def note(logs: Path, step: str, fine: bool, tests: bool, last_line: str, seconds: float) -> None:
    """Add a row.  `tests`: the step runs pytest; one that passed without a test that ran was skipped."""
    found = _PASSED.search(last_line) if tests else None
    count = int(found[1]) if found else 0
    outcome = "failed" if not fine else "skipped" if tests and not count else "passed"
    with _writing:
        about = _origin()
        row: dict[str, Any] = {"step": step, "on": _on(), "outcome": outcome, "tests": count, "seconds": round(seconds)}
        row |= {"date": about["date"], "commit": about["commit"]}
        before = [old for old in _rows(logs) if any(old[key] != row[key] for key in _KEY)]
        document = {"what": KEPT.stem, **about, "command": "tests/gpu/run", "rows": [*before, row]}
        (logs / NAME).write_text(json.dumps(document, indent=1) + "\n")


def has_passed(logs: Path, step: str) -> bool:
    """Return whether a step has passed here, at this commit, on these GPUs."""
    wanted = {"step": step, "on": _on(), "outcome": "passed", "commit": _origin()["commit"]}
    return any(wanted.items() <= row.items() for row in _rows(logs))


def _on() -> str:
    gpus = _origin()["machine"]["gpus"]
    return f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"


@lru_cache(maxsize=1)
def _origin() -> dict[str, Any]:
    """Return what results say of machine and commit.  Another process asks, so that this one has no CUDA context."""
    words = [sys.executable, "-c", _ORIGIN]
    spec = importlib.util.find_spec("moecomm")
    assert spec is not None and spec.origin is not None
    home = Path(spec.origin).parent.parent  # of the one that is built
    how: dict[str, Any] = {"cwd": home, "env": {**os.environ, **ENVIRONMENT}, "timeout": 120}
    found = subprocess.run(words, **how, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def _rows(logs: Path) -> list[dict[str, Any]]:
    """Return the rows of this run, or those that are kept."""
    for path in (logs / NAME, KEPT):
        if path.exists():
            return list(json.loads(path.read_text())["rows"])
    return []
