"""Launches of the kernels of csrc/elementwise, each of which passes over some rows once."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from moecomm.base.protocol import PASS_THREADS
from moecomm.gpu import plain_kernel
from moecomm.gpu.structs import struct

# Header and argument struct of each kernel.
KERNELS = {
    "zero_padding": ("used_rows", "PaddingArgs"),
    "copy_rows": ("used_rows", "CopyRowsArgs"),
    "tidy": ("used_rows", "TidyArgs"),
    "ids_of_map": ("routing", "MapArgs"),
    "weights_at_experts": ("routing", "MapArgs"),
    "look_up_experts": ("routing", "ExpertTableArgs"),
    "count_entries": ("budgets", "BudgetArgs"),
    "keep_entries": ("budgets", "BudgetArgs"),
    "combine_gradients": ("gradients", "GradientArgs"),
    "swiglu_gradients": ("gradients", "SwigluArgs"),
    "quantize_rows": ("quantize_rows", "QuantizeArgs"),
    "quantize_blocks": ("quantize_rows", "QuantizeArgs"),
}
ROW = 32  # threads for a row in kernels that give each row a warp
IDS = {torch.int64: "i64", torch.int32: "i32"}  # as kernels name the types of ids
TYPES = {torch.bfloat16: "Type::bf16", torch.float16: "Type::fp16", torch.float32: "Type::fp32"}  # and those of rows
_MOST_BLOCKS = 528  # four a multiprocessor of an H200


@cache
def kernel(name: str, *arguments: str) -> plain_kernel.PlainKernel:
    """Return a kernel of KERNELS; `arguments`: of its template."""
    header, args = KERNELS[name]
    entry = f"{name}<{', '.join(arguments)}>" if arguments else name
    return plain_kernel.PlainKernel(f"elementwise/{header}", entry, args, PASS_THREADS)


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def run(
    kernel: plain_kernel.PlainKernel, device: torch.device, threads: int, **fields: float | ctypes.Structure
) -> None:
    """Launch a kernel on the current stream of a device.

    `threads`: one for each piece of work.  At most _MOST_BLOCKS blocks are launched; they then loop.

    `fields`: those of its struct that are not 0.
    """
    args = struct(kernel.args)(**fields)
    plain_kernel.launch_on(device, kernel, blocks_of(threads), args)


def blocks_of(threads: int) -> int:
    """Return the blocks of a launch, for one thread a piece of work."""
    return max(1, min(_MOST_BLOCKS, -(-threads // PASS_THREADS)))
