"""What every compiled kernel must be: within registers, with nothing spilled, and with its memory named."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from importlib import metadata

import pytest

_DESCRIPTOR = "c[0x0][0x208]"  # where sm_90 finds what its accesses to memory go through


def check_compiled(built: tuple[bytes, str], threads: int, *, calls: bool = False) -> None:
    """A cubin, and what ptxas said of it.  `threads`: of a block; `calls`: it has a function that is called."""
    cubin, log = built
    assert cubin.startswith(b"\x7fELF")
    (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
    assert registers * threads <= 65536  # with which a block begins, before its warps share them out anew
    assert {*re.findall(r"(\d+) bytes spill", log)} == {"0"}
    assert {*re.findall(r"(\d+) bytes stack frame", log)} == {"0"} or calls
    assert "warning" not in log
    check_memory_descriptor(cubin)


def check_memory_descriptor(cubin: bytes) -> None:
    """ptxas 13.0 was seen to leave it out: accesses then go through whatever a register holds, and a GPU calls that an
    illegal instruction, now and then.
    """
    program = _nvdisasm()
    if program is None:
        pytest.skip("instructions are looked at through nvdisasm: pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout
    for function in words.split(".text.")[1:]:
        assert ("desc[" in function) <= (_DESCRIPTOR in function), function.partition("\n")[0]


@lru_cache(maxsize=1)
def _nvdisasm() -> str | None:
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        return shutil.which("nvdisasm")
    return next(str(file.locate()) for file in files if file.name == "nvdisasm")
