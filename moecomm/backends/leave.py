"""The last mail of a rank that closes its Buffer: bytes that the host copies into its peers' windows, and that a kernel
puts into those of other domains.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from moecomm import _native
from moecomm.jit import linking, plain_kernel

_NOTICE = struct.Struct("<IIQqiiii7Q")  # struct RoundHeader of csrc/protocol/round_header.h
_LEAVE = 3  # Op::leave
WORD = 8  # bytes of a word of mail, and of a signal


def tagged_words(last_round: int, words: int) -> bytes:
    """What a peer finds when it waits for our mail of the round after `last_round`: all `words` of it
    (WindowLayout.num_tagged_words), whichever the peer waits for.

    Each word is valid by itself, so they can be copied in one go.
    """
    tag = _tag(last_round).to_bytes(4, "little")
    header = _NOTICE.pack(_LEAVE, *(0,) * 14).ljust(4 * words, b"\0")
    return b"".join(word + tag for (word,) in struct.iter_unpack("4s", header))


def signal(last_round: int) -> bytes:
    """What the signal of that mail becomes in a window of another domain."""
    return (_tag(last_round) - 1 << 32).to_bytes(WORD, "little")  # tagged_words_value of csrc/protocol/domains.h


def is_last(word: bytes, last_round: int) -> bool:
    """Whether this is the first word of such a mail."""
    return word == (_tag(last_round) << 32 | _LEAVE).to_bytes(WORD, "little")


def _tag(last_round: int) -> int:
    return 2 * (last_round + 1) + 1 & 0xFFFFFFFF  # round_tag of csrc/protocol/signal.h


def tagged_words_offset(window: _native.WindowLayout, ranks: int, last_round: int, sender: int) -> int:
    """Where in a peer's window it belongs."""
    return window.tagged_words + (((last_round + 1) & 1) * ranks + sender) * window.num_tagged_words * WORD


def signal_offset(window: _native.WindowLayout, sender: int) -> int:
    """Where in the window of a peer of another domain the signal of the sender's mail belongs."""
    return window.signals + sender * WORD


_PUT_TIMEOUT_NS = 1_000_000_000  # a peer that is gone must not keep us


class PutArgs(ctypes.Structure):
    """LeaveArgs of csrc/device/leave.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("window", "link", "signals", "tagged_words", "bytes")),
        *((name, ctypes.c_uint64) for name in ("abort_here", "abort_host", "timeout_ns")),
        *((name, ctypes.c_int32) for name in ("rank", "ranks", "domain_ranks", "pad")),
    )


def putter(transport: str) -> plain_kernel.PlainKernel:
    """The kernel that puts mail to other domains."""
    return plain_kernel.PlainKernel(
        "device/leave", f"leave<{linking.TRANSPORTS[transport]}>", "LeaveArgs", 32, transport
    )


def put(transport: str, context: _native.Context, offset: int, nbytes: int) -> None:
    """Puts mail that lies at `offset` of our window to all ranks of other domains; returns when it is on its way, or
    can't be.  On the current stream of the current device.
    """
    shape, own = context.shape, context.peers[context.rank]
    args = PutArgs(
        window=own,
        link=context.link,
        signals=context.window.signals,
        tagged_words=offset,
        bytes=nbytes,
        abort_here=own + context.window.abort,
        abort_host=context.abort_host,
        timeout_ns=min(context.timeout_ns, _PUT_TIMEOUT_NS),
        rank=context.rank,
        ranks=shape.ranks,
        domain_ranks=shape.domain_ranks,
    )
    plain_kernel.launch(putter(transport), 1, args)
    torch.cuda.current_stream().synchronize()
