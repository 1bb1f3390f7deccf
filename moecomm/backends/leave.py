"""The last mail of a rank that closes its Buffer: bytes that the host copies into its peers' windows, and that a kernel
puts into those of other domains.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from moecomm import _native, linking, plain_kernel

_NOTICE = struct.Struct("<IIQqiiii7Q")  # struct Notice of csrc/protocol/notice.h
_LEAVE = 3  # Op::leave
WORD = 8  # bytes of a word of mail, and of a signal
SIGNAL = WORD  # offset in mail of what its signal becomes in another domain: a tag beside zeros


def mail(last_round: int, words: int) -> bytes:
    """What a peer finds when it waits for our mail of the round after `last_round`: all `words` of it
    (WindowLayout.mail_words), whichever the peer waits for.

    Each word is valid by itself, so they can be copied in one go.
    """
    tag = _tag(last_round)
    notice = _NOTICE.pack(_LEAVE, *(0,) * 14).ljust(4 * words, b"\0")
    return b"".join(word + tag for (word,) in struct.iter_unpack("4s", notice))


def is_last(word: bytes, last_round: int) -> bool:
    """Whether this is the first word of such a mail."""
    return word == _LEAVE.to_bytes(4, "little") + _tag(last_round)


def _tag(last_round: int) -> bytes:
    return (2 * (last_round + 1) + 1 & 0xFFFFFFFF).to_bytes(4, "little")  # round_tag of csrc/protocol/signal.h


def mail_offset(window: _native.WindowLayout, ranks: int, last_round: int, sender: int) -> int:
    """Where in a peer's window it belongs."""
    return window.mail + (((last_round + 1) & 1) * ranks + sender) * window.mail_words * WORD


def signal_offset(window: _native.WindowLayout, sender: int) -> int:
    """Where in the window of a peer of another domain the signal of the sender's mail belongs."""
    return window.signals + sender * WORD


_PUT_TIMEOUT_NS = 1_000_000_000  # a peer that is gone must not keep us


class PutArgs(ctypes.Structure):
    """LeaveArgs of csrc/device/leave.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("window", "link", "signals", "mail", "bytes")),
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
        mail=offset,
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
