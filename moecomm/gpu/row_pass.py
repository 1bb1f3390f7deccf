"""Launches of the kernels that pass over rows once."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from moecomm.base.protocol import PASS_THREADS
from moecomm.gpu import plain_kernel

_MOST_BLOCKS = 528  # four a multiprocessor of an H200
ROW = 32  # threads of a row that is a warp's
IDS = {torch.int64: "i64", torch.int32: "i32"}  # as kernels name the types of ids
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # and those of rows


@cache
def kernel(header: str, entry: str, args: str) -> plain_kernel.PlainKernel:
    """`entry(args)` of a header below csrc."""
    return plain_kernel.PlainKernel(header, entry, args, PASS_THREADS)


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def launch(kernel: plain_kernel.PlainKernel, device: torch.device, threads: int, args: ctypes.Structure) -> None:
    """On the current stream of the device, with so many threads, or fewer that take turns."""
    plain_kernel.launch_on(device, kernel, max(1, min(_MOST_BLOCKS, -(-threads // PASS_THREADS))), args)
