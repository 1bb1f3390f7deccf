"""Arguments of kernels that put between rounds: csrc/device/between_rounds_args.h."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Collection

from moecomm import _native


def members(context: _native.Context, masked: Collection[int]) -> int:
    """Return the ranks that take part, as bits."""
    return sum(1 << rank for rank in range(context.shape.ranks) if rank not in masked)


def set_context(args: ctypes.Structure, context: _native.Context, most_ns: int) -> None:
    """Copy a rank's context into the arguments of a kernel, whose waits end after `most_ns` at the latest."""
    own = copy.copy(context)
    own.timeout_ns = min(context.timeout_ns, most_ns)
    ctypes.memmove(args.ctx, own.address, own.nbytes)
