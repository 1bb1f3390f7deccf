"""The last notice of a rank that closes its Buffer, as bytes that the host copies into its peers' windows."""

from __future__ import annotations

import struct

from moecomm import _native

_NOTICE = struct.Struct("<QIIQqiiii8Q")  # struct Notice of csrc/protocol/notice.h
NOTICE_BYTES = _NOTICE.size
_LEAVE = 3  # Op::leave


def notice(last_round: int) -> bytes:
    """What a peer finds when it waits for our notice of the round after `last_round`.

    Its first 8 bytes, the tag, must be written last.
    """
    tag = ((last_round + 1) & 0xFFFFFFFF) << 32
    return _NOTICE.pack(tag, _LEAVE, 0, 0, 0, 0, 0, 0, 0, *(0,) * 8)


def notice_offset(window: _native.WindowLayout, ranks: int, last_round: int, sender: int) -> int:
    """Where in a peer's window it belongs."""
    return window.notices + (((last_round + 1) & 1) * ranks + sender) * NOTICE_BYTES
