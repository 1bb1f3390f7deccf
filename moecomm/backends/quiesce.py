"""Quiet between rounds on a transport that puts, before ranks go on without others: csrc/device/quiesce.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import torch

from moecomm import _native
from moecomm.backends import cuda_driver
from moecomm.backends.leave import members, set_context
from moecomm.jit import linking, plain_kernel
from moecomm.jit.structs import fields_of

NBYTES = 8  # of what the kernel reports
_THREADS = 512  # at least one a rank


class Args(ctypes.Structure):
    """QuiesceArgs of csrc/device/between_rounds_args.h."""

    _fields_ = fields_of("QuiesceArgs")


def kernel(transport: str) -> plain_kernel.PlainKernel:
    """Return the kernel of a transport."""
    entry = f"quiesce<{linking.TRANSPORTS[transport]}>"
    return plain_kernel.PlainKernel("device/quiesce", entry, "QuiesceArgs", _THREADS, transport)


def arguments(context: _native.Context, masked: Collection[int], agreement: int, last_round: int, missing: int) -> Args:
    """Return the arguments of the kernel; see wait().  `missing`: address of NBYTES for its report."""
    args = Args(agreement=agreement, last_round=last_round, members=members(context, masked), missing=missing)
    set_context(args, context, context.timeout_ns // 2)  # so that the rank that misses another one says so first
    return args


def wait(
    transport: str,
    context: _native.Context,
    masked: Collection[int],
    agreement: int,
    last_round: int,
    control: cuda_driver.PinnedMemory,
    offset: int,
) -> set[int]:
    """Wait until all that ranks of other domains have put has arrived, and let signals begin anew after `last_round`.

    Runs on the current stream of the current device.

    Args:
        transport: of the kernels of rounds.
        context: of this rank.
        masked: ranks that take no part.
        agreement: its number, the same on all ranks that go on, and larger than those before.
        last_round: after which they go on.
        control: memory with room for NBYTES at `offset`.
        offset: see `control`.

    Returns:
        The ranks of which not all has come within half of the deadline, or until a peer was lost; if there are any,
        signals are as they were.
    """
    args = arguments(context, masked, agreement, last_round, control.address + offset)
    plain_kernel.launch(kernel(transport), 1, args)
    torch.cuda.current_stream().synchronize()
    return ranks_of(control.read(offset, NBYTES))


def ranks_of(report: bytes) -> set[int]:
    """Return the ranks that the kernel has reported."""
    missing = int.from_bytes(report, "little")
    return {rank for rank in range(8 * NBYTES) if missing >> rank & 1}
