"""The device shims of the gin and nvshmem backends: where they are, or why they are missing.

They are csrc/shims/*.cu, compiled to LTO IR by moecomm.shims.build, which building a wheel runs, and kept in this
folder.  moecomm.gpu.linking links them to kernels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from moecomm.shims.build import recipe

DIRECTORY = Path(__file__).parent
NAMES = ("gin", "gin_proxy", "nvshmem")  # gin_proxy: gin for communicators whose GIN is the proxy


@dataclass(frozen=True)
class Shim:
    """One shim.  `missing`: empty if `path` is there, else why it is not, as a sentence a user can act on."""

    name: str
    path: Path
    missing: str
    arch: str = ""  # that it was compiled for: sm_90a
    nvcc: tuple[int, int] = (0, 0)  # that compiled it
    headers: str = ""  # that it was compiled from: "NCCL 2.30.7"


def find(name: str) -> Shim:
    """The shim of that name, one of NAMES, as this moecomm was built."""
    path, manifest = DIRECTORY / f"{name}.fatbin", DIRECTORY / "built.json"
    try:
        told = json.loads(manifest.read_text())[name]
    except FileNotFoundError:
        return Shim(name, path, f"The {name} shim was not built.  {recipe(name)}")
    except (KeyError, ValueError):
        return Shim(name, path, f"The {name} shim was not built: {manifest} does not know it.  {recipe(name)}")
    if why := told.get("missing"):
        return Shim(name, path, f"The {name} shim was not built with this moecomm: {why}.  {recipe(name)}")
    if not path.is_file():
        return Shim(name, path, f"The {name} shim was built, but {path} is gone.  {recipe(name)}")
    major, minor = told["nvcc"]
    return Shim(name, path, "", told["arch"], (major, minor), told["headers"])
