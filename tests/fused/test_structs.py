"""The argument structs of kernels: ctypes, g++ and NVRTC lay them out alike."""

from __future__ import annotations

import ctypes
import re

import pytest

from moecomm import _native
from moecomm.base.protocol import DESCRIPTOR_BYTES
from moecomm.gpu import loader, plain_kernel
from moecomm.gpu.structs import struct

TABLE = _native.structs()


def test_every_struct_is_laid_out_as_the_native_module_says() -> None:
    for name, (size, fields) in TABLE.items():
        made = struct(name)
        assert ctypes.sizeof(made) == size
        for field, _, offset, nbytes, _ in fields:
            placed = getattr(made, field)
            assert (placed.offset, placed.size) == (offset, nbytes), (name, field)
        with pytest.raises(AttributeError, match="another_field"):
            made(another_field=1)
    assert struct("LayerArgs").x.offset == _native.Context().nbytes  # type: ignore[attr-defined]


def test_kernels_lay_them_out_so_too() -> None:
    core = pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")
    included = ("device/between_rounds_args.h", "elementwise/args.h", "window/call_args.h", "overlap/args.h")
    checked = "".join(f'#include "{header}"\n' for header in included) + "using namespace moecomm;\n"
    checked += f"static_assert(sizeof(RowDescriptor) == {DESCRIPTOR_BYTES});\n"
    for name, (size, fields) in TABLE.items():
        checked += f"static_assert(sizeof({name}) == {size});\n"
        for field, _, offset, nbytes, _ in fields:
            member = f"__INTADDR__(&((({name}*)0)->{field})) == {offset} && sizeof({name}::{field}) == {nbytes}"
            checked += f'static_assert({member}, "{name}::{field}");\n'
    kernel = plain_kernel.PlainKernel("fused/expert_layer", "sizes", "ExpertLayerArgs", 32)
    checked += "__device__ void sizes(const ExpertLayerArgs&) {}\n"
    options = core.ProgramOptions(std="c++20", arch="sm_90a", include_path=[str(loader.headers())])
    source = re.sub(r"(?<=using namespace moecomm;\n)", lambda _: checked, kernel.source, count=1)
    core.Program(source, "c++", options).compile("cubin")
