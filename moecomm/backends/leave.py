"""The last mail of a rank that closes its Buffer, as bytes that the host copies into its peers' windows."""

from __future__ import annotations

import struct

from moecomm import _native

_NOTICE = struct.Struct("<IIQqiiii7Q")  # struct Notice of csrc/protocol/notice.h
_LEAVE = 3  # Op::leave
_WORD = 8  # bytes of a word of mail, and of a signal
SIGNAL = _WORD  # offset in mail of what its signal becomes in another domain: a tag beside zeros


def mail(last_round: int, words: int) -> bytes:
    """What a peer finds when it waits for our mail of the round after `last_round`: all `words` of it
    (WindowLayout.mail_words), whichever the peer waits for.

    Each word is valid by itself, so they can be copied in one go.
    """
    tag = (last_round + 1) & 0xFFFFFFFF
    notice = _NOTICE.pack(_LEAVE, *(0,) * 14).ljust(4 * words, b"\0")
    return b"".join(word + tag.to_bytes(4, "little") for (word,) in struct.iter_unpack("4s", notice))


def mail_offset(window: _native.WindowLayout, ranks: int, last_round: int, sender: int) -> int:
    """Where in a peer's window it belongs."""
    return window.mail + (((last_round + 1) & 1) * ranks + sender) * window.mail_words * _WORD


def signal_offset(window: _native.WindowLayout, sender: int) -> int:
    """Where in the window of a peer of another domain the signal of the sender's mail belongs."""
    return window.signals + sender * _WORD
