"""The last round header of a GPU rank that closes its Buffer.

The host copies it into the windows of peers that load and store reach; a kernel puts it to those of other domains.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import torch

from moecomm import _native
from moecomm.backends.between_rounds import members, set_context
from moecomm.core.protocol import ROUND_HEADER_BYTES
from moecomm.jit import linking, plain_kernel
from moecomm.jit.structs import fields_of

WORD = 8  # bytes of a tagged word, and of a signal


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


_HEADER_WORDS = ROUND_HEADER_BYTES // 4
_PUT_TIMEOUT_NS = 1_000_000_000  # a peer that is gone must not delay close()


class LeaveArgs(ctypes.Structure):
    """LeaveArgs of csrc/device/between_rounds_args.h."""

    _fields_ = fields_of("LeaveArgs")


def putter(transport: str) -> plain_kernel.PlainKernel:
    """Return the kernel that puts the words to other domains."""
    return plain_kernel.PlainKernel(
        "device/between_rounds", f"leave<{linking.TRANSPORTS[transport]}>", "LeaveArgs", 32, transport
    )


def put(transport: str, context: _native.Context, masked: Collection[int], offset: int, nbytes: int) -> None:
    """Put the words at `offset` of this rank's window to all ranks of other domains but the masked ones.

    Returns when they are on their way, or can't be sent.  Runs on the current stream of the current device.
    """
    args = LeaveArgs(tagged_words=offset, bytes=nbytes, members=members(context, masked))
    set_context(args, context, _PUT_TIMEOUT_NS)
    plain_kernel.launch(putter(transport), 1, args)
    torch.cuda.current_stream().synchronize()
