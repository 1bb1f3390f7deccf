"""Files and messages of a wheel's build where a compiler or headers are missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

import moecomm
from moecomm import backends, shims
from moecomm.backends import gin
from moecomm.errors import Unsupported
from moecomm.gpu import jit, linking, loader
from moecomm.shims.build import build

CSRC = Path(__file__).parent.parent.parent / "csrc"
NCCL = "#define NCCL_MAJOR {}\n#define NCCL_MINOR {}\n#define NCCL_PATCH {}\n"
NVSHMEM = "".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {{}}\n" for part in ("MAJOR", "MINOR", "PATCH"))
COMPILER = '#!/usr/bin/env sh\n[ "$1" = --version ] && echo "release 13.0, V13.0.88" && exit\n'
SPEC = jit.KernelSpec("combine", ranks=4, experts=256, topk=8, hidden=7168, layout=1, type=0)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def build_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, nccl: str, nvshmem: str) -> None:
    """With libraries that consist of version numbers, and a compiler that is a shell script."""
    write(tmp_path / "cuda/bin/nvcc", COMPILER + compiler, 0o755)
    write(tmp_path / "nccl/include/nccl.h", nccl)
    write(tmp_path / "nvshmem/include/non_abi/nvshmem_version.h", nvshmem)
    homes = {name: str(tmp_path / name.lower()) for name in ("CUDA", "NCCL", "NVSHMEM")}
    missing = build(tmp_path / "shims", CSRC, homes)
    monkeypatch.setattr(shims, "DIRECTORY", tmp_path / "shims")
    assert {name for name in shims.NAMES if shims.find(name).missing} == set(missing)


def test_each_shim_says_what_was_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = 'echo "gin.cu(7): error: it is Monday" >&2; exit 1\n'
    build_with(tmp_path, monkeypatch, fails, NCCL.format(2, 30, 7), NVSHMEM.format(3, 3, 9))
    for name in ("gin", "gin_proxy"):
        assert "nvcc failed and said 'gin.cu(7): error: it is Monday'." in shims.find(name).missing
    assert "are 3.3.9; want 3.4.5 or later." in shims.find("nvshmem").missing
    for name in shims.NAMES:
        said = shims.find(name).missing
        assert said.startswith(f"The {name} shim was not built with this moecomm: ") and said.count(": ") >= 1
        with pytest.raises(Unsupported) as caught:
            linking.inputs(name, "sm_90a")
        assert said in str(caught.value)
    monkeypatch.setattr(backends, "missing", lambda name: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    verdicts = {backend.name: backend.verdict for backend in moecomm.doctor().backends}
    for name, shim, which in (
        ("gin", gin.wanted_shim(), ""),
        ("nvshmem", "nvshmem", " that do not share memory"),
    ):
        assert verdicts[name] == f": Not between domains{which}: {shims.find(shim).missing}"


def test_headers_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, CSRC, {"NCCL": str(tmp_path / "none"), "NVSHMEM": str(tmp_path / "none")})
    monkeypatch.setattr(shims, "DIRECTORY", tmp_path)
    assert f"there were no headers of NCCL in {tmp_path / 'none'}." in shims.find("gin").missing
    assert f"there were no headers of NVSHMEM in {tmp_path / 'none'}." in shims.find("nvshmem").missing


def test_a_shim_that_was_built_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    succeeds = 'while [ "$1" != -o ]; do shift; done; echo "LTO IR" > "$2"\n'
    build_with(tmp_path, monkeypatch, succeeds, NCCL.format(2, 30, 7), NVSHMEM.format(3, 4, 5))
    found = {name: shims.find(name) for name in shims.NAMES}
    assert {shim.missing for shim in found.values()} == {""}
    assert {name: shim.headers for name, shim in found.items()} == {
        "gin": "NCCL 2.30.7",
        "gin_proxy": "NCCL 2.30.7",
        "nvshmem": "NVSHMEM 3.4.5",
    }
    assert all(shim.path.read_text() == "LTO IR\n" and shim.nvcc == (13, 0) for shim in found.values())
    # Another build in the same place leaves nothing of this one behind.
    build(tmp_path / "shims", CSRC, {"NCCL": str(tmp_path), "NVSHMEM": str(tmp_path)})
    assert not any(shim.path.exists() for shim in found.values()) and shims.find("gin").missing


def test_a_directory_that_was_tampered_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "DIRECTORY", tmp_path)
    assert "python -m moecomm.shims.build." in shims.find("gin").missing
    for told in ("{}", "not JSON"):
        (tmp_path / "built.json").write_text(told)
        assert "does not know it" in shims.find("gin").missing
    (tmp_path / "built.json").write_text(json.dumps({"gin": {"arch": "sm_90a", "nvcc": [13, 0], "headers": ""}}))
    assert "is gone" in shims.find("gin").missing


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [
        # nvcc, and all that it compiles with, must not be of a later release than nvJitLink.
        ({"nvidia-nvjitlink": "13.0.88"}, "pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.0.*' "),
        # Torch pins cuda-toolkit, and pip may bring a later nvJitLink.
        (
            {"nvidia-nvjitlink": "13.5.37", "cuda-toolkit": "13.0.3"},
            "pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.0.*' ",
        ),
        (
            {"nvidia-nvjitlink": "13.2.1", "cuda-toolkit": "13.10.0"},
            "pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.2.*' ",
        ),
        ({"nvidia-nvjitlink": "13.5.1"}, "pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.5.*' "),
        ({}, "pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.*' "),
        ({"nvidia-nvjitlink-cu12": "12.8.93"}, "shims.build --cuda DIR, with the nvcc of a CUDA 12.8 toolkit."),
    ],
)
def test_a_shim_that_is_missing_comes_with_the_way_to_build_it_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], wanted: str
) -> None:
    """A plain pip install builds where neither nvcc nor headers are; afterwards packages alone change nothing."""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(shims, "DIRECTORY", tmp_path)
    told = {"gin": {"missing": "there was no nvcc"}, "nvshmem": {"missing": "there was no nvcc"}}
    (tmp_path / "built.json").write_text(json.dumps(told))
    for name, library in (("gin", "nccl"), ("nvshmem", "nvshmem")):
        said = shims.find(name).missing
        assert said.startswith(f"The {name} shim was not built with this moecomm: there was no nvcc.  To build it: ")
        assert wanted in said and "python -m moecomm.shims.build" in said
        suffix = "cu12" if "nvidia-nvjitlink-cu12" in installed else "cu13"
        assert f"'nvidia-{library}-{suffix}>=" in said


class Library:
    """A shim, and the versions of what would read it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shim = shims.Shim("gin", tmp_path / "gin.fatbin", "", "sm_90a", (13, 0), "NCCL 2.30.7")
        self.linker, self.compiler = (13, 4), (13, 4)
        self.shim.path.write_bytes(b"LTO IR")
        monkeypatch.setattr(shims, "find", lambda _: self.shim)
        monkeypatch.setattr(linking, "nvjitlink_version", lambda: self.linker)
        monkeypatch.setattr(linking, "nvrtc_version", lambda: self.compiler)
        monkeypatch.setattr(loader, "toolchain", lambda _: "NVRTC and headers")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(tmp_path, monkeypatch)


def test_what_the_linker_can_not_read_is_refused(library: Library) -> None:
    assert linking.inputs("gin", "sm_90a") == (library.shim, None)
    with pytest.raises(Unsupported, match=r"compiled for sm_90a; kernels here are sm_100"):
        linking.inputs("gin", "sm_100")
    for linker, compiler, said in (
        ((12, 9), (12, 9), "nvJitLink 12.9 can't read what nvcc, for the gin shim, wrote: that is 13.0"),
        ((12, 9), (12, 9), "Or a shim that it can read.  To build it: "),
        ((13, 3), (13, 4), "nvJitLink 13.3 can't read what NVRTC, for kernels, wrote: that is 13.4"),
    ):
        library.linker, library.compiler = linker, compiler
        with pytest.raises(Unsupported) as caught:
            linking.inputs("gin", "sm_90a")
        assert said in str(caught.value)


def test_nvshmem_is_linked_with_the_version_it_was_compiled_for(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "none"]
    monkeypatch.setattr(linking, "wheels", lambda _: places)
    library.shim = dataclasses.replace(library.shim, name="nvshmem", headers="NVSHMEM 3.4.5")
    with pytest.raises(Unsupported, match="device library is not installed"):
        linking.inputs("nvshmem", "sm_90a")
    places.append(tmp_path / "nvshmem")
    write(tmp_path / "nvshmem/lib/libnvshmem_device.a", "an archive")
    with pytest.raises(Unsupported, match="It can't be told which version"):
        linking.inputs("nvshmem", "sm_90a")
    write(tmp_path / "nvshmem/include/non_abi/nvshmem_version.h", NVSHMEM.format(3, 8, 0))
    with pytest.raises(Unsupported, match=r"compiled for NVSHMEM 3\.4\.5, and NVSHMEM 3\.8\.0 is installed"):
        linking.inputs("nvshmem", "sm_90a")
    write(tmp_path / "nvshmem/include/non_abi/nvshmem_version.h", NVSHMEM.format(3, 4, 6))
    assert linking.inputs("nvshmem", "sm_90a") == (library.shim, tmp_path / "nvshmem/lib/libnvshmem_device.a")
    before = linking.digest("nvshmem", "sm_90a")
    write(tmp_path / "nvshmem/lib/libnvshmem_device.a", "another")
    linking._digest.cache_clear()
    assert linking.digest("nvshmem", "sm_90a") != before


def test_the_cache_tells_linked_kernels_apart(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bytes of the shim, the version of nvJitLink and the transport; and finds them again."""
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path / "kernels"))
    compiled: list[bytes] = []

    def compile_once_more(*_: object) -> tuple[bytes, str]:
        compiled.append(str(len(compiled)).encode())
        return compiled[-1], ""

    monkeypatch.setattr(jit, "build", compile_once_more)
    lsa, gin = SPEC, dataclasses.replace(SPEC, transport="gin", domain_ranks=2)

    def kernel(spec: jit.KernelSpec) -> bytes:
        linking._digest.cache_clear()
        return jit.compile(spec)

    assert [kernel(lsa), kernel(gin), kernel(lsa), kernel(gin)] == [b"0", b"1", b"0", b"1"]
    library.shim.path.write_bytes(b"another")
    assert [kernel(lsa), kernel(gin)] == [b"0", b"2"]
    library.linker = (13, 5)
    assert [kernel(lsa), kernel(gin)] == [b"0", b"3"]


def test_a_transport_is_one_of_six() -> None:
    with pytest.raises(ValueError, match="transport='tcp': want lsa, puts, nic, gin, gin_proxy, nvshmem"):
        dataclasses.replace(SPEC, transport="tcp")
    source = jit.source(dataclasses.replace(SPEC, transport="gin_proxy", domain_ranks=2))
    assert '#include "transport/gin.cuh"' in source and "GinProxy>(args)" in source
