"""moecomm: dispatch and combine for mixture-of-experts layers, over NVLink, or over shared memory between CPU ranks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not any(Path(__path__[0]).glob("_native.*.so")):
    checkout = Path(__path__[0]).parent
    raise ImportError(f"{checkout} is not built: run `pip install {checkout}`, or start Python outside of it.")

from moecomm.base import formats as formats
from moecomm.base.layers import layer
from moecomm.base.placement import Placement
from moecomm.buffer import Buffer
from moecomm.dispatch.routed import Handle, Routed
from moecomm.errors import (
    Aborted,
    BadInput,
    Closed,
    ConcurrentCall,
    CorruptRow,
    CorruptWeights,
    Excluded,
    MemoryReleased,
    Mismatch,
    MoecommError,
    OutOfStep,
    PeerLost,
    RoundFailed,
    Timeout,
    TooManyRows,
    Unsupported,
)
from moecomm.membership.meeting import Shrunk
from moecomm.observe.tracing import trace
from moecomm.ranks.rendezvous import local_ranks
from moecomm.weights import ExpertWeights
from moecomm.window import Window

if TYPE_CHECKING:
    from moecomm import checkpoints as checkpoints
    from moecomm import fused as fused
    from moecomm import nn as nn
    from moecomm import ops as ops
    from moecomm import overlap as overlap
    from moecomm import transfer as transfer
    from moecomm.router import Router as Router
    from moecomm.tools.doctor import Report

__version__ = "0.1.0"
__all__ = [
    "Aborted",
    "BadInput",
    "Buffer",
    "Closed",
    "ConcurrentCall",
    "CorruptRow",
    "CorruptWeights",
    "Excluded",
    "ExpertWeights",
    "Handle",
    "MemoryReleased",
    "Mismatch",
    "MoecommError",
    "OutOfStep",
    "PeerLost",
    "Placement",
    "RoundFailed",
    "Routed",
    "Shrunk",
    "Timeout",
    "TooManyRows",
    "Unsupported",
    "Window",
    "doctor",
    "include_dir",
    "layer",
    "local_ranks",
    "trace",
]


sys.modules[f"{__name__}.formats"] = formats  # for `import moecomm.formats`; formats.pyi is for type checkers


def doctor() -> Report:
    """Report which backends can run here, and what is missing for the others."""
    from moecomm.tools.doctor import doctor as examine

    return examine()


def include_dir() -> str:
    """Return the folder that a compiler searches for `<moecomm/window.cuh>` and `<moecomm/window.h>`."""
    from moecomm.gpu.loader import headers

    return str(headers() / "include")


def __getattr__(name: str) -> Any:
    if name in ("checkpoints", "fused", "nn", "ops", "overlap", "transfer"):  # registering operators takes a while
        return importlib.import_module(f"moecomm.{name}")
    if name == "Router":
        from moecomm.router import Router

        return Router
    raise AttributeError(f"module 'moecomm' has no attribute {name!r}")
