"""Window memory for outputs: ordinary lifetimes, and graphs kept apart."""

from __future__ import annotations

from collections.abc import Callable

from moecomm import _native
from moecomm.errors import BadInput

_UNIT = 256  # an arena has whole units of so many bytes


class WindowMemory:
    """Hands out blocks of a window's heap; a block comes back when the last tensor over it is gone.

    A captured graph writes to its blocks at every replay, also after the tensors made during the capture are gone.  So
    blocks taken while a stream is captured come from pieces of the heap that only captures use: one capture's dropped
    outputs serve the next, as rounds of one Buffer never run at the same time, and no eager round is ever given memory
    that a replay writes to.
    """

    def __init__(self, arena: _native.Arena, capturing: Callable[[], bool]) -> None:
        self._arena = arena
        self._capturing = capturing
        self._for_graphs: list[tuple[_native.Arena, _native.Block]] = []

    @property
    def used(self) -> int:
        """Bytes handed out, those set apart for graphs included."""
        return self._arena.used

    def allocate(self, *sizes: int) -> list[_native.Block]:
        """A block of at least so many bytes each, 256-byte aligned.  Raises BadInput when the heap has no room."""
        take = self._allocate_for_graph if self._capturing() else self._arena.allocate
        blocks = []
        for nbytes in sizes:
            block = take(nbytes)
            if block is None:
                raise BadInput(
                    "window_bytes",
                    f"a window with {self._arena.largest_free} bytes free in one piece",
                    f"{nbytes} for this round: keep fewer outputs, pass max_rows=, or open the Buffer with more",
                )
            blocks.append(block)
        return blocks

    def _allocate_for_graph(self, nbytes: int) -> _native.Block | None:
        for arena, _ in self._for_graphs:
            if block := arena.allocate(nbytes):
                return block
        piece = self._arena.allocate(-(-max(1, nbytes) // _UNIT) * _UNIT)
        if piece is None:
            return None
        arena = _native.Arena(piece.offset, piece.nbytes)
        self._for_graphs.append((arena, piece))
        return arena.allocate(nbytes)
