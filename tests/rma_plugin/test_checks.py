"""Digests and checksums against known values; numbers against NCCL's headers; what Python knows of the plugin."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import random
import re
import subprocess
from pathlib import Path

import pytest

from moecomm import rma_plugin
from moecomm.config import check_environment

from . import gin_program
from .build import SRC


def digests(driver: Path, lines: list[tuple[str, bytes, bytes]]) -> list[str]:
    text = "".join(f"{kind} {key.hex() or '-'} {data.hex() or '-'}\n" for kind, key, data in lines)
    return subprocess.run(
        [str(driver), "digests"], input=text, capture_output=True, text=True, check=True, timeout=30
    ).stdout.split()


@pytest.mark.slow  # the driver is compiled
def test_known_digests(driver: Path) -> None:
    """FIPS 180-4, RFC 4231 (2 and 6), and the check value of CRC-32C."""
    assert digests(
        driver,
        [
            ("sha256", b"", b"abc"),
            ("sha256", b"", b""),
            ("hmac", b"Jefe", b"what do ya want for nothing?"),
            ("hmac", b"\xaa" * 131, b"Test Using Larger Than Block-Size Key - Hash Key First"),
            ("crc32c", b"", b"123456789"),
        ],
    ) == [
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
        "e3069283",
    ]


@pytest.mark.slow  # the driver is compiled
def test_digests_of_all_lengths(driver: Path) -> None:
    source = random.Random(1)
    texts = [source.randbytes(length) for length in range(200)]
    keys = [source.randbytes(length % 100 + 1) for length in range(200)]
    assert digests(driver, [("sha256", b"", text) for text in texts]) == [
        hashlib.sha256(text).hexdigest() for text in texts
    ]
    assert digests(driver, [("hmac", key, text) for key, text in zip(keys, texts, strict=True)]) == [
        hmac.new(key, text, "sha256").hexdigest() for key, text in zip(keys, texts, strict=True)
    ]


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
    secret = rma_plugin.new_secret()
    found = rma_plugin.environment(secret, way="tcp", address="10.0.0.1", timeout_s=0.25)
    assert Path(found["NCCL_RMA_PLUGIN"]).is_file() and found["NCCL_GIN_TYPE"] == "2"
    assert found["MOECOMM_JOB_SECRET"] == secret and len(secret) == 64 and secret != rma_plugin.new_secret()
    assert found["MOECOMM_RMA_TIMEOUT_MS"] == "250"
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    check_environment()
    assert "MOECOMM_JOB_SECRET" not in rma_plugin.environment()


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
