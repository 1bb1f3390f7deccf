"""Windows in kernels as NVRTC compiles them for sm_90a, without a GPU, and in C++ as g++ does."""

from __future__ import annotations

import ctypes
import io
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm.window.gpu_calls import kernel

from ..compiled import Compiled, check_compiled, check_kernel, functions_of, looked_at
from ..emulator.test_windows import EVERYTHING

core: Any = pytest.importorskip("cuda.core")
BY_VALUE = r"""
#include <moecomm/window.cuh>
extern "C" __global__ void by_value(const __grid_constant__ moecomm::Window window, const float4* from, int bytes) {
    const moecomm::CoopBlock block;
    window.put_signal(block, (window.rank + 1) % window.ranks, 0, from, bytes, blockIdx.x, 1);
    window.barrier(block, blockIdx.x);
}
"""


def compiled(source: str, std: str = "c++17") -> Compiled:
    log = io.StringIO()
    options = core.ProgramOptions(std=std, arch="sm_90a", include_path=[moecomm.include_dir()], ptxas_options=["-v"])
    return looked_at(bytes(core.Program(source, "c++", options).compile("cubin", logs=log).code), log.getvalue())


@pytest.mark.parametrize("std", ["c++17", "c++20"])
def test_a_kernel_of_every_function(std: str) -> None:
    found = compiled(EVERYTHING, std)
    check_compiled(found, 1024, calls=True)
    code = "".join(functions_of(found))
    assert "UBLKCP" in code and "BPT.TRAP" not in code


def test_puts_move_vectors_and_signals_release() -> None:
    found = compiled(BY_VALUE)
    check_compiled(found, 1024, calls=True)
    code = "".join(functions_of(found))
    assert re.search(r"LDG?\.E\.128", code) and re.search(r"STG?\.E\.128", code), "16 bytes at a time"
    assert re.search(r"REDG?\.E\.ADD\.64\.STRONG\.SYS", code) and "MEMBAR.ALL.SYS" in code


def test_the_kernel_of_the_page_compiles() -> None:
    page = (Path(__file__).parents[2] / "docs" / "windows.md").read_text()
    (source,) = re.findall(r"^```cpp\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    check_compiled(compiled(source), 1024, calls=True)


CALLS = {call: kernel(call) for call in ("signal", "set_signal", "wait", "barrier")}


@pytest.mark.compiled(CALLS)
@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_of_calls(name: str) -> None:
    check_kernel(CALLS[name], calls=True)


TWIN = """
#include <moecomm/window.h>
extern "C" unsigned long long offsets(const moecomm::Window* w) { return w->signals; }
extern "C" bool turn(const moecomm::Window* w, unsigned long long to) {
    const moecomm::CoopThread coop;
    w->put_signal(coop, 0, 0, w->local<>(8), 8, 0, 1);
    return w->wait(coop, 0, to, 0) && w->barrier(coop, 3);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="wants g++")
@pytest.mark.parametrize("std", ["c++17", "c++20"])
def test_the_twin_needs_no_other_library(tmp_path: Path, std: str) -> None:
    built = tmp_path / "twin.so"
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
    command = [
        "g++",
        f"-std={std}",
        "-O2",
        *warnings,
        "-shared",
        "-fPIC",
        f"-I{moecomm.include_dir()}",
        "-x",
        "c++",
        "-",
    ]
    subprocess.run([*command, "-o", str(built)], input=TWIN, text=True, check=True)
    library = ctypes.CDLL(str(built))
    library.turn.restype = ctypes.c_bool
    with moecomm.Window("self", 64, backend="host", timeout_s=0.2) as window:
        window.tensor((1,), torch.int64, offset=8).fill_(77)
        assert library.turn(ctypes.c_uint64(window.handle_address), ctypes.c_uint64(1))
        assert window.tensor((1,), torch.int64).item() == 77 and window.signal_value(0) == 1
        assert not library.turn(ctypes.c_uint64(window.handle_address), ctypes.c_uint64(3))
        with pytest.raises(moecomm.Timeout, match="signal 0 to reach 3, which holds 2"):
            window.check()
