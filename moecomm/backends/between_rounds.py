"""Kernels between rounds: csrc/device/between_rounds_args.h.

A rank that closes its Buffer sends the others its last round header.  The host copies it into the windows of peers that
load and store reach; a kernel puts it to those of other domains.  Another kernel quiesces a transport that puts, before
ranks go on without others.  A third one writes the table of a placement.
"""

from __future__ import annotations

import copy
import ctypes
import time
from collections.abc import Collection, Sequence

import torch

from moecomm import _native
from moecomm.base.protocol import ROUND_HEADER_BYTES
from moecomm.gpu import cuda_driver, linking, plain_kernel
from moecomm.gpu.structs import struct

WORD = 8  # bytes of a tagged word, and of a signal
REPORT_BYTES = 8  # of what the kernel that quiesces reports
_HEADER_WORDS = ROUND_HEADER_BYTES // 4
_PUT_TIMEOUT_NS = 1_000_000_000  # a peer that is gone must not delay close()
_QUIESCE_THREADS = 512  # at least one a rank
_PLACEMENT_THREADS = 256
_NAP_S = 1e-4


def tagged_words(last_round: int, words: int) -> bytes:
    """The tagged words that a peer waits for after `last_round`: all of them (WindowLayout.num_tagged_words).

    Each word is valid by itself, so one copy may move them all.
    """
    return _native.leave_words(last_round, words)


def is_last(word: bytes, last_round: int) -> bool:
    """Return whether this is the first word of a rank that left after `last_round`."""
    return word == tagged_words(last_round, _HEADER_WORDS)[:WORD]


def signal_offset(window: _native.WindowLayout, sender: int) -> int:
    """Offset in the window of a peer of another domain of the signal of the sender's words."""
    return window.signals + sender * WORD


def leave_kernel(transport: str) -> plain_kernel.PlainKernel:
    """Return the kernel that puts the words to other domains."""
    return plain_kernel.PlainKernel(
        "device/between_rounds", f"leave<{linking.TRANSPORTS[transport]}>", "LeaveArgs", 32, transport
    )


def put_leave(transport: str, context: _native.Context, masked: Collection[int], offset: int, nbytes: int) -> None:
    """Put the words at `offset` of this rank's window to all ranks of other domains but the masked ones.

    Returns when they are on their way, or can't be sent.  Runs on the current stream of the current device.
    """
    args = struct("LeaveArgs")(tagged_words=offset, bytes=nbytes, members=_members(context, masked))
    _set_context(args, context, _PUT_TIMEOUT_NS)
    plain_kernel.launch(leave_kernel(transport), 1, args)
    torch.cuda.current_stream().synchronize()


def quiesce_kernel(transport: str) -> plain_kernel.PlainKernel:
    """Return the kernel that quiesces a transport."""
    entry = f"quiesce<{linking.TRANSPORTS[transport]}>"
    return plain_kernel.PlainKernel("device/between_rounds", entry, "QuiesceArgs", _QUIESCE_THREADS, transport)


def quiesce_arguments(
    context: _native.Context, masked: Collection[int], agreement: int, last_round: int, missing: int
) -> ctypes.Structure:
    """Return the arguments of the kernel; see quiesce().  `missing`: address of REPORT_BYTES for its report."""
    members = _members(context, masked)
    args = struct("QuiesceArgs")(agreement=agreement, last_round=last_round, members=members, missing=missing)
    _set_context(args, context, context.timeout_ns // 2)  # shorter than the wait for ready words
    return args


def quiesce(
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
        control: memory with room for REPORT_BYTES at `offset`.
        offset: see `control`.

    Returns:
        Ranks whose puts have not all arrived within half of the deadline, or before a loss ended the wait.  If there
        are any, signals are unchanged.
    """
    args = quiesce_arguments(context, masked, agreement, last_round, control.address + offset)
    plain_kernel.launch(quiesce_kernel(transport), 1, args)
    ended = torch.cuda.current_stream().record_event()
    while not ended.query():  # in which Ctrl-C ends it
        time.sleep(_NAP_S)
    return reported(control.read(offset, REPORT_BYTES))


def reported(report: bytes) -> set[int]:
    """Return the ranks that the kernel has reported."""
    missing = int.from_bytes(report, "little")
    return {rank for rank in range(8 * REPORT_BYTES) if missing >> rank & 1}


SET_PLACEMENT = plain_kernel.PlainKernel(
    "device/between_rounds", "set_placement", "SetPlacementArgs", _PLACEMENT_THREADS
)


def set_placement(words: Sequence[int], to: int) -> None:
    """Write words to the window of this rank, on the current stream of the current device.  Does not wait for it."""
    given = torch.tensor(words, dtype=torch.int32, pin_memory=True).cuda(non_blocking=True)
    # Without `overlap`: the table changes when all earlier rounds have ended.
    args = struct("SetPlacementArgs")(words=given.data_ptr(), to=to, count=len(words))
    plain_kernel.launch(SET_PLACEMENT, 1, args)


def _members(context: _native.Context, masked: Collection[int]) -> int:
    """Return the ranks that take part, as bits."""
    return sum(1 << rank for rank in range(context.shape.ranks) if rank not in masked)


def _set_context(args: ctypes.Structure, context: _native.Context, most_ns: int) -> None:
    """Copy a rank's context into the arguments of a kernel, whose waits end after `most_ns` at the latest."""
    own = copy.copy(context)
    own.timeout_ns = min(context.timeout_ns, most_ns)
    ctypes.memmove(args.ctx, own.address, own.nbytes)
