"""Kernels loaded from source: compiled by NVRTC through cuda.core, or read from the cache, then loaded.

moecomm.gpu.jit and moecomm.gpu.plain_kernel write the sources.  CUDA packages are imported on first use.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.resources
import io
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from moecomm.config import cache_dir
from moecomm.errors import Unsupported
from moecomm.gpu import cache, cuda_driver, linking, span_ring
from moecomm.gpu.cubin import lacks_descriptor

_CALLS = "#define MOECOMM_CALLS\n"  # csrc/fused/fetch.cuh
_INCLUDED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_IMPORTING = threading.Lock()
_PLAIN = 'extern "C" __global__ void plain(int* to) { *to = 1; }'


@lru_cache(maxsize=1)
def headers() -> Path:
    """Return the folder of csrc, as installed with the package, else as it is in the repository."""
    packaged = Path(str(importlib.resources.files("moecomm"))) / "csrc"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "csrc"


def included(source: str) -> frozenset[Path]:
    """All headers that a source includes, directly or through others."""
    root = headers()
    found: set[Path] = set()
    waiting = [(root, name) for name in _INCLUDED.findall(source)]
    while waiting:
        folder, name = waiting.pop()
        # As compilers look: in the folder of the file that includes, then in csrc.
        beside = (folder / name).resolve()
        path = beside if beside.is_file() else (root / name).resolve()
        if path not in found:
            found.add(path)
            waiting += [(path.parent, more) for more in _INCLUDED.findall(path.read_text())]
    return frozenset(found)


@lru_cache(maxsize=64)
def toolchain(includes: tuple[str, ...]) -> str:
    """Everything but the source and the architecture that a cubin depends on: NVRTC, and all headers that the source
    gets by its own `includes`.
    """
    major, minor = linking.nvrtc_version()
    digest = hashlib.sha256(f"nvrtc {major}.{minor}\n".encode())
    root = headers().resolve()
    for path in sorted(included("".join(f'#include "{name}"\n' for name in includes))):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _core() -> Any:
    """Return cuda.core.  Ranks of one process ask for it together, and a second thread would find it half imported."""
    try:
        with _IMPORTING:
            core = importlib.import_module("cuda.core")
            return core if hasattr(core, "Program") else importlib.import_module("cuda.core.experimental")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"kernels are compiled through the Python package cuda-core, which is not installed ({error})"
        ) from error


def build(source: str, transport: str, arch: str) -> tuple[bytes, str]:
    """Compile, and link if the transport has a shim, without the cache.  Return the cubin and ptxas's messages.

    Raises Unsupported where the compiler's output would not run.
    """
    core = _core()
    if transport not in linking.ALONE:
        return linking.build(source, transport, arch, headers(), core)
    for more in ("", _CALLS):
        built = _compile(core, more + source, arch)
        if arch != "sm_90a" or not lacks_descriptor(built[0]) or not _descriptor_is_known():
            return built
    version = ".".join(map(str, linking.nvrtc_version()))
    raise Unsupported(
        f"NVRTC {version} makes a kernel that can't reach memory of this source; another may not: {source}"
    )


@lru_cache(maxsize=1)
def _descriptor_is_known() -> bool:
    """Return whether moecomm.gpu.cubin understands the compiler's code, by a kernel in which no load can be missing."""
    return not lacks_descriptor(_compile(_core(), _PLAIN, "sm_90a")[0])


def _compile(core: Any, source: str, arch: str) -> tuple[bytes, str]:
    log = io.StringIO()
    known = core.ProgramOptions.__dataclass_fields__
    verbose = {"ptxas_options": ["-v"]} if "ptxas_options" in known else {}
    options = core.ProgramOptions(std="c++20", arch=arch, include_path=[str(headers())], **verbose)
    program = core.Program(source, "c++", options)
    return bytes(program.compile("cubin", logs=log).code), log.getvalue()


def cubin_of(source: str, transport: str, arch: str, build: Callable[[], tuple[bytes, str]]) -> bytes:
    """Return the cubin of a source: from the cache, or from `build`, and then stored.

    Raises Unsupported if the transport needs a library that is missing.
    """
    parts = [source, arch, "c++20", toolchain(tuple(_INCLUDED.findall(source)))]
    if transport not in linking.ALONE:
        parts.append(linking.digest(transport, arch))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if (cubin := cache.read(cache_dir(), key)) is None:
        cubin, _ = build()
        cache.write(cache_dir(), key, cubin)
    return cubin


def architecture(capability: tuple[int, int]) -> str:
    """Return the architecture that kernels for a GPU of this compute capability are compiled for."""
    major, minor = capability
    return "sm_90a" if capability == (9, 0) else f"sm_{major}{minor}"


def load(
    index: int,
    compiled: Callable[[str], bytes],
    entry: str,
    transport: str,
    shared_bytes: int,
    traced: bool = False,
) -> int:
    """Return the function `entry`, a CUfunction, of the cubin that `compiled` returns for device `index`.

    It may be launched with `shared_bytes` of dynamic shared memory.  `traced`: it was compiled to write spans.
    """
    driver, call = cuda_driver.driver(), cuda_driver.call
    call("cuInit", 0)
    device = call("cuDeviceGet", index)
    attribute = driver.CUdevice_attribute
    major = call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    cubin = compiled(architecture((major, minor)))
    # The primary context, which torch uses as well; kept, like the module, until the process ends.
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", device))
    try:
        module = call("cuModuleLoadData", cubin)
        if transport == "nvshmem":
            with cuda_driver.relaxed_captures():  # it copies, and this may be the first launch, captured
                linking.register_module(int(module))
        if traced:
            span_ring.attach(module, index)
        function = call("cuModuleGetFunction", module, entry.encode())
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, most, shared_bytes)
        # Now, and not at the first launch, which may be captured, or when a round of a peer may be waiting for us.
        if hasattr(driver, "cuFuncLoad"):
            call("cuFuncLoad", function)
    finally:
        call("cuCtxPopCurrent")
    return int(function)
