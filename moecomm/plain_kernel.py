"""Kernels for one job each, from a header of csrc: compiled through cuda.core, kept in the cache of kernels, launched
with one struct.  Those of rounds, which know the shape at hand, are moecomm.jit's.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.resources
import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch

from moecomm import _native, kernel_cache, linking
from moecomm.backends import cuda_driver
from moecomm.config import cache_dir

_FOLDERS = ("protocol", "device", "fused", "shims", "bench")


@dataclass(frozen=True)
class PlainKernel:
    """`entry(args)` of a header below csrc, names as in `namespace`, and the threads of a block.

    `transport`: one of moecomm.linking.TRANSPORTS.  `cluster`: so many blocks, which divide them, lie together.
    """

    namespace: ClassVar[str] = "moecomm"
    header: str
    entry: str
    args: str
    threads: int
    transport: str = "lsa"
    cluster: int = 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return 0

    @property
    def source(self) -> str:
        """The translation unit."""
        name = linking.TRANSPORTS[self.transport].lower()
        more = "" if self.transport == "lsa" else f'#include "device/{name}.cuh"\n'
        clusters = f"__cluster_dims__({self.cluster}) " if self.cluster > 1 else ""
        return (
            f'#include "{self.header}.cuh"\n{more}'
            f"using namespace moecomm;\nusing namespace {self.namespace};\n"
            f'extern "C" __global__ void {clusters}__launch_bounds__({self.threads}, 1)\n'
            f"moecomm_plain(const __grid_constant__ {self.args} args) {{ {self.entry}(args); }}\n"
        )


@lru_cache(maxsize=1)
def headers() -> Path:
    """csrc as it was installed beside the package, else as it lies in the repository."""
    packaged = Path(str(importlib.resources.files("moecomm"))) / "csrc"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[1] / "csrc"


def build(kernel: PlainKernel, arch: str = "sm_90a") -> tuple[bytes, str]:
    """Compiles, without the cache: the cubin, and what ptxas says about it.  Needs no GPU."""
    core, log = importlib.import_module("cuda.core"), io.StringIO()
    if kernel.transport not in linking.ALONE:
        return linking.build(kernel.source, kernel.transport, arch, headers(), core)
    known = core.ProgramOptions.__dataclass_fields__
    verbose = {"ptxas_options": ["-v"]} if "ptxas_options" in known else {}
    options = core.ProgramOptions(std="c++20", arch=arch, include_path=[str(headers())], **verbose)
    program = core.Program(kernel.source, "c++", options)
    return bytes(program.compile("cubin", logs=log).code), log.getvalue()


def compile(kernel: PlainKernel, arch: str) -> bytes:  # noqa: A001
    """The cubin, from the cache or compiled.  Needs no GPU."""
    version = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()[1:]
    digest = hashlib.sha256(f"{version} {arch}\n{kernel.source}".encode())
    for path in sorted(p for folder in _FOLDERS for p in (headers() / folder).iterdir() if p.suffix in (".h", ".cuh")):
        digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    if kernel.transport not in linking.ALONE:
        digest.update(linking.digest(kernel.transport, arch).encode())
    key = digest.hexdigest()
    if (cubin := kernel_cache.read(cache_dir(), key)) is None:
        cubin, _ = build(kernel, arch)
        kernel_cache.write(cache_dir(), key, cubin)
    return cubin


_functions: dict[tuple[PlainKernel, int], int] = {}


def load(kernel: PlainKernel, device: int) -> int:
    """The kernel on a CUDA device, a CUfunction, compiled and loaded if need be.  Unsupported, with a transport that is
    linked, says what it can't be linked with.
    """
    function = _functions.get((kernel, device))
    if function is None:
        major, minor = torch.cuda.get_device_capability(device)
        cubin = compile(kernel, "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}")
        cuda_driver.bind_thread(device)
        module = cuda_driver.call("cuModuleLoadData", cubin)
        if kernel.transport == "nvshmem":
            linking.tell_nvshmem(int(module))
        function = int(cuda_driver.call("cuModuleGetFunction", module, b"moecomm_plain"))
        most = cuda_driver.driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        cuda_driver.call("cuFuncSetAttribute", function, most, kernel.shared_bytes)
        if hasattr(cuda_driver.driver(), "cuFuncLoad"):  # now, and not at the first launch, which may be captured
            cuda_driver.call("cuFuncLoad", function)
        _functions[kernel, device] = function
    return function


def launch(kernel: PlainKernel, blocks: int, args: ctypes.Structure) -> None:
    """Enqueues the kernel on the current stream of the current device."""
    device = torch.cuda.current_device()
    function = load(kernel, device)
    stream = _native.current_stream(device)
    _native.cuda_launch_packed(function, blocks, kernel.threads, kernel.shared_bytes, stream, args)
