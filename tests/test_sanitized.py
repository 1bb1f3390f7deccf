"""The extension module under AddressSanitizer and UndefinedBehaviorSanitizer: the tests that call it most."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .test_packaging import FILES

pytestmark = [pytest.mark.sanitized, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parent.parent
FLAGS = "-g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
# Bindings by themselves, every kind of round between threads and between processes, their failures, bad arguments.
TESTS = (
    *("runtime", "ops/test_rounds.py", "ops/test_failures.py", "ops/test_moe.py", "test_bad_input.py"),
    *(
        "test_balance.py",
        "test_begin_end.py",
        "test_call_sequences.py",
        "test_domains.py",
        "core/test_memory.py",
        "test_other_handles.py",
    ),
    *("test_processes.py", "test_world.py::test_bad_input_on_some_ranks_leaves_all_out_of_step", "test_wrap.py"),
)
# AddressSanitizer does not prepare its allocator for fork(): where another thread allocates at that moment, the
# child inherits a lock that nobody opens.  These tests fork while other threads run.
EXCEPT = (
    "runtime/test_rounds.py::test_after_a_fork",
    "test_processes.py::test_a_forked_child_does_not_speak_for_its_parent",
)


def library(name: str) -> str:
    """The path of a library of the compiler's."""
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sanitized moecomm, built from a copy: objects of another build would pass as up to date."""
    work = tmp_path_factory.mktemp("sanitized")
    for folder in ("csrc", "moecomm"):
        shutil.copytree(ROOT / folder, work / "tree" / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, work / "tree")
    setup = work / "tree" / "setup.py"
    built = setup.read_text()
    assert built.count('"-O3"') == 1
    setup.write_text(built.replace('"-O3"', '"-O1"'))  # half the time of the compiler, and no check less
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", work / "site", work / "tree"]
    flags = {"CFLAGS": FLAGS, "CXXFLAGS": FLAGS, "LDFLAGS": FLAGS}
    subprocess.run(command, env={**os.environ, **flags}, check=True)
    return work / "site"


@pytest.fixture
def environment(site: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(site),
        # The interpreter is not sanitized, so the runtime must be loaded first.  It looks for libstdc++ at that time.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so.6')}",
        # The interpreter and torch keep memory until the process ends.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def test_the_sanitizer_is_there(site: Path, environment: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import ctypes, moecomm._native as native; print(native.__file__, flush=True);"
        "memory = ctypes.CDLL(None).malloc; memory.restype = ctypes.c_void_p; at = ctypes.c_void_p(memory(8));"
        "ctypes.CDLL(None).free(at); ctypes.CDLL(None).memset(at, 0, 8)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    module = Path(done.stdout.strip())
    assert module.is_relative_to(site)
    assert b"__asan_report_load8" in module.read_bytes() and b"__ubsan_handle" in module.read_bytes()
    assert done.returncode != 0 and "AddressSanitizer: heap-use-after-free" in done.stderr


def test_calls_of_the_module(environment: dict[str, str], tmp_path: Path) -> None:
    """From a folder without a moecomm of its own, which would be imported in place of the sanitized one."""
    options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests, *(f"--deselect=tests/{name}" for name in EXCEPT)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout[-20000:]
    # A name that no longer exists would deselect nothing: every other test was deselected because it is long.
    for file, name in (excepted.split("::") for excepted in EXCEPT):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text()
