"""Tensor maps (CUtensorMap): descriptions of matrices in memory for TMA, encoded once for each matrix and cached."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import torch

from moecomm.gpu import cuda_driver
from moecomm.gpu.structs import struct

_TYPES = {
    torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    torch.float16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    torch.float8_e4m3fn: "CU_TENSOR_MAP_DATA_TYPE_UINT8",
    torch.uint8: "CU_TENSOR_MAP_DATA_TYPE_UINT8",
    torch.int32: "CU_TENSOR_MAP_DATA_TYPE_INT32",
    torch.int8: "CU_TENSOR_MAP_DATA_TYPE_UINT8",
}


def parameters(
    address: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    box: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    swizzled: bool = True,
) -> tuple[str, int, int, list[int], list[int], list[int], list[int]]:
    """Return the arguments of cuTensorMapEncodeTiled: fastest dimension first, strides in bytes.

    Elements outside of the matrix read as 0.

    Args:
        address: device address of the matrix.
        shape: sizes of the dimensions, slowest first.
        dtype: of the elements.
        box: sizes of a box, at most 256 each; where it is swizzled, its fastest dimension has 128 or 64 bytes.
        strides: in elements, the last of them 1; default: contiguous.
        swizzled: boxes have the swizzle of their rows' 128 or 64 bytes, not none.
    """
    assert len(shape) == len(box) and max(box) <= 256
    assert not swizzled or box[-1] * dtype.itemsize in (64, 128)
    if strides is None:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    dims, stride_bytes = list(reversed(shape)), [dtype.itemsize * step for step in reversed(strides)]
    return _TYPES[dtype], len(dims), address, dims, stride_bytes[1:], list(reversed(box)), [1] * len(dims)


@lru_cache(maxsize=4096)
def encode(
    address: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    box: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    swizzled: bool = True,
) -> Any:
    """Return the TensorMap of a matrix; arguments as in parameters().  Raises DriverError.

    A map depends on its arguments alone, so a cached map of freed memory does no harm.
    """
    driver = cuda_driver.driver()
    kind, rank, address, dims, stride_bytes, boxes, steps = parameters(address, shape, dtype, box, strides, swizzled)
    swizzle = f"{box[-1] * dtype.itemsize}B" if swizzled else "NONE"
    encoded = cuda_driver.call(
        "cuTensorMapEncodeTiled",
        getattr(driver.CUtensorMapDataType, kind),
        rank,
        address,
        [driver.cuuint64_t(n) for n in dims],
        [driver.cuuint64_t(n) for n in stride_bytes],
        [driver.cuuint32_t(n) for n in boxes],
        [driver.cuuint32_t(n) for n in steps],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    kind_of = struct("TensorMap")
    return kind_of.from_buffer_copy(ctypes.string_at(int(encoded.getPtr()), ctypes.sizeof(kind_of)))
