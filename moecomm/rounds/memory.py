"""Window memory: tables, outputs, a reserve that is empty between calls, and extensions; graphs have pieces of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from moecomm import _native
from moecomm.errors import BadInput
from moecomm.ranks.session import Heap

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

    Where ranks use an extension late, when all peers have mapped it, they agree ahead of a round that takes more than
    the reserve (moecomm/dispatch/growth.py), and an extension is the reserve from then on.

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
        agrees: see Session.agrees.
    """

    def __init__(
        self,
        arena: _native.Arena,
        capturing: Callable[[], bool],
        tables: int = 0,
        reserve: int = 0,
        extend: Callable[[int, Heap], tuple[int, int] | None] = lambda nbytes, heap: None,
        agrees: bool = False,
    ) -> None:
        self.arena = arena
        self.parts = _native.HeapParts(arena)
        self._capturing, self._extend_window, self._agrees = capturing, extend, agrees
        self._tables_of_graphs: _Pieces = []  # apart from rows: other graphs may need more of the one or the other
        self._rows_of_graphs: _Pieces = []
        self._reserve_of_graphs: _native.Arena | None = None  # the last one that graphs have scratch in
        self._warned = False
        self.divide(tables, reserve)

    def divide(self, tables: int, reserve: int) -> None:
        """Set the bytes that tables fill before they lie among rows, and those of the reserve.

        The rest is for rows, and a little of the tables' part, because blocks begin at multiples of 256.  A round that
        takes more than the reserve enlarges it.  All ranks give the same reserve.

        Raises:
            RuntimeError: the reserve has moved to an extension.
        """
        self._divide(tables, reserve)
        self._opened = self.parts.reserve
        self.disagree()

    def disagree(self) -> None:
        """Forget what ranks have agreed on beyond the reserve of divide(): they may have come to different ends."""
        if self._agrees:
            self.parts.agreed = self._opened

    def _divide(self, tables: int, reserve: int) -> None:
        self.parts.divide(self.arena.begin + max(0, tables - _SLACK), reserve)

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
        of_graphs = [piece for _, piece in self._tables_of_graphs + self._rows_of_graphs] + self.parts.replayed
        return self.used - sum(piece.nbytes for piece in of_graphs)

    @property
    def _arenas(self) -> list[_native.Arena]:
        return [self.arena, *([self.parts.reserved] if self._reserve_has_moved else []), *self.parts.extensions]

    @property
    def _reserve_has_moved(self) -> bool:
        return self.parts.reserved is not self.arena

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
        block = self.parts.reserved.allocate(nbytes, self.parts.end)
        if block is None or (capturing and block.offset < self.parts.end):
            block = self._that_stays(nbytes, self.parts.allocate_rows, self._rows_of_graphs)
        elif capturing:
            self._reserve_of_graphs = self.parts.reserved
        if block is None:
            raise self.no_room(nbytes)
        return block

    def holds(self, offset: int) -> bool:
        """Return whether blocks may come from this offset of the window."""
        first = -(-offset // _UNIT) * _UNIT
        return any(arena.begin <= first < arena.end for arena in self._arenas)

    def missing(self, nbytes: int) -> int:
        """Return the bytes that the window lacks for a reserve in which a round of so many finds room; 0: none.

        The outputs of such a round may stay, too, as in a window of the default size.
        """
        need = _reserve_for(nbytes)
        if need <= self.parts.reserve:
            return 0
        stays = max(arena.end - arena.begin for arena in self._arenas) >= need
        return (need if stays else 2 * need) + _SLACK

    def grown(self, nbytes: int, extension: tuple[int, int] | None) -> None:
        """Note that all ranks have a reserve for rounds of so many bytes, and take theirs from an extension, if given.

        Called when the reserve is empty, but for memory of failed rounds.
        """
        parts = self.parts
        if extension is not None:
            before, others = parts.reserved, []
            replayed = _all_from(before, parts.end) if self._reserve_of_graphs is before else []
            if self._reserve_has_moved:
                others.append((before, self._first_row(before.begin, before.end - before.begin)))
            offset, size = extension
            if (more := size - _reserve_for(nbytes)) >= _reserve_for(nbytes):
                others.append((_native.Arena(offset, more), self._first_row(offset, more)))
                offset, size = offset + more, size - more
            parts.move_reserve(_native.Arena(offset, size), others, replayed)
        parts.agreed = max(parts.agreed, nbytes)

    @property
    def next_size(self) -> int:
        """Bytes of the round to make room for where ranks agree once more, the same on all ranks; 0: for the first."""
        agreed = self.parts.agreed
        return agreed + agreed // 2 if agreed > self._opened else 0

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
        """Enlarge the reserve for a round that takes so much, in the heap."""
        if not self._reserve_has_moved:
            self._divide(self.parts.first_row - self.arena.begin + _SLACK, nbytes + 2 * _UNIT)

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
        found = self._extend_window(max(nbytes, self.parts.reserve, self.nbytes // _STEPS) + _SLACK, self)
        if found is None:
            return False
        self.parts.extend(_native.Arena(*found), self._first_row(*found))
        return True

    def _first_row(self, offset: int, size: int) -> int:
        """Return where rows begin in an extension: tables have as large a part of it as of the heap."""
        arena, parts = self.arena, self.parts
        tables = size * (parts.first_row - arena.begin) // max(1, min(parts.end, arena.end) - arena.begin)
        return offset + min(tables, size // 2)

    def no_room(self, nbytes: int) -> BadInput:
        """Return the error of a round that finds no block of so many bytes."""
        return BadInput(
            "window_bytes",
            f"a window with {max(arena.largest_free for arena in self._arenas)} bytes free in one piece",
            f"{nbytes} for this round: keep fewer outputs, pass max_rows=, or open the Buffer with "
            f"window_bytes={max(self.nbytes, self.used) + 2 * (nbytes + _SLACK)}",
        )


def _reserve_for(nbytes: int) -> int:
    """Return the bytes of a reserve for a round of two blocks of so many."""
    return -(-nbytes // _UNIT) * _UNIT + 2 * _UNIT


def _all_from(arena: _native.Arena, begin: int) -> list[_native.Block]:
    """Allocate all that is free in an arena from an offset on."""
    found, size = [], arena.end - begin
    while size >= _UNIT:
        block = arena.allocate(size, begin)
        if block is not None and block.offset >= begin:
            found.append(block)
        else:
            size = size // 2 // _UNIT * _UNIT
    return found
