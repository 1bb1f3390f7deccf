"""Tensors in, tensors out: torch tensors as they are, other arrays with DLPack (CuPy, NumPy, JAX) without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


class _Words(dict[tuple[torch.dtype, torch.device], tuple[int, int, int, int]]):
    def __missing__(self, key: tuple[torch.dtype, torch.device]) -> tuple[int, int, int, int]:
        dtype, device = key
        on = (1, 0) if device.index is None else (2, device.index)  # None for the CPU
        words = self[key] = (*_DLPACK[dtype], *on)
        return words


DLPACK_WORDS = _Words()  # type code, bits, kind of device and its index, by dtype and device


def as_tensor(argument: str, value: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any] | None]:
    """Return `value` as a torch tensor over the same memory, and a function that converts torch tensors to its kind.

    The function is None for torch's own tensors, and for libraries that take no DLPack.
    """
    if isinstance(value, torch.Tensor):
        # A view with the negative bit has numbers of the other sign in memory.  In a graph, torch resolves it.
        return value if torch.compiler.is_compiling() else value.resolve_neg(), None
    if not hasattr(value, "__dlpack__"):
        part = " such as its .x" if isinstance(getattr(value, "x", None), torch.Tensor) else ""
        raise BadInput(argument, type(value).__name__, f"a torch tensor or an array with __dlpack__{part}")
    strides = getattr(value, "strides", None)
    if isinstance(strides, tuple) and any(stride < 0 for stride in strides):  # torch would end the process
        raise BadInput(argument, f"strides {strides} bytes", "none below 0")
    try:
        tensor = from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BadInput(argument, f"{type(value).__name__}: {error}", "an array that torch takes by DLPack") from error
    return tensor, _maker(value)


def _maker(value: Any) -> Callable[[torch.Tensor], Any] | None:
    """Find from_dlpack of the library that an array, or a base of its class, comes from."""
    packages: list[Any] = [sys.modules.get(kind.__module__.partition(".")[0]) for kind in type(value).__mro__]
    if hasattr(value, "__array_namespace__"):  # JAX: its arrays come from jaxlib, their functions do not
        packages.append(value.__array_namespace__())
    return next((package.from_dlpack for package in packages if hasattr(package, "from_dlpack")), None)


def window_tensor(
    block: _native.Block, address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, owner: object
) -> torch.Tensor:
    """Make a contiguous tensor at `address` inside `block`.  It keeps the block, and `owner`, alive."""
    return block.torch_tensor(address, shape, *DLPACK_WORDS[dtype, device], owner)


def check_tensor(
    argument: str,
    tensor: torch.Tensor,
    *,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
) -> None:
    """Raise BadInput unless device, dtype and shape (None: any length) are as wanted, and the memory is plain."""
    fits = type(tensor) is torch.Tensor and tensor.dtype in dtypes and tensor.ndim == len(shape)
    fits = fits and tensor.device == device
    if fits and tensor.shape != shape:
        for got, want in zip(tensor.shape, shape, strict=True):
            fits = fits and (want is None or got == want)
    if fits and _native.tensor_words((tensor,)) is not None:  # nearly all tensors end here
        return
    if tensor.device != device:
        raise BadInput(argument, f"a tensor on {tensor.device}", f"one on {device}")
    if tensor.layout is not torch.strided or tensor.is_nested or not has_memory(tensor):
        raise BadInput(argument, "a tensor that is sparse, nested, traced or otherwise not in memory", "a dense one")
    check_memory(argument, tensor)
    if tensor.dtype not in dtypes:
        raise BadInput(argument, str(tensor.dtype), " or ".join(map(str, dtypes)))
    fits = tensor.ndim == len(shape)
    for got, want in zip(tensor.shape, shape, strict=False):
        fits = fits and want in (None, got)
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise BadInput(argument, f"shape {tuple(tensor.shape)}", f"({wanted})")


def check_memory(argument: str, tensor: torch.Tensor) -> None:
    """Raise BadInput if the storage is smaller than the shape asks for, or holds the numbers with another sign.

    A storage may have been resized after the tensor was made.
    """
    if tensor.is_neg():
        raise BadInput(argument, "a view with the negative bit", "its resolve_neg()")
    if (entries := tensor.numel()) == 0:
        return
    if tensor.is_contiguous():  # the most common case, and the sum takes longer
        last = entries - 1
    else:
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if end > (held := tensor.untyped_storage().nbytes()):
        raise BadInput(argument, f"a storage of {held} bytes", f"the {end} bytes that its shape and strides ask for")


def check_no_overlap(argument: str, written: torch.Tensor, **read: torch.Tensor | None) -> None:
    """Raise BadInput if an output shares memory with a tensor that is read during the round.

    A bias may be in the same place as the output: each element is written after its bias has been read.
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
    """Tell autograd about caller's tensors that are written by address, so that a backward pass that saved them fails.

    Raises BadInput for a tensor that requires a gradient, which would be wrong.
    """
    for tensor in written:
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.requires_grad and torch.is_grad_enabled():
            raise BadInput(
                argument, "a tensor that requires grad", "one that does not, or a call under torch.no_grad()"
            )
        torch.autograd.graph.increment_version(tensor)


def refuse_gradients(**arguments: Any) -> None:
    """Raise BadInput for a tensor, or one of a tuple, whose gradient would be lost: rounds of a Buffer have none."""
    if not torch.is_grad_enabled():
        return
    for argument, value in arguments.items():
        for part in value if isinstance(value, tuple) else (value,):
            if getattr(part, "requires_grad", False):
                want = "moecomm.ops, which has gradients, or torch.no_grad() where none is wanted"
                raise BadInput(argument, "a tensor that requires grad", want)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements have addresses.  Those of fake tensors and of transformations of torch have none."""
    if isinstance(tensor, FakeTensor):
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # that of a transformation of torch
        return False


def check_rows(argument: str, tensor: torch.Tensor) -> int:
    """Return the bytes from row to row of `[rows, columns]`.

    Raises BadInput unless rows are contiguous and 16-byte aligned.
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
    """Return `value` as a `[rows, columns]` tensor that will be written, without a copy.

    Raises BadInput as check_tensor() and check_rows() do, and for read-only memory or rows that share memory.
    """
    if getattr(getattr(value, "flags", None), "writeable", True) is False:
        raise BadInput(argument, "a read-only array", "one that can be written")
    tensor = value if isinstance(value, torch.Tensor) else as_tensor(argument, value)[0]  # not a copy: see as_tensor
    check_tensor(argument, tensor, device=device, dtypes=dtypes, shape=shape)
    check_rows(argument, tensor)
    if len(tensor) > 1 and tensor.stride(0) < tensor.shape[1]:
        raise BadInput(argument, f"strides {tensor.stride()}", "rows that share no memory")
    return tensor


def shown_tensors(name: str, values: dict[str, Any]) -> str:
    """Return the repr() of a tuple of tensors and plain values, with shape, dtype and device of the tensors.

    Never reads a number of a tensor: that would wait for a GPU.
    """
    return f"<{name} {', '.join(f'{key}={_shown(value)}' for key, value in values.items() if value is not None)}>"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype} {value.device}"
    return repr(value)
