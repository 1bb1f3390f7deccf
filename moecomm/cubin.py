"""What a compiled kernel must hold."""

from __future__ import annotations

# Of sm_90, by the lowest 12 bits: LDC and ULDC, which load constants; from bit 40 on which, in words of 4 bytes.
_OPCODE, _LOADS = (1 << 12) - 1, (0xB82, 0xAB9)
_CONSTANT, _DESCRIPTOR = 40, 0x208 // 4


def loads_descriptor(cubin: bytes) -> bool:
    """Whether some instruction of a cubin for sm_90 loads the descriptor that all accesses to memory go through.

    ptxas of CUDA 13.0 has left that out of kernels whose warps share registers out anew: they then go through whatever
    a register holds, which a GPU calls an illegal instruction.  Which kernels, hangs on every detail of them.
    """
    words = memoryview(cubin[: len(cubin) // 8 * 8]).cast("Q")
    return any(word >> _CONSTANT == _DESCRIPTOR and word & _OPCODE in _LOADS for word in words)
