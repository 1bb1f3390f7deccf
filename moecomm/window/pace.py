"""Copies into windows at a bounded rate: in pieces, with a pause after each that was faster."""

from __future__ import annotations

import time

import torch

from moecomm.gpu import plain_kernel
from moecomm.gpu.structs import struct

_HOST_PIECE_S = 1e-3
# A pause holds a warp of a multiprocessor, which a block of a round may need whole.
_GPU_PIECE_S = 20e-6
_LEAST_PIECE = 4096  # bytes


PAUSE = plain_kernel.PlainKernel("window/pace", "pause", "PauseArgs", 32)


class Pace:
    """Copies at one rate, which follow each other.

    Made and used on one stream (GPUs), where copies and pauses are enqueued.

    Args:
        device: of the memory.
        gbs: 10^9 bytes a second, at most.
    """

    def __init__(self, device: torch.device, gbs: float) -> None:
        self._device, self._bytes_per_s = device, gbs * 1e9
        piece_s = _GPU_PIECE_S if device.type == "cuda" else _HOST_PIECE_S
        self._piece = max(_LEAST_PIECE, int(self._bytes_per_s * piece_s))
        self._due_s = time.monotonic()  # when copies so far may have ended
        self._due = torch.zeros(1, dtype=torch.int64, device=device)  # the same, in ns of the GPU's clock
        self._pause(0)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a contiguous tensor to another one of its shape and dtype."""
        there, here = (one.reshape(-1).view(torch.uint8) for one in (to, source))
        for at in range(0, len(here), self._piece):
            piece = slice(at, at + self._piece)
            there[piece].copy_(here[piece])
            self._pause(len(here[piece]))

    def _pause(self, nbytes: int) -> None:
        seconds = nbytes / self._bytes_per_s
        if self._device.type == "cuda":
            args = struct("PauseArgs")(due=self._due.data_ptr(), ns=int(seconds * 1e9))
            plain_kernel.launch_on(self._device, PAUSE, 1, args)
            return
        begin, until = time.monotonic(), self._due_s + seconds
        time.sleep(max(0.0, until - begin))
        self._due_s = max(until, begin)  # a copy that was slower is not made up for
