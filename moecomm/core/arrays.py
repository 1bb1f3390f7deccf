"""Tensors in, tensors out: torch tensors as they are, anything else with DLPack (CuPy, NumPy, JAX ...) by reference
and back.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.dlpack import from_dlpack

from moecomm import _native
from moecomm.errors import BadInput

# DLPack type codes and bits
_DLPACK = {
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e8m0fnu: (14, 8),
}


def as_tensor(argument: str, value: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any] | None]:
    """`value` as a torch tensor over the same memory, and what turns our tensors back into the caller's kind; None for
    torch's own, and where its library takes none.
    """
    if isinstance(value, torch.Tensor):
        # A view with the negative bit has its numbers with the other sign in memory.  In a graph, torch sees to it.
        return value if torch.compiler.is_compiling() else value.resolve_neg(), None
    if not hasattr(value, "__dlpack__"):
        raise BadInput(argument, type(value).__name__, "a torch tensor or an array with __dlpack__")
    strides = getattr(value, "strides", None)
    if isinstance(strides, tuple) and any(stride < 0 for stride in strides):  # torch ends the process
        raise BadInput(argument, f"strides {strides} bytes", "none below 0")
    try:
        tensor = from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BadInput(argument, f"{type(value).__name__}: {error}", "an array that torch takes by DLPack") from error
    return tensor, _maker(value)


def _maker(value: Any) -> Callable[[torch.Tensor], Any] | None:
    """from_dlpack of the library that an array, or what its class derives from, is of."""
    packages: list[Any] = [sys.modules.get(kind.__module__.partition(".")[0]) for kind in type(value).__mro__]
    if hasattr(value, "__array_namespace__"):  # JAX: its arrays come from jaxlib, their functions do not
        packages.append(value.__array_namespace__())
    return next((package.from_dlpack for package in packages if hasattr(package, "from_dlpack")), None)


def window_tensor(
    block: _native.Block, address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, owner: object
) -> torch.Tensor:
    """A contiguous tensor at `address` inside `block`; it keeps the block, and `owner`, alive."""
    index = device.index  # a Buffer's GPU has one, its CPU has none
    kind, index = (1, 0) if index is None else (2, index)
    code, bits = _DLPACK[dtype]
    return block.torch_tensor(address, shape, code, bits, kind, index, owner)


def check_tensor(
    argument: str,
    tensor: torch.Tensor,
    *,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
) -> None:
    """Raises BadInput unless device, dtype and shape (None: any length) are as wanted, and it is plain memory."""
    if tensor.device != device:
        raise BadInput(argument, f"a tensor on {tensor.device}", f"one on {device}")
    if tensor.layout is not torch.strided or tensor.is_nested or not has_memory(tensor):
        raise BadInput(argument, "a tensor that is sparse, nested, traced or otherwise not in memory", "a dense one")
    check_memory(argument, tensor)
    if tensor.dtype not in dtypes:
        raise BadInput(argument, str(tensor.dtype), " or ".join(map(str, dtypes)))
    if tensor.ndim != len(shape) or any(
        want is not None and got != want for got, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise BadInput(argument, f"shape {tuple(tensor.shape)}", f"({wanted})")


def check_memory(argument: str, tensor: torch.Tensor) -> None:
    """Raises BadInput if the tensor's storage, which may have been resized since, has less than its shape asks for, or
    if its numbers have another sign in memory.
    """
    if tensor.is_neg():
        raise BadInput(argument, "a view with the negative bit", "its resolve_neg()")
    if tensor.numel() == 0:
        return
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if end > (held := tensor.untyped_storage().nbytes()):
        raise BadInput(argument, f"a storage of {held} bytes", f"the {end} bytes that its shape and strides ask for")


def check_no_overlap(argument: str, written: torch.Tensor, **read: torch.Tensor | None) -> None:
    """Raises BadInput if a tensor that is written has memory of one that is read meanwhile.  A bias may lie exactly
    where the sums go: each is written where its bias has been read.
    """
    bias = read.get("bias")
    if bias is not None and _place(bias) == _place(written):
        read["bias"] = None
    for name, tensor in read.items():
        if tensor is not None and _native.share_memory(written, tensor):
            raise BadInput(argument, f"memory of {name}, which is read meanwhile", "memory of its own")


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.stride(), tensor.dtype


def note_written(argument: str, *written: Any) -> None:
    """Tells autograd of tensors of the caller's that are written by address, so that a backward pass which has saved
    what was in them says so.  BadInput for one that has a gradient, which would be wrong.
    """
    for tensor in written:
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.requires_grad and torch.is_grad_enabled():
            raise BadInput(
                argument, "a tensor that requires grad", "one that does not, or a call under torch.no_grad()"
            )
        torch.autograd.graph.increment_version(tensor)


def warn_of_gradients(*tensors: Any) -> None:
    """Says, once, that what a Buffer's own rounds return has no gradient, if one of the tensors asks for it."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if getattr(tensor, "requires_grad", False):
                _say_that_gradients_end()


@lru_cache(maxsize=1)
def _say_that_gradients_end() -> None:
    warnings.warn(
        "dispatch, combine and moe of a moecomm.Buffer have no gradients, and were given a tensor that requires grad: "
        "use moecomm.ops, or torch.no_grad() where no gradient is wanted",
        stacklevel=2,
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements have addresses: none, or those of a transformation of torch, have not."""
    if isinstance(tensor, FakeTensor):
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # that of a transformation of torch
        return False


def check_rows(argument: str, tensor: torch.Tensor) -> int:
    """The bytes from row to row of a [rows, columns] tensor; BadInput unless rows are contiguous and 16-byte
    aligned.
    """
    size = tensor.element_size()
    stride = tensor.stride(0) * size
    if tensor.numel() == 0:
        return tensor.shape[1] * size
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise BadInput(argument, f"strides {tensor.stride()}", "contiguous rows")
    if stride % 16 or tensor.data_ptr() % 16:
        raise BadInput(
            argument,
            f"rows {stride} bytes apart, the first at 0x{tensor.data_ptr():x}",
            "rows that start at multiples of 16 bytes",
        )
    return stride


def as_output_tensor(
    argument: str, value: Any, *, device: torch.device, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int]
) -> torch.Tensor:
    """adopt() of [rows, columns] that will be written, with its checks: check_tensor, check_rows, and that it may be
    written, and no two rows share memory.
    """
    if getattr(getattr(value, "flags", None), "writeable", True) is False:
        raise BadInput(argument, "a read-only array", "one that can be written")
    tensor = value if isinstance(value, torch.Tensor) else as_tensor(argument, value)[0]  # not a copy, see adopt
    check_tensor(argument, tensor, device=device, dtypes=dtypes, shape=shape)
    check_rows(argument, tensor)
    if len(tensor) > 1 and tensor.stride(0) < tensor.shape[1]:
        raise BadInput(argument, f"strides {tensor.stride()}", "rows that share no memory")
    return tensor
