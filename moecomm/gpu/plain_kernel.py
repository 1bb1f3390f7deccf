"""Kernels with one job each, from a header of csrc, launched with one struct.

They are compiled through cuda.core and kept in the cache of kernels.  moecomm.gpu.jit has the kernels of rounds.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch

from moecomm import _native
from moecomm.gpu import cuda_driver, linking, loader, span_ring


@dataclass(frozen=True)
class PlainKernel:
    """`entry(args)` of a header below csrc, with names of `namespace`, and the threads of a block.

    `transport`: one of moecomm.gpu.linking.TRANSPORTS.  `cluster`: blocks of a cluster, a divisor of the blocks.
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
        """Bytes of dynamic shared memory."""
        return 0

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that a multiprocessor must have room for at once."""
        return 1

    @property
    def source(self) -> str:
        """The translation unit."""
        clusters = f"__cluster_dims__({self.cluster}) " if self.cluster > 1 else ""
        return (
            f'#include "{self.header}.cuh"\n{linking.included(self.transport)}'
            f"using namespace moecomm;\nusing namespace {self.namespace};\n"
            f'extern "C" __global__ void {clusters}__launch_bounds__({self.threads}, {self.blocks_per_sm})\n'
            f"moecomm_plain(const __grid_constant__ {self.args} args) {{ {self.entry}(args); }}\n"
        )


def build(kernel: PlainKernel, arch: str = "sm_90a", traced: bool = False) -> tuple[bytes, str]:
    """Compile without the cache; return the cubin and ptxas's messages.  Needs no GPU.  `traced`: with spans."""
    return loader.build(span_ring.DEFINITION * traced + kernel.source, kernel.transport, arch)


def compile(kernel: PlainKernel, arch: str, traced: bool = False) -> bytes:  # noqa: A001
    """Return the cubin, from the cache or compiled.  Needs no GPU.  `traced`: with spans."""
    source = span_ring.DEFINITION * traced + kernel.source
    return loader.cubin_of(source, kernel.transport, arch, lambda: build(kernel, arch, traced))


_WITH_SPANS = ("fused/publish", "fused/expert_layer", "fused/reduce")  # headers of kernels that can be traced
_functions: dict[tuple[PlainKernel, int, bool], int] = {}


def load(kernel: PlainKernel, device: int) -> int:
    """Return the kernel on a CUDA device, a CUfunction, compiled and loaded if need be.

    Raises Unsupported if the transport needs a library that is missing.
    """
    traced = span_ring.wanted and kernel.header in _WITH_SPANS
    function = _functions.get((kernel, device, traced))
    if function is None:
        cuda_driver.bind_thread(device)  # for launches
        how = (lambda arch: compile(kernel, arch, traced)), "moecomm_plain", kernel.transport, kernel.shared_bytes
        function = _functions[kernel, device, traced] = loader.load(device, *how, traced)
    return function


def launch(kernel: PlainKernel, blocks: int, args: ctypes.Structure, overlap: bool = False) -> None:
    """Enqueue the kernel on the current stream of the current device.

    `overlap`: it may be launched while its predecessor ends, for which it waits before it touches memory.
    """
    enqueue(torch.cuda.current_device(), kernel, blocks, args, overlap)


def launch_on(device: torch.device, kernel: PlainKernel, blocks: int, args: ctypes.Structure) -> None:
    """Enqueue the kernel on the current stream of a device, from any thread."""
    if _native.cuda_context() == 0:  # autograd's threads may have none yet
        cuda_driver.bind_thread(device.index)
    if torch.cuda.current_device() == device.index:
        enqueue(device.index, kernel, blocks, args)
        return
    with torch.cuda.device(device):
        enqueue(device.index, kernel, blocks, args)


def enqueue(device: int, kernel: PlainKernel, blocks: int, args: ctypes.Structure, overlap: bool = False) -> None:
    """Enqueue the kernel on the current stream of this device, which is the current one.  `overlap`: see launch()."""
    function = load(kernel, device)
    stream = _native.current_stream(device)
    _native.cuda_launch_packed(function, blocks, kernel.threads, kernel.shared_bytes, stream, args, overlap)
