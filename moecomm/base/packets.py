"""Packets: how rows of few tokens are cut.  csrc/protocol/packets.h defines a packet."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from moecomm.base.protocol import LINE_BYTES, LINE_WORDS, PACKET_ENTRIES, PACKET_LINES, PACKET_TOKENS, QUANT_GROUP

_WORD = 8  # bytes
_MOST_WORDS = LINE_WORDS * PACKET_LINES
# Groups of an e4m3 row that returns, in 8 lines with their scales: as many columns as 16 lines of bf16 have, and their
# sums take as many registers.
_RETURNED_GROUPS = 7
_ROOM = 4 << 20  # of a window, for one rank and one round: 128 tokens of 7168 fp32 columns
_ROOM_OF_ALL = 256 << 20  # for all ranks and both parities: 128 tokens of 7168 16-bit columns from each of 64 ranks


class Packets(NamedTuple):
    """Packets of a token's row: `number` of at most `lines` lines, each with so many bytes of the row and its scales.

    The last one may have fewer. Each has room for `lines` lines.
    """

    row_bytes: int
    scale_bytes: int
    lines: int
    number: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a window for a token."""
        return self.number * self.lines * LINE_BYTES

    def carry(self, num_tokens: int, topk: int, room: int) -> bool:
        """Return whether a rank with so many tokens sends them as packets.  `room` is Shape.packet_bytes."""
        return room > 0 and num_tokens <= self.most_tokens(topk, room)

    def most_tokens(self, topk: int, room: int) -> int:
        """Return the most tokens that a rank sends as packets."""
        return min(PACKET_TOKENS, PACKET_ENTRIES // topk, room // self.token_bytes)


def of_dispatch(
    row_bytes: int, scale_bytes: int, topk: int, *, scale_size: int = 0, group_bytes: int = QUANT_GROUP
) -> Packets | None:
    """Cut a row as it travels, its scales, and a word for each expert.

    `scale_size`: bytes of a scale that dispatch makes on the way, 0 without; `group_bytes`: of the values that share
    it.  Returns None where a row can't be cut: a row of scales is no multiple of a word.
    """
    if scale_bytes % (_WORD // 2) or row_bytes % 16:
        return None
    unit = group_bytes * _WORD // scale_size if scale_size else 16
    for count in range(1, row_bytes // 16 + 1):
        piece = _align(-(-row_bytes // count), unit)
        scales = piece // group_bytes * scale_size if scale_size else _align(-(-scale_bytes // count), _WORD)
        words = (piece + scales) // _WORD + topk
        if words <= _MOST_WORDS:
            count = -(-row_bytes // piece)
            return Packets(piece, scales, -(-words // LINE_WORDS), count) if count * scales >= scale_bytes else None
        if piece == unit:
            return None
    return None


def of_combine(row_bytes: int, *, scaled: bool = False) -> Packets:
    """Cut a row that returns: its columns and, if it is `scaled`, of e4m3, a float32 scale for QUANT_GROUP of them."""
    if scaled:
        groups = -(-row_bytes // QUANT_GROUP)
        each = -(-groups // -(-groups // _RETURNED_GROUPS))
        piece, scales = each * QUANT_GROUP, _align(4 * each, _WORD)
        return Packets(piece, scales, -(-(piece + scales) // _WORD // LINE_WORDS), -(-groups // each))
    count = -(-row_bytes // (_MOST_WORDS * _WORD))
    piece = _align(-(-row_bytes // count), 16)
    return Packets(piece, 0, -(-piece // _WORD // LINE_WORDS), -(-row_bytes // piece))


@lru_cache(maxsize=256)  # a combine asks every time
def fit_return_packets(row_bytes: int, num_tokens: int, topk: int, room: int, *, scaled: bool = False) -> bool:
    """Return whether rows of so many tokens return in packets.

    `row_bytes`, `scaled`: of a row, see of_combine(); `room` is Shape.packet_bytes.
    """
    return of_combine(row_bytes, scaled=scaled).carry(num_tokens, topk, room)


def room(ranks: int, max_tokens: int, staged_row_bytes: int, of_all: int = _ROOM_OF_ALL) -> int:
    """Bytes of a window for the packets of one rank and one round: enough for few tokens, no more than all need.

    `of_all`: the most for all ranks and both parities.
    """
    most = min(max_tokens, PACKET_TOKENS) * (staged_row_bytes * 5 // 4 + PACKET_LINES * LINE_BYTES)
    return _align(min(_ROOM, of_all // (2 * ranks), most), LINE_BYTES * 2)


def _align(n: int, to: int) -> int:
    return -(-n // to) * to
