"""JSON files of measurements, with the machine, the versions and the command."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moecomm
from moecomm.tools import doctor
from moecomm_bench import sources
from moecomm_bench.ranks import starter

_NCCL = "libnccl.so.2"
_INSTALLED = {"nccl4py": "nccl4py", "nvshmem": "NVSHMEM", "nvshmem4py": "nvshmem4py", "cuda-core": "cuda.core"}
_LIBRARIES = ("sgl-deep-gemm", "flashinfer-python")  # others, of which a result says the version


def write(path: Path, measured: dict[str, Any]) -> Path:
    """Write a measurement and its origin; returns the path. `what` in the file is the name of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(path.stem, measured))
    return path


def document(what: str, measured: dict[str, Any]) -> str:
    """Return the content that write() puts into a file."""
    return json.dumps({"what": what, **origin(), **measured}, indent=1) + "\n"


def origin() -> dict[str, Any]:
    """Return command, date, commit, kernel digests, machine and versions."""
    gpus = [torch.cuda.get_device_properties(gpu).name for gpu in range(torch.cuda.device_count())]
    return {
        "command": command(),
        "date": datetime.date.today().isoformat(),
        "commit": sources.commit(),
        "kernels": sources.digests(),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "moecomm": moecomm.__version__,
            **(_cuda() if gpus else {}),
        },
    }


def command() -> str:
    """Return a command line that repeats this run."""
    program, root = Path(sys.argv[0]).absolute(), Path(moecomm.__file__).parent.parent
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of a module that python -m runs
    if spec is not None and spec.name.startswith("tests."):
        words = ["-m", spec.name]
    elif program.name == "__main__.py" and program.is_relative_to(root):
        module = ".".join(program.parent.relative_to(root).parts)
        words = ["-m", module]
    elif program.name == "moecomm":
        words = ["-m", "moecomm"]
    else:
        words = [os.path.relpath(program)]
    return " ".join([*starter(), *words, *sys.argv[1:]])


def _cuda() -> dict[str, str]:
    found = {"cuda": str(torch.version.cuda)}
    if dist.is_nccl_available():
        found["nccl torch was built with"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if loaded := _loaded_nccl():
        found["nccl loaded"] = loaded
    found |= {name: version for name, known in _INSTALLED.items() if (version := doctor.installed(known))}
    for package in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    proc = Path("/proc/driver/nvidia/version")
    if proc.exists() and (driver := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", proc.read_text())):
        found["driver"] = driver[0]
    return found


def _loaded_nccl() -> str:
    """Return the version of the NCCL loaded in this process, often not the one that torch was built with."""
    code = ctypes.c_int()
    try:  # ncclGetVersion returns a constant and initializes nothing
        if ctypes.CDLL(_NCCL, mode=os.RTLD_NOW | os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(code)) != 0:
            return ""
    except (OSError, AttributeError):  # not loaded, or not NCCL
        return ""
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
