"""How a measurement is kept: bench/results/<name>.json, with the machine, the versions and the command that made it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import moecomm

RESULTS = Path(__file__).parent / "results"


def write(name: str, measured: dict[str, Any]) -> Path:
    """Writes one result and says where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"what": name, **origin(), **measured}, indent=2) + "\n")
    return path


def origin() -> dict[str, Any]:
    """When, where and how."""
    command = " ".join(["python", os.path.relpath(sys.argv[0], RESULTS.parent.parent), *sys.argv[1:]])
    gpus = [torch.cuda.get_device_properties(gpu).name for gpu in range(torch.cuda.device_count())]
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "moecomm": moecomm.__version__,
            **(_cuda() if gpus else {}),
        },
    }


def _cuda() -> dict[str, str]:
    driver = Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[1].split()
    return {
        "cuda": str(torch.version.cuda),
        "nccl torch was built with": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": next(word for word in driver if word[0].isdigit()),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
