"""Window memory for outputs, with blocks of captured graphs kept apart."""

from __future__ import annotations

from collections.abc import Callable

from moecomm import _native
from moecomm.errors import BadInput

_UNIT = 256  # bytes; an arena hands out multiples of it


class WindowMemory:
    """Allocator of blocks in the heap of a window.  A block is freed when the last tensor over it is gone.

    A captured graph writes to its blocks at every replay, also after the tensors of the capture are gone.  So blocks
    allocated during a capture come from pieces of the heap that only captures use.  Captures share them, because
    rounds of one Buffer never run at the same time.  No eager round is ever given memory that a replay writes to.
    """

    def __init__(self, arena: _native.Arena, capturing: Callable[[], bool]) -> None:
        self._arena = arena
        self._capturing = capturing
        self._for_graphs: list[tuple[_native.Arena, _native.Block]] = []
        self._own = 0  # bytes in blocks of allocate_own()

    @property
    def used(self) -> int:
        """Bytes allocated, with the pieces reserved for graphs."""
        return self._arena.used

    @property
    def held(self) -> int:
        """Bytes in blocks of eager rounds, which tensors or handles still hold."""
        return self._arena.used - self._own - sum(piece.nbytes for _, piece in self._for_graphs)

    def allocate(self, *sizes: int) -> list[_native.Block]:
        """Allocate a block of at least so many bytes each, 256-byte aligned.  Raises BadInput when there is no room."""
        return self._taken(self._allocate_for_graph if self._capturing() else self._arena.allocate, sizes)

    def allocate_own(self, *sizes: int) -> list[_native.Block]:
        """Allocate likewise, for a plan that keeps the blocks, and what captured graphs know of them, to the end."""
        before = self._arena.used
        blocks = self._taken(self._arena.allocate, sizes)
        self._own += self._arena.used - before
        return blocks

    def _taken(self, take: Callable[[int], _native.Block | None], sizes: tuple[int, ...]) -> list[_native.Block]:
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
