"""Ranks over the plugin and a mock of NCCL's proxy: puts, gets and signals against an oracle, and peers that fail.

Each case runs with the plugin as it was built, under AddressSanitizer and UBSan, and, where ranks are threads, under
ThreadSanitizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .build import ASAN, TSAN, build_driver
from .conftest import Drive, run_driver

LIED = "PeerLied: "
CARD = "PeerLied: registering memory with rank 1: "
NO_WORD = f"{LIED}rank 1 signals a word that is not in any registered region"
# What a case is called, its scenario, its options, and what the plugin says, where the scenario does not look itself.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    # Every byte is where it was put, and was there before its signal.
    "two ranks": ("random", {"slice": 500_000}, ""),
    "three ranks": ("random", {"ranks": 3, "seed": 3, "slice": 500_000}, ""),
    "a rank alone": ("random", {"ranks": 1}, ""),
    "short queues": ("random", {"contexts": 16, "queue": 2, "ops": 40, "slice": 40_000, "epochs": 1}, ""),
    # More signals than a mailbox has places.
    "long queues": ("random", {"queue": 256, "contexts": 8, "ops": 256, "slice": 200_000, "epochs": 1}, ""),
    "the newer table": ("random", {"table": 16, "slice": 100_000}, ""),
    "a slow peer": ("random", {"lag": 1000, "ops": 30, "epochs": 1, "slice": 300_000}, ""),
    "threads": ("random", {"mode": "threads", "ranks": 3, "slice": 100_000}, ""),
    "communicators come and go": ("again", {"ranks": 3}, ""),
    # Nothing holds up NCCL's thread: the fake driver's calls wait where real ones may.
    "no copy ends": ("crowded", {"queue": 256}, ""),
    "a registration fails": ("half_registered", {"ranks": 3, "timeout_ms": 3000}, ""),
    # A signal whose memory is given back while it waits is dropped.
    "a late signal": ("late", {}, ""),
    "a copy under way": ("copied_into", {}, ""),
    "a late signal to oneself": ("late-own", {}, ""),
    # Broken, silent and absent peers: a named error, at once or after the timeout.
    "killed": ("killed", {"ranks": 4}, ""),
    "killed while watched": ("killed-watched", {"ranks": 4}, ""),
    "silent": ("silent", {"timeout_ms": 700}, ""),
    "left": ("left", {}, ""),
    "absent": ("absent-1", {"timeout_ms": 500}, ""),
    "absent behind a listener": ("absent-0", {"timeout_ms": 500}, ""),
    "another host": ("elsewhere-host", {}, ""),
    "another version": ("elsewhere-version", {}, ""),
    "nonsense": ("misuse", {"table": 16}, ""),
    "strangers": ("strangers", {}, ""),
    "no descriptors": ("no_descriptors", {}, ""),
    "never a descriptor": ("no_descriptors-ever", {"timeout_ms": 1000}, ""),
    "no descriptor for a window": ("no_descriptor_for_window", {}, ""),
    # A lie is named, and not stored.
    "mail beyond the room": ("liar-mail-count", {}, f"{LIED}rank 1 has posted more mail than there is room for"),
    **{f"mail {lie}": (f"liar-mail-{lie}", {}, NO_WORD) for lie in ("signal", "region", "half", "wrap")},
    "card magic": ("liar-card-magic", {}, f"{CARD}rank 1 sends no card of a region"),
    "card short": ("liar-card-short", {}, f"{CARD}a message has another length"),
    "card order": ("liar-card-order", {}, f"{CARD}rank 1 registers region 5 where this rank registers 4"),
    "card no window": ("liar-card-no-window", {}, f"{CARD}rank 1 gives a window that is none"),
    "card beyond": ("liar-card-beyond", {}, f"{CARD}rank 1 gives a window that is none"),
    "card not mapped": (
        "liar-card-not-mapped",
        {},
        "registering memory with rank 1: this GPU can't map memory of rank 1",
    ),
}


def check(drive: Drive, name: str) -> None:
    scenario, options, says = CASES[name]
    assert says in drive(scenario, **options)


@pytest.mark.parametrize("name", CASES)
def test_scenario(drive: Drive, name: str) -> None:
    check(drive, name)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, fake_cuda: Path) -> Path:
    return build_driver(tmp_path_factory.mktemp("asan"), fake_cuda, ASAN, with_plugin=True)


@pytest.mark.sanitized  # UBSan opens a descriptor to look at an object
@pytest.mark.parametrize("name", [name for name in CASES if "descriptor" not in name])
def test_memory(watched: Path, fake_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # The driver never frees the windows of its ranks.  Leaks of the plugin are errors, where ranks are threads:
    # processes end by _exit.
    known = tmp_path / "known_leaks"
    known.write_text("leak:fake_allocate\n")
    monkeypatch.setenv("LSAN_OPTIONS", f"suppressions={known}:print_suppressions=0")
    monkeypatch.setenv("UBSAN_OPTIONS", "print_stacktrace=1")

    def drive(scenario: str, **options: Any) -> str:
        return run_driver(watched, watched.with_name("libplugin.so"), fake_cuda, scenario, **options)

    check(drive, name)


@pytest.mark.long
def test_threads_under_sanitizer(fake_cuda: Path, tmp_path: Path) -> None:
    driver = build_driver(tmp_path, fake_cuda, TSAN, with_plugin=True)
    plugin = driver.with_name("libplugin.so")
    run_driver(driver, plugin, fake_cuda, "random", times="1", mode="threads", ops=24, slice=20_000, epochs=2)
