"""Full RELRO, stack protection and checked library calls in both libraries, as their ELF files show."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moecomm import _native, rma_plugin
from moecomm.errors import Unsupported

LIBRARIES = {"_native": lambda: Path(_native.__file__), "moecomm_rma": rma_plugin.path}


def readelf(option: str, library: Path) -> str:
    return subprocess.run(
        ["readelf", "--wide", option, str(library)], capture_output=True, text=True, check=True, timeout=30
    ).stdout


def segments(library: Path) -> dict[str, list[str]]:
    """Flags of the program headers, by type."""
    found: dict[str, list[str]] = {}
    for line in readelf("--program-headers", library).splitlines():
        words = line.split()
        if len(words) >= 8 and words[1].startswith("0x"):  # type, offset, two addresses, two sizes, flags, alignment
            found.setdefault(words[0], []).append("".join(words[6:-1]))
    return found


def imports(library: Path) -> set[str]:
    lines = [line.split() for line in readelf("--dyn-syms", library).splitlines()]
    return {words[7].partition("@")[0] for words in lines if len(words) >= 8 and words[6] == "UND"}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Path:
    try:
        return LIBRARIES[request.param]()
    except Unsupported as error:
        pytest.skip(str(error))


def test_relocations_are_read_only_before_code_runs(library: Path) -> None:
    assert "GNU_RELRO" in segments(library)
    flags = [line for line in readelf("--dynamic", library).splitlines() if "(FLAGS)" in line or "(FLAGS_1)" in line]
    assert any("(FLAGS)" in line and "BIND_NOW" in line for line in flags)
    assert any("(FLAGS_1)" in line and "NOW" in line for line in flags)


def test_no_memory_is_both_written_and_executed(library: Path) -> None:
    found = segments(library)
    assert found["GNU_STACK"] == ["RW"]
    assert [flags for flags in found["LOAD"] if "W" in flags and "E" in flags] == []


def test_frames_have_canaries_and_library_calls_are_checked(library: Path) -> None:
    found = imports(library)
    assert "__stack_chk_fail" in found
    assert {name for name in found if name.startswith("__") and name.endswith("_chk")}
