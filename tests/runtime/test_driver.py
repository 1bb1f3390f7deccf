"""Launches, against a driver that only says what it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moecomm import _native

FAKE = Path(__file__).parent / "fake_cuda.cpp"
LOAD = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_native", {_native.__file__!r})  # without torch
_native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_native)
"""


def with_driver(directory: Path, code: str, *flags: str, load: str = LOAD) -> list[str]:
    """Return what a fresh interpreter prints whose libcuda is the fake one."""
    library = directory / "libcuda.so.1"
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", *flags, str(FAKE), "-o", str(library)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", load + code],
        env={**os.environ, "LD_LIBRARY_PATH": str(directory), "PYTHONPATH": str(Path(_native.__file__).parents[1])},
        cwd=directory,  # a checkout may have a moecomm that is not built
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LAUNCHES = """
dispatch, combine = _native.DispatchArgs(), _native.CombineArgs()
for args, workers in ((dispatch, 7), (combine, 9)):
    context = _native.Context()
    context.peers = [workers * 100]  # the first 8 bytes of the struct
    args.ctx, args.workers = context, workers
_native.cuda_launch(0xabc, 512, 4096, 0x40, dispatch)
_native.cuda_launch(0xabd, 256, 1024, 0, combine, overlap=True)
combine.workers = 8
_native.cuda_launch(0xabe, 256, 1024, 0, combine, cluster=4)
_native.cuda_launch(0xabf, 256, 1024, 0, combine, overlap=True, cluster=2)
"""


def test_a_launch_hands_over_the_struct_and_may_overlap_and_have_clusters(tmp_path: Path) -> None:
    assert with_driver(tmp_path, LAUNCHES) == [
        "plain 0xabc 7 512 4096 0x40 700",
        "overlap 0xabd 9 256 1024 (nil) 900",
        "clusters of 4 0xabe 8 256 1024 (nil) 900",
        "overlap clusters of 2 0xabf 8 256 1024 (nil) 900",
    ]


def test_a_driver_that_can_do_neither_launches_all_the_same(tmp_path: Path) -> None:
    assert with_driver(tmp_path, LAUNCHES, "-DWITHOUT_EX") == [
        "plain 0xabc 7 512 4096 0x40 700",
        "plain 0xabd 9 256 1024 (nil) 900",
        "plain 0xabe 8 256 1024 (nil) 900",
        "plain 0xabf 8 256 1024 (nil) 900",
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_errors_have_the_drivers_names(tmp_path: Path, overlap: bool) -> None:
    function = "cuLaunchKernelEx" if overlap else "cuLaunchKernel"
    code = f"""
args = _native.DispatchArgs()
for act in (
    lambda: _native.cuda_launch(0xbad, 32, 0, 0, args, {overlap}),
    lambda: _native.cuda_capturing(6),
):
    try:
        act()
    except RuntimeError as error:
        print(error)
"""
    said = [line for line in with_driver(tmp_path, code) if "returned" in line]
    assert said == [
        f"{function} returned CUDA_ERROR_INVALID_HANDLE",
        "cuStreamIsCapturing returned CUDA_ERROR_INVALID_HANDLE",
    ]


def test_a_packed_struct_is_handed_over_as_it_is(tmp_path: Path) -> None:
    code = """
import struct
_native.cuda_launch_packed(0xac0, 132, 384, 2048, 0x40, struct.pack("<qq", 77, 0))
_native.cuda_launch_packed(0xac1, 4, 384, 0, 0x40, struct.pack("<qq", 78, 0), True)
try:
    _native.cuda_launch_packed(0xbad, 1, 32, 0, 0, bytearray(8))
except RuntimeError as error:
    print(error)
"""
    assert with_driver(tmp_path, code) == [
        "plain 0xac0 132 384 2048 0x40 77",
        "overlap 0xac1 4 384 0 0x40 78",
        "plain 0xbad 1 32 0 (nil) 0",
        "cuLaunchKernel returned CUDA_ERROR_INVALID_HANDLE",
    ]


def test_the_context_and_what_a_stream_does(tmp_path: Path) -> None:
    code = "print(_native.cuda_context(), _native.cuda_capturing(4), _native.cuda_capturing(5))"
    assert with_driver(tmp_path, code) == [f"{0x77} False True"]
