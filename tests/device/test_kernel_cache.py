"""Compiled kernels are kept where nobody else can put one, and what is not whole is compiled again."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest

from moecomm.gpu import cache, jit, loader

pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")

SPEC = jit.KernelSpec(op="dispatch", ranks=1, experts=1, topk=1, hidden=8, layout=0, type=0, idx_bytes=8, row_bytes=16)
KEY = "0" * 64


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path / "kernels"))
    cache._warn_once.cache_clear()
    return tmp_path / "kernels"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[jit.KernelSpec]:
    """The kernels that were compiled: each by its turn, so that one is told from the next."""
    specs: list[jit.KernelSpec] = []

    def build(spec: jit.KernelSpec, arch: str = "sm_90a") -> tuple[bytes, str]:
        specs.append(spec)
        return f"{arch} {len(specs)}".encode(), ""

    monkeypatch.setattr(jit, "build", build)
    return specs


def entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_the_second_compile_is_a_hit(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = jit.compile(SPEC)
    assert cubin.startswith(b"\x7fELF")
    monkeypatch.setattr(jit, "build", lambda *_: pytest.fail("compiled again"))
    assert jit.compile(SPEC) == cubin
    (entry,) = entries(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert entry.stat().st_mode & 0o777 == 0o600


def test_arch_and_shape_have_entries_of_their_own(directory: Path, built: list[jit.KernelSpec]) -> None:
    assert jit.compile(SPEC) == b"sm_90a 1"
    assert jit.compile(SPEC, "sm_100a") == b"sm_100a 2"
    assert jit.compile(SPEC) == b"sm_90a 1"
    assert len(built) == len(entries(directory)) == 2


@pytest.mark.parametrize("header", ["protocol/slots.h", "transport/transport.cuh", "dispatch/scaleout_put.cuh"])
def test_a_changed_header_is_a_miss(
    header: str, directory: Path, built: list[jit.KernelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = tmp_path / "csrc"
    shutil.copytree(loader.headers(), headers)
    monkeypatch.setattr(loader, "headers", lambda: headers)
    for text in ("", "// another comment\n"):
        with (headers / header).open("a") as file:
            file.write(text)
        loader.toolchain.cache_clear()
        jit.compile(SPEC)
    loader.toolchain.cache_clear()
    assert len(built) == len(entries(directory)) == 2


def test_headers_of_a_source_are_all_that_it_includes() -> None:
    root = loader.headers().resolve()
    layer = {str(path.relative_to(root)) for path in loader.included('#include "fused/expert_layer.cuh"\n')}
    assert {"fused/expert_layer.cuh", "fused/fetch.cuh", "gemm/tiles.h", "device/bulk.cuh", "protocol/args.h"} < layer
    assert "elementwise/used_rows.cuh" not in layer and "dispatch/dispatch.cuh" not in layer


@pytest.mark.filterwarnings("ignore:compiled kernels are not read")
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "digest only", "readable by others", "link", "pipe"])
def test_a_damaged_entry_is_compiled_again(
    directory: Path, built: list[jit.KernelSpec], tmp_path: Path, damage: str
) -> None:
    assert jit.compile(SPEC) == b"sm_90a 1"
    (entry,) = entries(directory)
    whole = entry.read_bytes()
    if damage == "readable by others":
        entry.chmod(0o644)
    elif damage == "link":
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        entry.unlink()
        os.mkfifo(entry, 0o600)
    else:
        changed = {"cut": whole[:-1], "flipped": whole[:-1] + b"\0", "empty": b"", "digest only": whole[:32]}
        entry.write_bytes(changed[damage])
    assert jit.compile(SPEC) == b"sm_90a 2"
    assert jit.compile(SPEC) == b"sm_90a 2"  # and the new entry has taken its place
    assert len(built) == 2


def test_an_entry_counts_under_its_own_key_alone(directory: Path, built: list[jit.KernelSpec]) -> None:
    assert (jit.compile(SPEC), jit.compile(SPEC, "sm_100a")) == (b"sm_90a 1", b"sm_100a 2")
    one, other = entries(directory)
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    assert (jit.compile(SPEC), jit.compile(SPEC, "sm_100a")) == (b"sm_90a 3", b"sm_100a 4")


def test_a_huge_entry_is_not_read(directory: Path, built: list[jit.KernelSpec]) -> None:
    assert jit.compile(SPEC) == b"sm_90a 1"
    (entry,) = entries(directory)
    os.truncate(entry, cache._MOST_BYTES + 1)
    with pytest.warns(RuntimeWarning, match=f": {cache._MOST_BYTES + 1} bytes"):
        assert jit.compile(SPEC) == b"sm_90a 2"
    assert jit.compile(SPEC) == b"sm_90a 2"


@pytest.mark.parametrize("hostile", ["open to the group", "open to all", "link", "file"])
def test_a_doubtful_directory_is_not_used(
    directory: Path, built: list[jit.KernelSpec], tmp_path: Path, hostile: str
) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    if hostile == "link":
        directory.symlink_to(real)
    elif hostile == "file":
        directory.write_bytes(b"")
    else:
        directory.mkdir()
        directory.chmod(0o750 if hostile == "open to the group" else 0o777)
    with pytest.warns(RuntimeWarning, match=str(directory)):
        assert jit.compile(SPEC) == b"sm_90a 1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        assert jit.compile(SPEC) == b"sm_90a 2"
    assert entries(real) == []
    assert not directory.is_dir() or entries(directory) == []


def test_a_directory_of_another_user_is_not_used(
    directory: Path, built: list[jit.KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert jit.compile(SPEC) == b"sm_90a 1"
    assert entries(directory) == []


def test_a_failed_write_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "rename", full)
    with pytest.warns(RuntimeWarning, match="no space"):
        cache.write(directory, KEY, b"cubin")
    assert entries(directory) == []
    assert cache.read(directory, KEY) is None
