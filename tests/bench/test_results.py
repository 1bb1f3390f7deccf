"""Which versions a result says, with libraries in the place of NCCL and of what is installed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moecomm_bench import results

NCCL = 'extern "C" int ncclGetVersion(int* version) { *version = 23007; return %d; }'


def library(folder: Path, name: str, source: str) -> Path:
    """Its soname is what a process knows it by once it is loaded."""
    (folder / "source.cpp").write_text(source)
    words = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(folder / "source.cpp")]
    subprocess.run(words, check=True)
    return folder / name


def test_the_nccl_of_this_process_is_asked_and_none_is_loaded_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source, told in (
        ("libmoecomm_nccl.so", NCCL % 0, "2.30.7"),
        ("libmoecomm_failing.so", NCCL % 3, ""),
        ("libmoecomm_other.so", "int other;", ""),
    ):
        file = library(tmp_path, name, source)
        monkeypatch.setattr(results, "_NCCL", str(file))
        assert results._loaded_nccl() == "" and str(file) not in Path("/proc/self/maps").read_text()
        ctypes.CDLL(str(file))
        monkeypatch.setattr(results, "_NCCL", name)
        assert results._loaded_nccl() == told


def test_libraries_that_are_there_are_named_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"nvidia-nvshmem-cu12": "3.4.5", "nvshmem4py-cu12": "0.1.2", "cuda-core": "1.2.2"}

    def version(package: str) -> str:
        if package in there:
            return there[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(name="H200"))
    for loaded, more in (("2.30.7", {"nccl loaded": "2.30.7"}), ("", {})):
        monkeypatch.setattr(results, "_loaded_nccl", lambda loaded=loaded: loaded)
        found = results.origin()
        assert found["machine"]["gpus"] == ["H200"]
        own = {"python", "torch", "moecomm", "cuda", "nccl torch was built with", "driver"}
        said = {name: text for name, text in found["versions"].items() if name not in own}
        assert said == {"nvshmem": "3.4.5", "nvshmem4py": "0.1.2", "cuda-core": "1.2.2", **more}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert set(results.origin()["versions"]) == {"python", "torch", "moecomm"}, "of a machine without GPUs none of them"


def test_a_module_of_tests_is_named_as_python_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="tests.emulator.instructions"))
    monkeypatch.setattr(sys, "argv", ["instructions.py", "--json", "found.json"])
    assert results.command().endswith("python -m tests.emulator.instructions --json found.json")
