"""The C++ twin under ThreadSanitizer and AddressSanitizer, and with one of its orders left out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="wants g++")


def run(tmp_path: Path, csrc: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "threads"
    command = ["g++", "-std=c++17", "-O1", "-g1", "-pthread", *flags, f"-I{csrc / 'include'}"]
    subprocess.run([*command, str(Path(__file__).parent / "threads.cpp"), "-o", str(program)], check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_twin_has_no_races_and_no_bad_accesses(tmp_path: Path, sanitizer: str) -> None:
    found = run(tmp_path, ROOT / "csrc", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("add_release(control_word<u64>", "__atomic_fetch_add(control_word<u64>"),
        ("            seen = load_acquire(word);\n", "            seen = load_relaxed(word);\n"),
    ],
    ids=["release", "acquire"],
)
def test_an_order_that_is_left_out_is_a_race(tmp_path: Path, old: str, new: str) -> None:
    csrc = tmp_path / "csrc"
    for folder in ("protocol", "window", "include"):
        shutil.copytree(ROOT / "csrc" / folder, csrc / folder)
    header = csrc / "window" / "window.h"
    text = header.read_text()
    assert text.count(old) == 1
    changed = text.replace(old, new)
    if "fetch_add" in new:
        changed = changed.replace("signal_at(index)), amount);", "signal_at(index)), amount, __ATOMIC_RELAXED);")
    header.write_text(changed)
    found = run(tmp_path, csrc, "-fsanitize=thread")
    assert found.returncode != 0 and "data race" in found.stderr
