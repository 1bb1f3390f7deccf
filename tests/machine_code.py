"""Compare the machine code of two trees: a renaming must not change any kernel.

python -m tests.machine_code write FILE.json       # in each tree: compiles every kernel that the tests want
python -m tests.machine_code compare OLD.json NEW.json
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from moecomm.gpu.cubin import executable_sections
from tests import compiled

MODULES = ("device.test_compile", "device.test_plain_kernels", "fused.test_compute", "fused.test_schedules")


def digest(kernel: compiled.Kernel) -> str:
    """A digest of the executable sections, which hold no names."""
    cubin = compiled.compile_kernel(kernel).cubin
    return hashlib.sha256(b"".join(sorted(executable_sections(cubin)))).hexdigest()


def write(path: Path) -> None:
    """Digests of all kernels that the modules declare, in the order in which they declare them."""
    modules = [importlib.import_module(f"tests.{name}") for name in MODULES]
    kernels = [k for module in modules for name in ("KERNELS", "SPECS") for k in getattr(module, name, {}).values()]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        path.write_text(json.dumps(list(pool.map(digest, kernels)), indent=1) + "\n")


def compare(old: Path, new: Path) -> int:
    """Print how many kernels are equal.  Nonzero if any differs."""
    before, after = (Counter(json.loads(path.read_text())) for path in (old, new))
    equal = (before & after).total()
    print(f"{before.total()} kernels before, {after.total()} after, {equal} with equal machine code")
    return int(before != after)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", path]:
            write(Path(path))
        case ["compare", old, new]:
            sys.exit(compare(Path(old), Path(new)))
        case _:
            sys.exit(__doc__)
