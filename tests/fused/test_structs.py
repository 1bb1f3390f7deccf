"""The argument structs of kernels: ctypes, g++ and NVRTC lay them out alike."""

from __future__ import annotations

import ctypes
import inspect
import re

import pytest

from moecomm import _native
from moecomm.backends import between_rounds
from moecomm.base.protocol import DESCRIPTOR_BYTES
from moecomm.fused import copies, structs
from moecomm.gpu import budgets, expert_table, loader, padding, plain_kernel, quantize_rows, routing_map, used_rows
from moecomm.ops import combine_gradients, swiglu, tidy
from moecomm.overlap import kernels
from moecomm.window import gpu_calls, pace

TABLE = _native.structs()


def test_every_struct_is_laid_out_as_the_native_module_says() -> None:
    found = {
        name: one for name, one in inspect.getmembers(structs, inspect.isclass) if one.__module__ == structs.__name__
    }
    found |= {
        "PaddingArgs": padding.Args,
        "CopyRowsArgs": used_rows._Args,
        "MapArgs": routing_map._Args,
        "BudgetArgs": budgets._Args,
        "ExpertTableArgs": expert_table._Args,
        "QuantizeArgs": quantize_rows._Args,
        "TidyArgs": tidy._Args,
    }
    found |= {
        "SwigluArgs": swiglu._Args,
        "GradientArgs": combine_gradients._Args,
        "LeaveArgs": between_rounds.LeaveArgs,
    }
    found |= {"QuiesceArgs": between_rounds.QuiesceArgs, "SetPlacementArgs": between_rounds.SetPlacementArgs}
    found |= {"Window": gpu_calls.WindowStruct, "WindowCallArgs": gpu_calls.CallArgs, "PauseArgs": pace.PauseArgs}
    found |= {"CopyArgs": copies.CopyArgs}
    of_operators = inspect.getmembers(kernels, inspect.isclass)
    found |= {name: one for name, one in of_operators if one.__module__ == kernels.__name__}
    assert set(found) == set(TABLE)
    for name, (size, fields) in TABLE.items():
        assert ctypes.sizeof(found[name]) == size
        for field, _, offset, nbytes, _ in fields:
            placed = getattr(found[name], field)
            assert (placed.offset, placed.size) == (offset, nbytes), (name, field)
    assert structs.LayerArgs.x.offset == _native.Context().nbytes


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
