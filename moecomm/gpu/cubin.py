"""Checks of compiled kernels."""

from __future__ import annotations

import struct
from collections.abc import Iterator

# Opcodes of sm_90, the lowest 12 bits of an instruction: those that go through the descriptor of memory (LD, LDG, ST,
# STG, ATOM, RED, ATOMG), and those that load constants (LDC, ULDC); which ones, from bit 40 on, in words of 4 bytes.
_OPCODE = (1 << 12) - 1
_GO_THROUGH, _LOADS = {0x980, 0x981, 0x985, 0x986, 0x98A, 0x98E, 0x9A8}, {0xB82, 0xAB9}
_CONSTANT, _DESCRIPTOR = 40, 0x208 // 4
_EXECUTABLE = 4


def lacks_descriptor(cubin: bytes) -> bool:
    """Return whether code of a cubin for sm_90 uses the descriptor of memory accesses without loading it.

    ptxas of CUDA 13.0 has left that load out of kernels whose warps reallocate registers.  They then use the content of
    any register, which a GPU reports as an illegal instruction.  Which kernels are affected depends on every detail.
    """
    for section in executable_sections(cubin):
        code = struct.unpack(f"<{len(section) // 8}Q", section)[::2]  # the first half of every instruction
        used = any(word & _OPCODE in _GO_THROUGH for word in code)
        if used and not any(word >> _CONSTANT == _DESCRIPTOR and word & _OPCODE in _LOADS for word in code):
            return True
    return False


def executable_sections(cubin: bytes) -> Iterator[bytes]:
    """Yield the machine code of each section of a little-endian ELF64 file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    each, sections = struct.unpack_from("<2H", cubin, 0x3A)
    for section in range(sections):
        flags, _, offset, size = struct.unpack_from("<4Q", cubin, table + section * each + 8)
        if flags & _EXECUTABLE:
            yield cubin[offset : offset + size]
