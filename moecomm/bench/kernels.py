"""The benchmark's own kernels (csrc/bench): compiled through cuda.core, kept in the cache of kernels, launched with one
struct.
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
from typing import Any

import torch

from moecomm import kernel_cache, linking
from moecomm.backends import cuda_driver
from moecomm.config import cache_dir

_FOLDERS = ("protocol", "device", "shims", "bench")
PIECE = 8192  # bytes that a bulk copy moves: kPiece, kPutPiece
_SLOTS = 4  # of a ring: kSlots, kPutSlots


@dataclass(frozen=True)
class BenchKernel:
    """A kernel of csrc/bench: `entry(args)` in namespace moecomm::bench, and the block that it runs with.

    `rings`: warps that move bytes by bulk copies, each with a ring of its own in dynamic shared memory.
    `transport`: one of moecomm.linking.TRANSPORTS.
    """

    header: str
    entry: str
    args: str
    threads: int
    rings: int = 0
    transport: str = "lsa"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rings, and a barrier for each of their slots."""
        return self.rings * _SLOTS * (PIECE + 8)

    @property
    def source(self) -> str:
        """The translation unit."""
        name = linking.TRANSPORTS[self.transport]
        more = "" if self.transport == "lsa" else f'#include "device/{name.lower()}.cuh"\nusing moecomm::{name};\n'
        return (
            f'#include "bench/{self.header}.cuh"\n{more}'
            "using namespace moecomm::bench;\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, 1)\n'
            f"moecomm_bench(const __grid_constant__ {self.args} args) {{ {self.entry}(args); }}\n"
        )


ALL_TO_ALL = {
    "st.v4 write": BenchKernel("all_to_all", "all_to_all<Method::store>", "AllToAllArgs", 1024),
    "ld.v4 read": BenchKernel("all_to_all", "all_to_all<Method::load>", "AllToAllArgs", 1024),
    "TMA write": BenchKernel("all_to_all", "all_to_all<Method::bulk_write>", "AllToAllArgs", 192, rings=6),
    "TMA read": BenchKernel("all_to_all", "all_to_all<Method::bulk_read>", "AllToAllArgs", 192, rings=6),
}
PING_PONG = {
    "st, a warp": BenchKernel("ping_pong", "ping_pong<false>", "PingPongArgs", 32),
    "st": BenchKernel("ping_pong", "ping_pong<false>", "PingPongArgs", 512),
    "TMA": BenchKernel("ping_pong", "ping_pong<true>", "PingPongArgs", 128, rings=4),
}


@lru_cache(maxsize=4)
def putting(shim: str) -> dict[str, BenchKernel]:
    """PING_PONG through a library, by its shim."""
    entry = f"ping_pong_through<{linking.TRANSPORTS[shim]}>"
    # GIN's queue for a peer has 256 entries, which all warps of a channel share; stores want many warps.
    threads = {"put, a warp": 32, "put": 512 if shim == "nvshmem" else 128}
    return {
        name: BenchKernel("ping_pong_through", entry, "PingPongArgs", count, transport=shim)
        for name, count in threads.items()
    }


@lru_cache(maxsize=1)
def _headers() -> Path:
    """csrc as it was installed beside the package, else as it lies in the repository."""
    packaged = Path(str(importlib.resources.files("moecomm"))) / "csrc"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "csrc"


def build(kernel: BenchKernel, arch: str = "sm_90a") -> tuple[bytes, str]:
    """Compiles, without the cache: the cubin, and what ptxas says about it.  Needs no GPU."""
    core, log = importlib.import_module("cuda.core"), io.StringIO()
    if kernel.transport != "lsa":
        return linking.build(kernel.source, kernel.transport, arch, _headers(), core)
    known = core.ProgramOptions.__dataclass_fields__
    verbose = {"ptxas_options": ["-v"]} if "ptxas_options" in known else {}
    options = core.ProgramOptions(std="c++20", arch=arch, include_path=[str(_headers())], **verbose)
    program = core.Program(kernel.source, "c++", options)
    return bytes(program.compile("cubin", logs=log).code), log.getvalue()


def _compile(kernel: BenchKernel, arch: str) -> bytes:
    version = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()[1:]
    digest = hashlib.sha256(f"{version} {arch}\n{kernel.source}".encode())
    for path in sorted(p for folder in _FOLDERS for p in (_headers() / folder).iterdir() if p.suffix in (".h", ".cuh")):
        digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    if kernel.transport != "lsa":
        digest.update(linking.digest(kernel.transport, arch).encode())
    key = digest.hexdigest()
    if (cubin := kernel_cache.read(cache_dir(), key)) is None:
        cubin, _ = build(kernel, arch)
        kernel_cache.write(cache_dir(), key, cubin)
    return cubin


_functions: dict[tuple[BenchKernel, int], Any] = {}


def _load(kernel: BenchKernel, device: int) -> Any:
    function = _functions.get((kernel, device))
    if function is None:
        major, minor = torch.cuda.get_device_capability(device)
        cubin = _compile(kernel, "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}")
        cuda_driver.bind_thread(device)
        module = cuda_driver.call("cuModuleLoadData", cubin)
        if kernel.transport == "nvshmem":
            linking.tell_nvshmem(int(module))
        function = cuda_driver.call("cuModuleGetFunction", module, b"moecomm_bench")
        most = cuda_driver.driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        cuda_driver.call("cuFuncSetAttribute", function, most, kernel.shared_bytes)
        _functions[kernel, device] = function
    return function


def launch(kernel: BenchKernel, blocks: int, args: ctypes.Structure) -> None:
    """Enqueues the kernel on the current stream of the current device."""
    device = torch.cuda.current_device()
    function = _load(kernel, device)
    values = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    stream = torch.cuda.current_stream(device).cuda_stream
    grid, block = (blocks, 1, 1), (kernel.threads, 1, 1)
    shared = kernel.shared_bytes
    cuda_driver.call("cuLaunchKernel", function, *grid, *block, shared, stream, ctypes.addressof(values), 0)
