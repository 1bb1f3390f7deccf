"""Window memory: tables, outputs, a reserve that is empty between calls, and extensions; graphs have pieces of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from moecomm import _native
from moecomm.errors import BadInput

_UNIT = 256  # bytes; an arena hands out multiples of it
_SLACK = 16 * _UNIT
_STEPS = 4  # an extension is at least this part of all memory, so that there are few
_Pieces = list[tuple[_native.Arena, _native.Block]]
_Allocate = Callable[[int], "_native.Block | None"]


class WindowMemory:
    """Allocator of blocks in the heap of a window.  A block is freed when the last tensor over it is gone.

    The heap begins with the tables that handles keep, because these live longer than rows and must not cut their free
    memory into pieces.  Rows follow.  The end of the heap is the reserve: whatever callers keep, the next round finds
    room there.  Blocks that stay lie below the reserve, or in an extension: memory behind the heap, which the window
    takes when nothing else is free.  Outputs in other blocks are copied out of the window before their call returns
    (moecomm/dispatch/outputs.py), so the reserve is empty between calls.

    A captured graph writes to its blocks at every replay, also after the tensors of the capture are gone.  So its
    outputs come from pieces of the heap that only captures use, and what it needs during a call from the reserve.
    Captures share both, because rounds of one Buffer never run at the same time.  No eager output is ever in memory
    that a replay writes to.

    Attributes:
        arena: of the heap, or of what a choice of replicas leaves of it.
        parts: how it is divided, and its extensions.

    Args:
        arena: see Attributes.
        capturing: returns whether a graph is being captured.
        tables, reserve: see divide().
        extend: see Session.extend.
    """

    def __init__(
        self,
        arena: _native.Arena,
        capturing: Callable[[], bool],
        tables: int = 0,
        reserve: int = 0,
        extend: Callable[[int], tuple[int, int] | None] = lambda _: None,
    ) -> None:
        self.arena = arena
        self.parts = _native.HeapParts(arena)
        self._capturing, self._extend_window = capturing, extend
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
    def nbytes(self) -> int:
        """Bytes of the heap and of its extensions."""
        return sum(arena.end - arena.begin for arena in self._arenas)

    @property
    def used(self) -> int:
        """Bytes allocated, with the pieces reserved for graphs."""
        return sum(arena.used for arena in self._arenas)

    @property
    def held(self) -> int:
        """Bytes in blocks of eager rounds, which tensors or handles still hold."""
        return self.used - sum(piece.nbytes for _, piece in self._tables_of_graphs + self._rows_of_graphs)

    @property
    def _arenas(self) -> list[_native.Arena]:
        return [self.arena, *self.parts.extensions]

    def stays(self, block: _native.Block) -> bool:
        """Return whether a block may be in use when its call has returned."""
        return self.parts.stays(block)

    def allocate(self, tables: int, rows: int) -> tuple[_native.Block, _native.Block]:
        """Allocate blocks for the tables and the rows of a round.  Raises BadInput when there is no room."""
        if tables + rows > self.parts.reserve:
            self._enlarge(tables + rows)
        kept = self._place(tables, self.parts.allocate_tables, self._tables_of_graphs)
        return kept, self._place(rows, self.parts.allocate_rows, self._rows_of_graphs)

    def rows(self, nbytes: int) -> _native.Block:
        """Allocate a block for rows alone.  Raises BadInput when there is no room."""
        if nbytes > self.parts.reserve:
            self._enlarge(nbytes)
        return self._place(nbytes, self.parts.allocate_rows, self._rows_of_graphs)

    def scratch(self, nbytes: int) -> _native.Block:
        """Allocate a block that is freed before the call returns.  Raises BadInput when there is no room."""
        capturing = self._capturing()
        block = self.arena.allocate(nbytes, self.parts.end)
        if block is None or (capturing and block.offset < self.parts.end):
            block = self._that_stays(nbytes, self.parts.allocate_rows, self._rows_of_graphs)
        if block is None:
            raise self._no_room(nbytes)
        return block

    def warn_of_copies(self) -> None:
        """Warn, once, that outputs are copied out of the window."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"a window of {self.nbytes} bytes has no room for further outputs beside those that are alive or belong to "
            f"graphs: new ones are copied out of it.  Keep fewer outputs, or "
            f"open the Buffer with window_bytes={max(self.nbytes, self.used) + self.parts.reserve} for one more round",
            stacklevel=3,
        )

    def _enlarge(self, nbytes: int) -> None:
        """Enlarge the reserve for a round that takes so much."""
        self.divide(self.parts.first_row - self.arena.begin + _SLACK, nbytes + 2 * _UNIT)

    def _place(self, nbytes: int, allocate: _Allocate, of_graphs: _Pieces) -> _native.Block:
        """Allocate a block that stays, or one in the reserve.  Raises BadInput when there is no room."""
        block = self._that_stays(nbytes, allocate, of_graphs)
        return self.scratch(nbytes) if block is None else block

    def _that_stays(self, nbytes: int, allocate: _Allocate, of_graphs: _Pieces) -> _native.Block | None:
        """Allocate a block that stays: in a piece of `of_graphs` while a graph is captured.  None: there is no room."""
        if not self._capturing():
            return self._eager(nbytes, allocate)
        for arena, _ in of_graphs:
            if block := arena.allocate(nbytes):
                return block
        piece = self._eager(-(-max(1, nbytes) // _UNIT) * _UNIT, allocate)
        if piece is None:
            return None
        arena = _native.Arena(piece.offset, piece.nbytes)
        of_graphs.append((arena, piece))
        if of_graphs is self._rows_of_graphs and self.parts.allocate_rows(self.parts.reserve) is None:
            self._extend(self.parts.reserve)  # so that eager rounds and other graphs have room beside this one
        return arena.allocate(nbytes)

    def _eager(self, nbytes: int, allocate: _Allocate) -> _native.Block | None:
        """Allocate a block that stays in the heap or an extension, if need be in a new one.  None: there is no room."""
        block = allocate(nbytes)
        if block is None and self._extend(nbytes):
            block = allocate(nbytes)
        return block

    def _extend(self, nbytes: int) -> bool:
        """Take memory for a block of so many bytes and for as much as a round; False: there is none, or not yet."""
        arena, parts = self.arena, self.parts
        found = self._extend_window(max(nbytes, parts.reserve, self.nbytes // _STEPS) + _SLACK)
        if found is None:
            return False
        offset, size = found
        tables = size * (parts.first_row - arena.begin) // max(1, parts.end - arena.begin)
        parts.extend(_native.Arena(offset, size), offset + min(tables, size // 2))
        return True

    def _no_room(self, nbytes: int) -> BadInput:
        return BadInput(
            "window_bytes",
            f"a window with {max(arena.largest_free for arena in self._arenas)} bytes free in one piece",
            f"{nbytes} for this round: keep fewer outputs, pass max_rows=, or open the Buffer with more",
        )
