from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from moecomm import _native

from ..fresh_python import run_python

INT, UINT, FLOAT, BFLOAT, BOOL, E4M3, E8M0 = 0, 1, 2, 4, 6, 10, 14
DTYPES = {
    torch.int8: (INT, 8),
    torch.int16: (INT, 16),
    torch.int32: (INT, 32),
    torch.int64: (INT, 64),
    torch.uint8: (UINT, 8),
    torch.float16: (FLOAT, 16),
    torch.float32: (FLOAT, 32),
    torch.float64: (FLOAT, 64),
    torch.bfloat16: (BFLOAT, 16),
    torch.bool: (BOOL, 8),
    torch.float8_e4m3fn: (E4M3, 8),
    torch.float8_e8m0fnu: (E8M0, 8),
}
# Ways to make torch's tensor of a block: through a capsule or at once.
WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "capsule": lambda block, *what: from_dlpack(block.tensor(*what)),
    "at once": lambda block, *what: block.torch_tensor(*what),
}
both_ways = pytest.mark.parametrize("way", WAYS)


class Owner:
    """Something whose end can be seen."""


def a_block(nbytes: int = 4096) -> tuple[_native.Arena, _native.HostMemory, _native.Block]:
    """The arena's offsets are those in the memory."""
    memory = _native.host_alloc(nbytes)
    arena = _native.Arena(0, nbytes)
    block = arena.allocate(nbytes)
    assert block is not None
    return arena, memory, block


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_dtype(dtype: torch.dtype, way: str) -> None:
    _, memory, block = a_block()
    code, bits = DTYPES[dtype]
    tensor = WAYS[way](block, memory.address, (3, 5, 2), code, bits, 1, 0, memory)
    assert (tensor.dtype, tensor.shape, tensor.device) == (dtype, (3, 5, 2), torch.device("cpu"))
    assert tensor.is_contiguous()
    assert tensor.data_ptr() == memory.address
    expected = (torch.arange(30).reshape(3, 5, 2) % 7).to(dtype)
    tensor.copy_(expected)
    raw = ctypes.string_at(memory.address, 30 * bits // 8)
    assert raw == bytes(expected.view(torch.uint8).flatten().tolist())
    assert ctypes.string_at(memory.address + len(raw), 64) == bytes(64)


@both_ways
@pytest.mark.parametrize("shape", [(), (0,), (0, 7), (7, 0, 2), (1,), (4, 1, 4)])
def test_shapes(shape: tuple[int, ...], way: str) -> None:
    _, memory, block = a_block()
    tensor = WAYS[way](block, memory.address, shape, FLOAT, 32, 1, 0, memory)
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    assert tensor.stride() == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("shape", "bits", "why"),
    [
        ((1025,), 32, "4100 bytes does not fit a block of 4096"),
        ((2, -1), 32, "negative"),
        ((1 << 40, 1 << 40), 32, "too large"),
        ((0, 1 << 40, 1 << 40), 32, "too large"),
        ((8,), 4, "whole bytes"),
        ((8,), 0, "whole bytes"),
    ],
)
@both_ways
def test_bad_shapes(shape: tuple[int, ...], bits: int, why: str, way: str) -> None:
    arena, memory, block = a_block()
    owner = Owner()
    references = sys.getrefcount(owner)
    with pytest.raises(ValueError, match=why):
        WAYS[way](block, memory.address, shape, FLOAT, bits, 1, 0, owner)
    assert sys.getrefcount(owner) == references
    del block
    assert arena.used == 0


@both_ways
def test_block_lives_as_long_as_the_last_tensor(way: str) -> None:
    arena, memory, block = a_block()
    owner = Owner()
    gone = weakref.ref(owner)
    first = WAYS[way](block, memory.address, (16,), FLOAT, 32, 1, 0, owner)
    second = WAYS[way](block, memory.address + 1024, (16,), FLOAT, 32, 1, 0, None)
    del block, owner
    view = first[3:5]
    del first
    assert arena.used == 4096
    assert gone() is not None
    del view
    assert gone() is None
    assert arena.used == 4096
    del second
    assert arena.used == 0


def test_a_capsule_that_nobody_takes() -> None:
    arena, memory, block = a_block()
    owner = Owner()
    gone = weakref.ref(owner)
    capsule = block.tensor(memory.address, (16,), FLOAT, 32, 1, 0, owner)
    del block, owner
    assert (arena.used, gone() is None) == (4096, False)
    del capsule
    assert (arena.used, gone()) == (0, None)


def test_a_capsule_dropped_by_an_exception_keeps_it() -> None:
    _, memory, block = a_block()

    def fail() -> None:
        kept = block.tensor(memory.address, (16,), FLOAT, 32, 1, 0, Owner())
        raise RuntimeError(f"with {type(kept).__name__}")

    with pytest.raises(RuntimeError, match="with PyCapsule"):
        fail()


def test_a_capsule_is_taken_once() -> None:
    arena, memory, block = a_block()
    capsule = block.tensor(memory.address, (16,), FLOAT, 32, 1, 0)
    tensor = from_dlpack(capsule)
    with pytest.raises(RuntimeError):
        from_dlpack(capsule)
    del block, capsule
    assert arena.used == 4096
    del tensor
    assert arena.used == 0


def take(capsule: Any) -> int:
    """Consumes a capsule the way array libraries do; the address of the DLManagedTensor."""
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    managed = api.PyCapsule_GetPointer(capsule, b"dltensor")
    assert api.PyCapsule_SetName(capsule, USED) == 0
    assert managed is not None
    return int(managed)


USED = b"used_dltensor"


@pytest.mark.parametrize("in_thread", [False, True])
def test_deleter_without_the_gil(in_thread: bool) -> None:
    arena, memory, block = a_block()
    owner = Owner()
    gone = weakref.ref(owner)
    managed = take(block.tensor(memory.address, (16,), FLOAT, 32, 1, 0, owner))
    del block, owner
    gc.collect()
    assert (arena.used, gone() is None) == (4096, False)
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.c_void_p.from_address(managed + 56).value or 0)
    if in_thread:
        thread = threading.Thread(target=deleter, args=(managed,))  # ctypes calls it with the GIL released
        thread.start()
        thread.join()
    else:
        deleter(managed)
    assert (arena.used, gone()) == (0, None)


def test_a_tensor_may_outlive_python() -> None:
    code = """
import torch
from torch.utils.dlpack import from_dlpack
from moecomm import _native
memory = _native.host_alloc(4096)
block = _native.Arena(0, 4096).allocate(4096)
class Owner: pass
tensors = [from_dlpack(block.tensor(memory.address, (8,), 2, 32, 1, 0, Owner())) for _ in range(3)]
torch.kept = tensors[0]
torch.cycle = [tensors[1]]
torch.cycle.append(torch.cycle)
capsule = block.tensor(memory.address, (8,), 2, 32, 1, 0, memory)
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
