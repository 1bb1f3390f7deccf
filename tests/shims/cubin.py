"""Reads as much of a cubin, an ELF file, as tests want to know: what it calls, and whether it can trap."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_BPT = 0x95C  # the opcode of BPT, the instruction behind trap and brkpt, in the low 12 bits of 16 bytes of sm_90


@dataclass(frozen=True)
class Cubin:
    """`text`: the instructions of each function.  `undefined`: functions that whoever loads it must have."""

    text: dict[str, bytes]
    undefined: set[str]
    defined: set[str]

    def traps(self) -> set[str]:
        """Functions with an instruction that stops the kernel."""
        return {
            name
            for name, code in self.text.items()
            if any(low & 0xFFF == _BPT for low, _ in struct.iter_unpack("<QQ", code))
        }


def read(content: bytes) -> Cubin:
    """The sections and symbols of an ELF file of 64 bits."""
    assert content[:6] == b"\x7fELF\x02\x01"
    (begin,) = struct.unpack_from("<Q", content, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", content, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", content, begin + size * index) for index in range(count)]

    def name(table: int, offset: int) -> str:
        at = headers[table][4] + offset
        return content[at : content.index(b"\0", at)].decode()

    text, undefined, defined = {}, set(), set()
    for title, kind, _, _, at, length, strings, _, _, _ in headers:
        section = name(names_at, title)
        if section.startswith(".text."):
            text[section.removeprefix(".text.")] = content[at : at + length]
        if kind == 2:  # symbols
            for offset, info, _, index, _, _ in struct.iter_unpack("<IBBHQQ", content[at : at + length]):
                if info & 0xF == 2 or info >> 4 == 1:  # functions, and whatever is global
                    (defined if index else undefined).add(name(strings, offset))
    # .nv.*: places that the driver itself lays out.
    return Cubin(text, {symbol for symbol in undefined if not symbol.startswith(".nv.")}, defined)
