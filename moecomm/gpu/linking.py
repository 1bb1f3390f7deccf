"""Kernels that reach peers through NCCL GIN or NVSHMEM: LTO IR of NVRTC, linked with a shim by nvJitLink.

A kernel whose transport is "lsa", "puts" or "nic" is not linked with anything and does not come here.

| transport | linked with |
| --- | --- |
| gin | shims/gin.fatbin: every backend of GIN, chosen by the communicator when the kernel runs |
| gin_proxy | shims/gin_proxy.fatbin: GIN's proxy alone; such a kernel is about a third as large |
| nvshmem | shims/nvshmem.fatbin, and libnvshmem_device.a of the NVSHMEM that is installed, with its IBGDA |

NCCL may be newer than the headers that the shim was compiled from, not older: ncclDevCommCreate would refuse.  NVSHMEM
must be of the same minor version: its device library and its headers share a struct that grows with it.  Where it is
not, `python -m moecomm.shims.build` makes a shim for the one that is installed.

A gin kernel needs nothing once it is loaded; the device communicator comes with its arguments.

An nvshmem kernel does.  `nvshmemi_device_state_d` and `nvshmemi_ibgda_device_state_d` are constants of *each module*,
and NVSHMEM fills them in when told of the module, before the first launch:

1. NVSHMEM is initialised (nvshmem.core.init).  Earlier, step 3 returns 0 and does nothing, and kernels fail.
2. cuModuleLoadData(cubin).
3. nvshmem.bindings.cumodule_init(module), a non-zero value being an error: it also compares the version in the module,
   that of libnvshmem_device.a, with the host library's.  It synchronises the device, so no round may be under way.
4. nvshmem.bindings.cumodule_finalize(module) before the module is unloaded or NVSHMEM is finalised.

With a CUlibrary (cuda.core's ObjectCode) it is culibrary_init and culibrary_finalize.  register_module() is step 3;
modules are kept until the process ends, so that step 4 is for an NVSHMEM that has been finalised and initialised again.

libnvshmem_device.a prints through vprintf where a queue fails: the one symbol that such a cubin leaves to the driver.
It has trap instructions too, where atomic operations are told apart, behind such as no shim asks for.  Its bitcode,
libnvshmem_device.bc, is no input of nvJitLink, and is without IBGDA.
"""

from __future__ import annotations

import hashlib
import importlib
import io
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from moecomm import shims
from moecomm.errors import Unsupported
from moecomm.gpu import cuda_driver
from moecomm.shims.build import CannotBuild, dotted, recipe, version, wheels

# The Transport of csrc/transport that a kernel is a template over.
TRANSPORTS = {
    "lsa": "Lsa",
    "puts": "Puts",
    "nic": "Nic",
    "gin": "Gin",
    "gin_proxy": "GinProxy",
    "nvshmem": "Nvshmem",
}
ALONE = ("lsa", "puts", "nic")  # linked with nothing


def included(transport: str) -> str:
    """Return the line that includes a transport; kernels include that of "lsa" themselves."""
    return "" if transport == "lsa" else f'#include "transport/{transport.removesuffix("_proxy")}.cuh"\n'


def build(source: str, transport: str, arch: str, include: Path, core: Any) -> tuple[bytes, str]:
    """Link `source` with what `transport` needs; return the cubin and ptxas's messages.  Needs no GPU.

    Raises Unsupported that says what is missing.  `core` is cuda.core.
    """
    shim, library = inputs(transport, arch)
    options = core.ProgramOptions(
        std="c++20",
        arch=arch,
        include_path=[str(include)],
        relocatable_device_code=True,
        link_time_optimization=True,
    )
    log = io.StringIO()
    kernel = core.Program(source, "c++", options).compile("ltoir", logs=log)
    objects = [kernel, core.ObjectCode.from_fatbin(shim.path.read_bytes())]
    if library is not None:
        objects.append(core.ObjectCode.from_library(library.read_bytes()))
    linker = core.Linker(*objects, options=core.LinkerOptions(arch=arch, link_time_optimization=True, verbose=True))
    cubin = bytes(linker.link("cubin").code)
    said = (log.getvalue(), linker.get_error_log(), linker.get_info_log())
    return cubin, "\n".join(text.rstrip("\0") for text in said)


def digest(transport: str, arch: str) -> str:
    """Return a digest of everything but the source and NVRTC on which a linked kernel depends."""
    shim, library = inputs(transport, arch)
    return _digest((shim.path, *([library] if library else [])), nvjitlink_version())


@lru_cache(maxsize=8)
def _digest(files: tuple[Path, ...], linker: tuple[int, int]) -> str:
    found = hashlib.sha256(f"nvJitLink {linker[0]}.{linker[1]}\n".encode())
    for file in files:
        content = file.read_bytes()
        found.update(f"{file.name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def inputs(transport: str, arch: str) -> tuple[shims.Shim, Path | None]:
    """Return the files that a kernel is linked with: the shim and, for nvshmem, NVSHMEM's device library.

    Raises Unsupported that says what is missing, or can't be linked here.
    """
    shim = shims.find(transport)
    if shim.missing:
        raise Unsupported(shim.missing)
    if shim.arch != arch:
        raise Unsupported(f"The {transport} shim was compiled for {shim.arch}; kernels here are {arch}.")
    # LTO IR is read by a linker of the same major version that is no older than who wrote it.
    linker = nvjitlink_version()
    for writer, wrote, instead in (
        (f"nvcc, for the {transport} shim,", shim.nvcc, f"  Or a shim that it can read.  {recipe(transport)}"),
        ("NVRTC, for kernels,", nvrtc_version(), ""),
    ):
        if linker[0] != wrote[0] or linker < wrote:
            raise Unsupported(
                f"nvJitLink {dotted(linker)} can't read what {writer} wrote: that is {dotted(wrote)}; "
                f"want nvJitLink {dotted(wrote)} or a later {wrote[0]}.x.{instead}"
            )
    return shim, _nvshmem_library(shim) if transport == "nvshmem" else None


_told: list[int] = []  # modules that NVSHMEM knows


def register_module(module: int) -> None:
    """Fill NVSHMEM's state in a loaded module, a CUmodule.  Synchronizes the device.

    Raises:
        Unsupported: the host library has another version than the device library that the module is linked with.
    """
    bindings = importlib.import_module("nvshmem.bindings")
    if status := bindings.cumodule_init(module):
        raise Unsupported(f"NVSHMEM does not take a kernel that was linked with its device library: status {status}")
    _told.append(module)


def register_modules_again() -> None:
    """Register the modules of this process again, after NVSHMEM has been initialized again.  May raise Unsupported."""
    modules = _told.copy()
    _told.clear()
    for module in modules:
        with suppress(Exception):  # it may have forgotten them
            importlib.import_module("nvshmem.bindings").cumodule_finalize(module)
        register_module(module)


def nvjitlink_version() -> tuple[int, int]:
    """Return the version of the linker in this process.  Raises Unsupported if there is none."""
    try:
        major, minor = importlib.import_module("cuda.bindings.nvjitlink").version()
    except Exception as error:  # whichever the loader of libraries has for a library that is not there
        raise Unsupported(f"Kernels with a shim are linked by nvJitLink, which is not installed ({error}).") from error
    return int(major), int(minor)


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the compiler in this process."""
    _, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    return int(major), int(minor)


def _nvshmem_library(shim: shims.Shim) -> Path:
    for place in wheels("nvshmem"):
        library = place / "lib" / "libnvshmem_device.a"
        if not library.is_file():
            continue
        try:
            here = f"NVSHMEM {dotted(version('NVSHMEM', place / 'include'))}"
        except (CannotBuild, OSError) as error:
            raise Unsupported(f"It can't be told which version {library} is ({error}).") from error
        if here.split(".")[:2] != shim.headers.split(".")[:2]:
            raise Unsupported(
                f"The nvshmem shim was compiled for {shim.headers}, and {here} is installed: "
                "run python -m moecomm.shims.build, or install that version."
            )
        return library
    raise Unsupported(
        f"NVSHMEM's device library is not installed: pip install nvidia-nvshmem-{cuda_driver.wheel_suffix()}."
    )
