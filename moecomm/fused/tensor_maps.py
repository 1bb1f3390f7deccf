"""Tensor maps: what the copy engine of a multiprocessor is told of a matrix in memory.  Encoded once a matrix."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from moecomm.backends import cuda_driver

TensorMap = ctypes.c_ubyte * 128  # CUtensorMap
_TYPES = {
    torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    torch.float16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
}


def parameters(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...]
) -> tuple[str, int, int, list[int], list[int], list[int], list[int]]:
    """Arguments of cuTensorMapEncodeTiled for a contiguous matrix: fastest dimension first, strides in bytes.

    Boxes are laid out with the swizzle of 128 bytes; what lies outside of the matrix reads as 0.
    """
    assert len(shape) == len(box) and box[-1] * dtype.itemsize == 128 and max(box) <= 256
    strides = [dtype.itemsize]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    dims = list(reversed(shape))
    return _TYPES[dtype], len(dims), address, dims, strides[1:], list(reversed(box)), [1] * len(dims)


@lru_cache(maxsize=4096)
def encode(address: int, shape: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...]) -> Any:
    """The map of a contiguous matrix at a device address, for boxes of this shape.

    It says no more than its arguments, so that one of memory that has been freed does no harm.  Raises DriverError.
    """
    driver = cuda_driver.driver()
    kind, rank, address, dims, strides, boxes, steps = parameters(address, shape, dtype, box)
    encoded = cuda_driver.call(
        "cuTensorMapEncodeTiled",
        getattr(driver.CUtensorMapDataType, kind),
        rank,
        address,
        [driver.cuuint64_t(n) for n in dims],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in boxes],
        [driver.cuuint32_t(n) for n in steps],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(int(encoded.getPtr()), 128))
