"""Quiesce a transport that puts, before ranks go on without others: csrc/device/between_rounds.cuh."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection

import torch

from moecomm import _native
from moecomm.backends import cuda_driver
from moecomm.backends.between_rounds import members, set_context
from moecomm.jit import linking, plain_kernel
from moecomm.jit.structs import fields_of

NBYTES = 8  # of what the kernel reports
_THREADS = 512  # at least one a rank
_NAP_S = 1e-4


class QuiesceArgs(ctypes.Structure):
    """QuiesceArgs of csrc/device/between_rounds_args.h."""

    _fields_ = fields_of("QuiesceArgs")


def kernel(transport: str) -> plain_kernel.PlainKernel:
    """Return the kernel of a transport."""
    entry = f"quiesce<{linking.TRANSPORTS[transport]}>"
    return plain_kernel.PlainKernel("device/between_rounds", entry, "QuiesceArgs", _THREADS, transport)


def arguments(
    context: _native.Context, masked: Collection[int], agreement: int, last_round: int, missing: int
) -> QuiesceArgs:
    """Return the arguments of the kernel; see wait().  `missing`: address of NBYTES for its report."""
    args = QuiesceArgs(agreement=agreement, last_round=last_round, members=members(context, masked), missing=missing)
    set_context(args, context, context.timeout_ns // 2)  # shorter than the wait for ready words
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
    """Wait until all puts of ranks of other domains have arrived, then reset the signals for rounds after `last_round`.

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
        Ranks whose puts have not all arrived within half of the deadline, or before a loss ended the wait.  If there
        are any, signals are unchanged.
    """
    args = arguments(context, masked, agreement, last_round, control.address + offset)
    plain_kernel.launch(kernel(transport), 1, args)
    ended = torch.cuda.current_stream().record_event()
    while not ended.query():  # in which Ctrl-C ends it
        time.sleep(_NAP_S)
    return ranks_of(control.read(offset, NBYTES))


def ranks_of(report: bytes) -> set[int]:
    """Return the ranks that the kernel has reported."""
    missing = int.from_bytes(report, "little")
    return {rank for rank in range(8 * NBYTES) if missing >> rank & 1}
