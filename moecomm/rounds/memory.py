"""Window memory: tables, outputs, and a reserve that is empty between calls; what captured graphs write to is apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from moecomm import _native
from moecomm.errors import BadInput

_UNIT = 256  # bytes; an arena hands out multiples of it
_SLACK = 16 * _UNIT
_Pieces = list[tuple[_native.Arena, _native.Block]]


class WindowMemory:
    """Allocator of blocks in the heap of a window.  A block is freed when the last tensor over it is gone.

    The heap begins with the tables that handles keep, because these live longer than rows and must not cut their free
    memory into pieces.  Rows follow.  The end of the heap is the reserve: whatever callers keep, the next round finds
    room there.  Blocks that stay() lie below the reserve.  Outputs in other blocks are copied out of the window before
    their call returns (moecomm/dispatch/outputs.py), so the reserve is empty between calls.

    A captured graph writes to its blocks at every replay, also after the tensors of the capture are gone.  So its
    outputs come from pieces of the heap that only captures use, and what it needs during a call from the reserve.
    Captures share both, because rounds of one Buffer never run at the same time.  No eager output is ever in memory
    that a replay writes to.

    Attributes:
        arena: of the heap, or of what a choice of replicas leaves of it.
        parts: how it is divided.

    Args:
        arena: see Attributes.
        capturing: returns whether a graph is being captured.
        tables, reserve: see divide().
    """

    def __init__(self, arena: _native.Arena, capturing: Callable[[], bool], tables: int = 0, reserve: int = 0) -> None:
        self.arena = arena
        self.parts = _native.HeapParts(arena)
        self._capturing = capturing
        self._tables_of_graphs: _Pieces = []  # apart from rows: other graphs may need more of the one or the other
        self._rows_of_graphs: _Pieces = []
        self._warned = False
        self.divide(tables, reserve)

    def divide(self, tables: int, reserve: int) -> None:
        """Set the bytes that tables fill before they lie among rows, and those of the reserve.

        The rest is for rows, and a little of the tables' part, because blocks begin at multiples of 256.  A round that
        takes more than the reserve enlarges it.
        """
        parts = self.parts
        parts.reserve = min(-(-reserve // _UNIT) * _UNIT, self.arena.end - self.arena.begin)
        parts.end = self.arena.end - parts.reserve
        parts.first_row = self.arena.begin + max(0, tables - _SLACK)

    @property
    def end(self) -> int:
        """The end of blocks that stay."""
        return self.parts.end

    @property
    def used(self) -> int:
        """Bytes allocated, with the pieces reserved for graphs."""
        return self.arena.used

    @property
    def held(self) -> int:
        """Bytes in blocks of eager rounds, which tensors or handles still hold."""
        return self.arena.used - sum(piece.nbytes for _, piece in self._tables_of_graphs + self._rows_of_graphs)

    def stays(self, block: _native.Block) -> bool:
        """Return whether a block may be in use when its call has returned."""
        return block.end <= self.end

    def allocate(self, tables: int, rows: int) -> tuple[_native.Block, _native.Block]:
        """Allocate blocks for the tables and the rows of a round.  Raises BadInput when there is no room."""
        if tables + rows > self.parts.reserve:
            self._enlarge(tables + rows)
        if self._capturing():
            captured = self._for_graph(self._tables_of_graphs, tables, self.arena.begin)
            return captured, self._for_graph(self._rows_of_graphs, rows, self.parts.first_row)
        kept = self.arena.allocate(tables)
        if kept is None:
            raise self._no_room(tables)
        payload = self.arena.allocate(rows, self.parts.first_row)
        if payload is None:
            raise self._no_room(rows)
        return kept, payload

    def rows(self, nbytes: int) -> _native.Block:
        """Allocate a block for rows alone.  Raises BadInput when there is no room."""
        if nbytes > self.parts.reserve:
            self._enlarge(nbytes)
        if self._capturing():
            return self._for_graph(self._rows_of_graphs, nbytes, self.parts.first_row)
        block = self.arena.allocate(nbytes, self.parts.first_row)
        if block is None:
            raise self._no_room(nbytes)
        return block

    def scratch(self, nbytes: int) -> _native.Block:
        """Allocate a block that is freed before the call returns.  Raises BadInput when there is no room."""
        block = self.arena.allocate(nbytes, self.end)
        if block is None or (block.offset < self.end and self._capturing()):
            raise self._no_room(nbytes)
        return block

    def warn_of_copies(self) -> None:
        """Warn, once, that outputs are copied out of the window."""
        if self._warned:
            return
        self._warned = True
        heap = self.arena.end - self.arena.begin
        warnings.warn(
            f"a window of {heap} bytes has no room for further outputs beside those that are alive or belong to "
            f"graphs: new ones are copied out of it.  Keep fewer outputs, or "
            f"open the Buffer with window_bytes={max(heap, self.arena.used) + self.parts.reserve} for one more round",
            stacklevel=2,
        )

    def _enlarge(self, nbytes: int) -> None:
        """Enlarge the reserve for a round that takes so much."""
        self.divide(self.parts.first_row - self.arena.begin + _SLACK, nbytes + 2 * _UNIT)

    def _for_graph(self, pieces: _Pieces, nbytes: int, first: int) -> _native.Block:
        """Allocate a block in a piece for graphs, or in the reserve when no further piece fits below it."""
        for arena, _ in pieces:
            if block := arena.allocate(nbytes):
                return block
        piece = self.arena.allocate(-(-max(1, nbytes) // _UNIT) * _UNIT, first)
        if piece is None or not self.stays(piece):
            del piece
            return self.scratch(nbytes)
        arena = _native.Arena(piece.offset, piece.nbytes)
        pieces.append((arena, piece))
        block = arena.allocate(nbytes)
        assert block is not None, "the piece is as large"
        return block

    def _no_room(self, nbytes: int) -> BadInput:
        return BadInput(
            "window_bytes",
            f"a window with {self.arena.largest_free} bytes free in one piece",
            f"{nbytes} for this round: keep fewer outputs, pass max_rows=, or open the Buffer with more",
        )
