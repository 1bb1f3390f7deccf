"""Kernels compiled for the shape at hand: NVRTC through cuda.core, once, then from a disk cache of this user.

    kernel = jit.load(jit.KernelSpec(op="dispatch", ranks=4, experts=256, topk=8, hidden=7168, ...), device)
    launch(kernel.function, blocks, kernel.block, kernel.shared_bytes)

Nothing of the CUDA packages is imported before the first kernel is wanted.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from moecomm import _native
from moecomm.gpu import linking, loader, span_ring
from moecomm.gpu.blocks import block_fields, block_threads
from moecomm.gpu.spec import KernelSpec, packets_of

__all__ = [
    "Kernel",
    "KernelSpec",
    "block_fields",
    "block_threads",
    "build",
    "compile",
    "load",
    "packets_of",
    "source",
]

_END = _native.Part.end


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: `function`, a CUfunction; `block`, its threads; `shared_bytes`, dynamic shared memory."""

    function: int
    block: int
    shared_bytes: int


def source(spec: KernelSpec) -> str:
    """Return the translation unit of a kernel: its configuration, by named fields, and an unmangled entry."""
    shape = f".ranks = {spec.ranks}, .experts = {spec.experts}, .topk = {spec.topk}, .hidden = {spec.hidden}"
    if spec.domain_ranks:
        shape += f", .domain_ranks = {spec.domain_ranks}"
    kind = f".layout = Layout::{_native.Layout(spec.layout).name}, .type = Type::{_native.Type(spec.type).name}"
    if spec.op == "dispatch":
        kind += f", .idx_bytes = {spec.idx_bytes}, .row_bytes = {spec.row_bytes}, .scale_bytes = {spec.scale_bytes}"
        kind += f", .scale_columns = {_bool(spec.scale_columns)}, .quantize = {_bool(spec.quantize)}"
        kind += f", .scale_format = ScaleFormat::{_native.ScaleFormat(spec.scale_format).name}"
        if spec.format != "fp8":
            kind += f", .format = Format::{spec.format}"
        kind += f", .repeat = {_bool(spec.repeat)}"
        kind += f", .descriptors = {_bool(spec.descriptors)}" + ", .placed = true" * spec.placed
        if spec.named_experts:
            kind += f", .named_experts = {spec.named_experts}"
        kind += ", .balanced = true" * spec.balanced + ", .compares = true" * spec.compares
        kind += f", .part = Part::{_native.Part(spec.part).name}, .packets = {_bool(spec.packets)}"
    else:
        kind += f", .wide_bias = {_bool(spec.wide_bias)}, .bias_first = {_bool(spec.bias_first)}"
        kind += f", .wire = Type::{_native.Type(spec.wire).name}, .weighted = {_bool(spec.weighted)}"
        kind += f", .own_weights = {_bool(spec.own_weights)}, .in_place = {_bool(spec.in_place)}"
        kind += ", .unsummed = true" * spec.unsummed
        kind += f", .sum_grads = {_bool(spec.sum_grads)}, .verifies = {_bool(spec.verifies)}"
        kind += f", .packets = {_bool(spec.packets)}"
    fields = block_fields(spec)
    block = ", ".join(f".{name} = {value}" for name, value in fields.items())
    name, function = spec.op.capitalize(), "dispatch_end" if spec.part == _END else spec.op
    transport = linking.TRANSPORTS[spec.transport]
    return span_ring.DEFINITION * spec.traced + (
        f'#include "{spec.op}/{spec.op}.cuh"\n{linking.included(spec.transport)}'
        "using namespace moecomm;\n"
        f"constexpr {name}Config config{{{shape}, {kind}, {block}}};\n"
        f'extern "C" __global__ void __launch_bounds__({block_threads(fields)}, 1)\n'
        f"moecomm_{spec.op}(const __grid_constant__ {name}Args args) {{ {function}<config, {transport}>(args); }}\n"
    )


def build(spec: KernelSpec, arch: str = "sm_90a") -> tuple[bytes, str]:
    """Compile, and link if the transport has a shim, without the cache.  Return the cubin and ptxas's messages."""
    return loader.build(source(spec), spec.transport, arch)


def compile(spec: KernelSpec, arch: str = "sm_90a") -> bytes:  # noqa: A001
    """Return the cubin of a kernel, from the cache or compiled.  Needs no GPU.

    Raises:
        ValueError: names a limit that the kernel exceeds.
        Unsupported: the transport is not "lsa", and the library that it is linked with is missing.
    """
    return loader.cubin_of(source(spec), spec.transport, arch, lambda: build(spec, arch))


_loaded: dict[tuple[KernelSpec, int], Kernel] = {}
_loading = threading.Lock()


def load(spec: KernelSpec, device: Any) -> Kernel:
    """Return the kernel on a CUDA device (a torch.device with an index, or the index), compiled if need be."""
    index = int(getattr(device, "index", device))
    if (kernel := _loaded.get((spec, index))) is None:
        with _loading:
            if (kernel := _loaded.get((spec, index))) is None:
                kernel = _loaded[spec, index] = _load(spec, index)
    return kernel


def _load(spec: KernelSpec, index: int) -> Kernel:
    fields = block_fields(spec)
    entry, shared_bytes = f"moecomm_{spec.op}", fields["shared_bytes"]
    function = loader.load(index, lambda arch: compile(spec, arch), entry, spec.transport, shared_bytes, spec.traced)
    return Kernel(function, block_threads(fields), shared_bytes)


def _bool(value: bool) -> str:
    return str(value).lower()
