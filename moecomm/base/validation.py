"""Checks of flags, numbers, names, dtypes, devices, and of tensors to compute with."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor

from moecomm.base import tangents
from moecomm.errors import BadInput, Unsupported

MOST_SIZE = (1 << 31) - 1  # of a dimension
_MOST = (1 << 63) - 1
_MOST_SEED = 1 << 40  # seeds are multiplied with 10^6 at most, and torch's have 64 bits


def is_integer(value: object) -> bool:
    """Return whether a value is an int, or an integer of numpy.  True, 1.0, arrays and tensors are not."""
    if isinstance(value, int):  # alone in graphs of torch.compile, where the rest can't be asked
        return not isinstance(value, bool)
    if hasattr(value, "__dlpack__"):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def check_integer(argument: str, value: object, least: int, most: int | None = None) -> None:
    """Raise BadInput unless the value is an integer of at most 63 bits, and in the range."""
    if not (is_integer(value) and least <= value <= (_MOST if most is None else most)):  # type: ignore[operator]
        raise BadInput(argument, repr(value), f"a whole number, {least} {'or more' if most is None else f'to {most}'}")


def check_alignment(argument: str, value: object) -> None:
    """Raise BadInput unless the value is an integer that groups of rows can be aligned to."""
    if not (is_integer(value) and 1 <= value < 1 << 20):  # type: ignore[operator]
        raise BadInput(argument, repr(value), "a whole number, 1 to 2^20 - 1")


def check_flag(argument: str, value: object) -> None:
    """Raise BadInput unless the value is True or False, or 1, 0 or a boolean of numpy."""
    one = isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy has both names
    if not (one or (is_integer(value) and value in (0, 1))):
        raise BadInput(argument, repr(value), "True or False")


def check_flags(**values: object) -> None:
    """Run check_flag() for each."""
    for argument, value in values.items():
        check_flag(argument, value)


def check_name(argument: str, value: object, known: Sequence[str]) -> None:
    """Raise BadInput unless it is one of the words."""
    if not isinstance(value, str) or value not in known:
        raise BadInput(argument, repr(value), " or ".join(map(repr, known)))


def check_real(argument: str, value: object, least: float, most: float) -> None:
    """Raise BadInput unless the value is a number in the range."""
    if not (isinstance(value, Real) and least <= float(value) <= most):
        raise BadInput(argument, repr(value), f"a number, {least:g} to {most:g}")


def check_sizes(**values: object) -> None:
    """Raise BadInput unless each value can be a dimension."""
    for argument, value in values.items():
        check_integer(argument, value, 1, MOST_SIZE)


def check_shape(argument: str, shape: object) -> tuple[int, ...]:
    """Return the dimensions of a shape, each 0 or more.  Raises BadInput."""
    if not isinstance(shape, (tuple, list)):  # torch.Size is a tuple
        raise BadInput(argument, repr(shape), "a tuple of sizes")
    for size in shape:
        check_integer(argument, size, 0)
    return tuple(map(int, shape))


def check_dtype(argument: str, value: object, known: Sequence[torch.dtype]) -> None:
    """Raise BadInput unless it is one of the dtypes."""
    if not isinstance(value, torch.dtype) or value not in known:
        raise BadInput(argument, repr(value), " or ".join(map(str, known)))


def check_drawn(seed: object, dtype: object, device: object) -> None:
    """Raise BadInput unless weights of the dtype can be drawn from the seed on the device (None: torch's default)."""
    check_integer("seed", seed, -_MOST_SEED, _MOST_SEED)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise BadInput("dtype", repr(dtype), "a floating dtype of 16 bits or more")
    check_device(device)


def check_device(device: object) -> None:
    """Raise BadInput unless memory can be taken on the device (None: torch's default)."""
    if device is None:
        return
    try:
        wanted = torch.device(device) if isinstance(device, (str, torch.device)) else None
    except RuntimeError:
        wanted = None
    there = {"cpu": 1, "meta": 1, "cuda": torch.cuda.device_count()}
    if wanted is None or (wanted.index or 0) >= there.get(wanted.type, 0):
        raise BadInput("device", repr(device), "the CPU, or a GPU that is there")


def check_dense(argument: str, value: Any) -> None:
    """Raise BadInput unless it is a dense tensor, Unsupported if torch.func differentiates by it or maps over it."""
    if not isinstance(value, torch.Tensor):
        raise BadInput(argument, type(value).__name__, "a tensor")
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise BadInput(argument, "a tensor that is sparse, nested or quantized", "a dense one")
    tangents.refuse(argument, value)
    if not torch.compiler.is_compiling() and tangents.is_mapped(value):
        raise Unsupported(f"{argument} under torch.func.vmap")


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def are_plain(*values: Any) -> bool:
    """Return whether all are dense tensors of torch's own classes, on one device, that nothing but autograd watches.

    None is left out.  False while torch.compile traces.
    """
    if torch.compiler.is_compiling() or tangents.may_exist():
        return False
    device = None
    for value in values:
        if value is None:
            continue
        if type(value) not in _PLAIN or value.layout is not torch.strided or value.is_nested or value.is_quantized:
            return False
        if _functorch.is_functorch_wrapped_tensor(value) or _functorch.is_legacy_batchedtensor(value):
            return False
        if value.is_neg() or value._is_zerotensor():
            return False
        if device is None:
            device = value.device
        elif value.device != device:
            return False
    return device is not None and device.type != "meta"


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a value is a DTensor.  Does not import their package, without which there is none."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def check_same_device(**values: Any) -> None:
    """Run check_dense() for each tensor that is not None.

    Raises BadInput as well for tensors on another device than the first, for a FakeTensor beside real ones, and for
    DTensors.
    """
    given = {argument: value for argument, value in values.items() if value is not None}
    if are_plain(*given.values()):
        return
    for argument, value in given.items():
        check_dense(argument, value)
        if type(value) is not torch.Tensor and not torch.compiler.is_compiling() and _is_distributed(value):
            raise BadInput(argument, "a DTensor", "a tensor of this rank, such as its to_local()")
    (first, like), *_ = given.items()
    if like.device.type == "meta":
        raise BadInput(first, "a tensor on meta", "one with memory")
    for argument, value in given.items():
        if value.device != like.device:
            raise BadInput(argument, f"a tensor on {value.device}", f"one on {like.device}, as {first}")
    if torch.compiler.is_compiling():
        return
    fake = [(argument, value) for argument, value in given.items() if isinstance(value, FakeTensor)]
    if 0 < len(fake) < len(given) and not fake[0][1].fake_mode.allow_non_fake_inputs:
        raise BadInput(fake[0][0], "a FakeTensor beside real ones", "one of its kind")


def seconds(timeout_s: Any) -> float:
    """Return a timeout in seconds.  Raises BadInput."""
    if not (isinstance(timeout_s, Real) and 0 < float(timeout_s) < 1e6):
        raise BadInput("timeout_s", repr(timeout_s), "seconds, more than 0")
    return float(timeout_s)
