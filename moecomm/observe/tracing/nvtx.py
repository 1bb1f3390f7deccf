"""NVTX ranges, with which NVIDIA's profilers show the calls: through the package nvtx, or through torch."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch

from moecomm.rounds.spans import Ranges

_DOMAIN = "moecomm"


class _OfPackage:
    def __init__(self, nvtx: Any) -> None:
        self._nvtx = nvtx

    def push(self, name: str) -> None:
        self._nvtx.push_range(name, domain=_DOMAIN)

    def pop(self) -> None:
        self._nvtx.pop_range(domain=_DOMAIN)


class _OfTorch:
    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def ranges() -> Ranges | None:
    """Return the ranges of a profiler, which cost little where none listens; None: NVTX is not there."""
    try:
        return _OfPackage(importlib.import_module("nvtx"))
    except ImportError:
        return _OfTorch() if torch.version.cuda is not None else None
