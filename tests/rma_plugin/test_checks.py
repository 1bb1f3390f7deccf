"""Exports of the library, its numbers against NCCL's headers, and the Python side of the plugin."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from moecomm import rma_plugin
from moecomm.config import check_environment

from . import gin_program
from .build import SRC


def test_the_library_has_both_tables_its_own_functions_and_nothing_else() -> None:
    library = ctypes.CDLL(str(rma_plugin.path()))
    for version in (14, 16):
        name = ctypes.c_char_p.in_dll(library, f"ncclRmaPlugin_v{version}")
        assert name.value == b"moecomm"
    command = ["nm", "-D", "--defined-only", rma_plugin.path()]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode == 0:
        assert {line.split()[-1] for line in shown.stdout.splitlines()} == {
            *("ncclRmaPlugin_v14", "ncclRmaPlugin_v16"),
            *("moecomm_rma_take_times", "moecomm_rma_watch", "moecomm_rma_ignore", "moecomm_rma_loss"),
        }


def test_nobody_is_lost_where_nobody_watches_or_all_are_there() -> None:
    """The failures of peers show what is told when somebody is lost."""
    word = ctypes.c_uint32(0)
    assert rma_plugin.losses("a job") == {}
    rma_plugin.watch("a job", ctypes.addressof(word))
    rma_plugin.ignore("a job", 1, True)
    assert rma_plugin.losses("a job") == {} and word.value == 0
    rma_plugin.watch("a job", 0)
    rma_plugin.ignore("a job", 1, False)
    assert rma_plugin.losses("a job") == {}


def nccl_include() -> Path | None:
    try:
        import nvidia.nccl  # type: ignore[import-not-found]
    except ImportError:
        return None
    folders = [Path(folder) / "include" for folder in nvidia.nccl.__path__]
    return next((folder for folder in folders if (folder / "nccl_device" / "net_device.h").is_file()), None)


def test_numbers_are_those_of_nccl() -> None:
    """Its wheels have the headers of these; those of the plugin interface, which static_asserts stand for, have not."""
    include = nccl_include()
    if include is None:
        pytest.skip("no wheel of NCCL 2.30 or later is installed")
    ours = (SRC / "nccl_abi.h").read_text()
    results = (include / "nccl.h").read_text()
    devices = (include / "nccl_device" / "net_device.h").read_text()
    names = re.findall(r"\bk(\w+) = \d+,\n", ours)
    assert len(names) == 7
    for name in names:
        theirs = re.search(rf"\bnccl{name}\s*=\s*(\d+)", results)
        mine = re.search(rf"\bk{name} = (\d+)", ours)
        assert theirs is not None and mine is not None and theirs[1] == mine[1]
    assert re.search(r"NCCL_NET_DEVICE_GIN_PROXY\s*=\s*2\b", devices) and "kGinProxy = 2;" in ours


def test_the_environment_names_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rma_plugin.environment("a job", timeout_s=0.25)
    assert Path(found["NCCL_RMA_PLUGIN"]).is_file() and found["NCCL_GIN_TYPE"] == "2"
    assert (found["MOECOMM_RMA_JOB"], found["MOECOMM_RMA_TIMEOUT_MS"]) == ("a job", "250")
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    check_environment()
    assert "MOECOMM_RMA_JOB" not in rma_plugin.environment()


@pytest.mark.parametrize(
    ("version", "old"), [((2, 28, 9), True), ((2, 30, 6), True), ((2, 30, 7), False), ((3, 0, 0), False)]
)
def test_the_gin_program_wants_headers_that_have_gin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], old: bool
) -> None:
    (tmp_path / "include").mkdir()
    names = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    (tmp_path / "include" / "nccl.h").write_text("".join(f"#define NCCL_{name} {number}\n" for name, number in names))
    monkeypatch.setattr(gin_program, "wheels", lambda *names: [tmp_path])
    assert gin_program.nccl() == (None if old else tmp_path)
