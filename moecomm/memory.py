"""Window memory for outputs: ordinary lifetimes, and graphs kept apart."""

from __future__ import annotations

import torch

from moecomm import _native
from moecomm.errors import BadInput


class WindowMemory:
    """Hands out blocks of a window's heap; a block comes back when the last tensor over it is gone.

    A captured graph writes to its blocks at every replay, also after the tensors made during the capture are gone.  So
    blocks taken while a stream is captured come from pieces of the heap that only captures use: one capture's dropped
    outputs serve the next, as rounds of one Buffer never run at the same time, and no eager round is ever given memory
    that a replay writes to.
    """

    def __init__(self, arena: _native.Arena, device: torch.device) -> None:
        self._arena = arena
        self._cuda = device.type == "cuda"
        self._for_graphs: list[tuple[_native.Arena, _native.Block]] = []

    @property
    def used(self) -> int:
        """Bytes handed out, those set apart for graphs included."""
        return self._arena.used

    def allocate(self, nbytes: int) -> _native.Block:
        """A block of at least `nbytes`, 256-byte aligned.  Raises BadInput when the heap has no room."""
        block = (
            self._allocate_for_graph(nbytes)
            if self._cuda and torch.cuda.is_current_stream_capturing()
            else self._arena.allocate(nbytes)
        )
        if block is None:
            raise BadInput(
                "window_bytes",
                f"a window with {self._arena.largest_free} bytes free in one piece",
                f"{nbytes} for this round: keep fewer outputs, pass max_rows=, or open the Buffer with more",
            )
        return block

    def _allocate_for_graph(self, nbytes: int) -> _native.Block | None:
        for arena, _ in self._for_graphs:
            if block := arena.allocate(nbytes):
                return block
        piece = self._arena.allocate(nbytes)
        if piece is None:
            return None
        arena = _native.Arena(piece.offset, piece.nbytes)
        self._for_graphs.append((arena, piece))
        return arena.allocate(nbytes)
