"""Values that most arguments can't have, by name: those of all kinds, and those that are nearly a given tensor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

GENERAL: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "'x'": lambda: "x",
    "''": lambda: "",
    "'2'": lambda: "2",
    "b'x'": lambda: b"x",
    "-1": lambda: -1,
    "0": lambda: 0,
    "2**31": lambda: 1 << 31,
    "2**63": lambda: 1 << 63,
    "2**70": lambda: 1 << 70,
    "-2**70": lambda: -(1 << 70),
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "0.5": lambda: 0.5,
    "2.0": lambda: 2.0,
    "True": lambda: True,
    "False": lambda: False,
    "1j": lambda: 1j,
    "[]": list,
    "[1]": lambda: [1],
    "{}": dict,
    "()": lambda: (),
    "(1, 2)": lambda: (1, 2),
    "object()": object,
    "int": lambda: int,
    "a function": lambda: len,
    "torch.int64": lambda: torch.int64,
    "torch.float64": lambda: torch.float64,
    "torch.device": lambda: torch.device("meta"),
    "np.int64(-3)": lambda: np.int64(-3),
    "np.float64": lambda: np.float64(1.5),
    "an array": lambda: np.zeros((2, 3), np.float32),
    "an array of objects": lambda: np.zeros((2, 3), object),
    "a tensor": lambda: torch.zeros(3),
    "a tensor of one": lambda: torch.tensor(1),
    "a pair of tensors": lambda: (torch.zeros(3), torch.zeros(3)),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a meta tensor": lambda: torch.zeros(3, device="meta"),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(3)], layout=torch.jagged),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8),
}


_FAKE = FakeTensorMode()  # torch refuses to mix several


def _fake(good: torch.Tensor) -> torch.Tensor:
    with _FAKE:
        return torch.empty(good.shape, dtype=good.dtype)


def _apart(good: torch.Tensor) -> torch.Tensor:
    """Every other element of a larger one."""
    wide = good.new_empty((*good.shape[:-1], 2 * good.shape[-1]))
    wide[..., ::2] = good
    return wide[..., ::2]


def _negative(good: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-good)


def _quantized(good: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(good.float(), 0.1, 0, torch.qint8)


def _subclass(good: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(good, requires_grad=False)


# Changes of a tensor that is right.
LIKE: dict[str, Callable[[torch.Tensor], Any]] = {
    "meta": lambda good: good.to("meta"),
    "sparse": lambda good: good.to_sparse(),
    "sparse by row": lambda good: good.to_sparse_csr(),
    "fake": _fake,
    "double": lambda good: good.double(),
    "int8": lambda good: good.to(torch.int8),
    "bool": lambda good: good.bool(),
    "complex": lambda good: good.to(torch.complex64),
    "quantized": _quantized,
    "nested": lambda good: torch.nested.nested_tensor(list(good.unbind()), layout=torch.jagged),
    "without memory": lambda good: torch._efficientzerotensor(good.shape, dtype=good.dtype),
    "one row fewer": lambda good: good[:-1],
    "one row more": lambda good: torch.cat([good, good[:1]]),
    "no rows": lambda good: good[:0],
    "one column fewer": lambda good: good[..., :-1],
    "one dimension more": lambda good: good.unsqueeze(0),
    "one dimension fewer": lambda good: good[0],
    "by column": lambda good: good.transpose(0, -1).contiguous().transpose(0, -1),
    "with gaps": _apart,
    "rows that are one": lambda good: good[:1].expand(good.shape),
    "negated": _negative,
    "requires_grad": lambda good: good.clone().requires_grad_(),
    "a parameter": _subclass,
    "an array": lambda good: good.numpy(),
    "a list": lambda good: good.tolist(),
}


def _alike(value: Any, good: torch.Tensor) -> bool:
    """Return whether a change has left an empty tensor as it was."""
    names = ("dtype", "device", "layout", "shape", "requires_grad", "is_quantized")
    return type(value) is type(good) and all(getattr(value, name) == getattr(good, name) for name in names)


def bad(good: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that may stand in the place of `good`."""
    for name, make in GENERAL.items():
        yield name, make()
    parts = good if isinstance(good, tuple) else (good,)
    for at, part in enumerate(parts):
        if not isinstance(part, torch.Tensor):
            continue
        which = f"[{at}]" if isinstance(good, tuple) else ""
        for name, like in LIKE.items():
            with contextlib.suppress(RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
                value = like(part)  # not every tensor can be all of it
                if part.numel() == 0 and _alike(value, part):
                    continue
                whole = (*parts[:at], value, *parts[at + 1 :]) if isinstance(good, tuple) else value
                if isinstance(good, tuple) and hasattr(good, "_fields"):
                    whole = type(good)(*whole)
                yield f"{name}{which}", whole
