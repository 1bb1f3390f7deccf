"""Extensions: memory that a rank takes behind its window while rounds go on, and that its peers map when next called.

A rank maps further memory by itself and sends it to its peers.  It uses the memory when all of them have mapped it.  No
rank waits for another one: until then, and if some rank never maps it, the window is as it was.

A peer maps it in a call of its own, when the kernels that it launched before have ended: CUDA does not say that a
kernel reaches memory that is mapped after its launch.  That wait ends, because all ranks make the same rounds: of all
ranks, take the one in the earliest call.  The kernels before its call wait for rounds that every rank has launched.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from moecomm import _native
from moecomm.backends.windows import ExtensibleWindow
from moecomm.ranks.collective import all_or_none, close_descriptors, open_windows
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.session import Heap

log = logging.getLogger("moecomm")

BYTES = 512  # of a rank's words
# Their offsets: offers of all ranks so far, a u64 of rank 0 alone; of grow(), the units that the rank needs, and
# whether it has taken and mapped memory, u32 each; how often it may have lost an offer, u32; the name of the rank's
# socket; u32 by rank, the extent of its window that the rank has mapped, in units.
_OFFERS, _NEED, _GROWN, _LOST, _NAME, _EXTENTS = 0, 8, 12, 16, 64, 128
_NAME_BYTES, _UNIT = 16, 4096
_OFFER = struct.Struct("<IQQ")  # rank, offset, bytes
_CREDENTIALS = struct.Struct("<iII")  # struct ucred
_SEND_S = 1.0  # between a rank's connection and its offer


@dataclass(eq=False)
class _Piece:
    """Memory behind the window of this rank.

    `descriptor` and `kept`, which closes it, are for peers that have not mapped the memory.  `is_sent`: to all of them.
    """

    begin: int
    size: int
    descriptor: int | None
    kept: ExitStack
    is_sent: bool = False


class Extensions:
    """Extensions of the windows of all ranks of one host.  Making it is collective.

    Attributes:
        offers: the number of offers of all ranks; where it is not what admit() returned last, call admit().

    Args:
        window: of this rank.
        ranks: of the group.
        words: addresses of BYTES zeroed bytes of each rank, by rank; None: ranks are threads, and have none yet.
        timeout_s: for the opening.
        synchronize: waits for the rounds that this rank has launched.
    """

    def __init__(
        self,
        window: ExtensibleWindow,
        ranks: Rendezvous,
        words: Sequence[int] | None,
        timeout_s: float,
        synchronize: Callable[[], None],
    ) -> None:
        self._window, self._synchronize, self._rank = window, synchronize, ranks.rank
        self._pieces: list[_Piece] = []  # that are not known to be in use, by offset
        self._refused = False  # extend() tries no more
        self._kept = ExitStack()  # of the piece that _take() makes
        self._maps = False  # _map_offers() has begun and not ended
        self._lost = 0  # the sum of what ranks have told of lost offers
        self._opened = [] if words is not None else open_windows(ranks, BYTES, timeout_s)[1]
        self._words = [page.address for page in self._opened] if words is None else list(words)
        with ExitStack() as undo:
            with all_or_none(ranks):  # peers find the names of all sockets
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                undo.callback(self._socket.close)
                name = secrets.token_bytes(_NAME_BYTES)
                self._socket.bind(b"\0" + name)
                self._socket.listen(4 * ranks.ranks)  # offers of several calls
                ctypes.memmove(self._words[self._rank] + _NAME, name, _NAME_BYTES)
            undo.pop_all()
        self.offers = ctypes.c_uint64.from_address(self._words[0] + _OFFERS)

    @property
    def pending(self) -> bool:
        """Return whether all peers have been sent memory that some have not mapped yet."""
        return any(piece.is_sent and not self._is_mapped(piece) for piece in self._pieces)

    def extend(self, nbytes: int, heap: Heap) -> tuple[int, int] | None:
        """See Session.extend."""
        self._settle(heap)
        if not self._refused:
            try:
                if not self._pieces:
                    self._take(nbytes)
                for piece in self._pieces:
                    if not piece.is_sent:
                        self._offer(piece)
            except (RuntimeError, OSError) as error:
                self._log(error)
                self._refused = True
        if not self._pieces or not self._is_mapped(first := self._pieces[0]):
            return None
        return first.begin, first.size

    def grow(
        self, nbytes: int, heap: Heap, ranks: Collection[int], meet: Callable[[], None]
    ) -> tuple[int, tuple[int, int] | None] | None:
        """See Session.grow.  No word is written again before all ranks have read it: they meet in between."""
        self._settle(heap)
        own, pages = self._words[self._rank], {rank: self._words[rank] for rank in ranks}
        _native.store_word(own + _NEED, -(-nbytes // _UNIT))
        meet()
        most = max(_native.read_word(page + _NEED) for page in pages.values()) * _UNIT
        lacks, piece, taken = heap.missing(most), None, True
        try:
            if lacks > 0:
                piece = next((earlier for earlier in self._pieces if earlier.size >= lacks), None) or self._take(lacks)
            for unmapped in self._pieces:  # also those of earlier calls, which an interrupt may have ended
                if not self._is_mapped(unmapped):
                    self._offer(unmapped)
        except (RuntimeError, OSError) as error:
            self._log(error)
            taken = False
        self.publish()
        meet()
        self._map_offers()
        self.publish()
        mapped = (
            self._window.extent(rank) >= _native.read_word(page + _EXTENTS + 4 * rank) * _UNIT
            for rank, page in pages.items()
        )
        _native.store_word(own + _GROWN, int(taken and all(mapped)))
        meet()
        if not all(_native.read_word(page + _GROWN) for page in pages.values()):
            return None
        return most, None if piece is None else (piece.begin, piece.size)

    def admit(self) -> int:
        """Map what peers offer, once the rounds so far have ended; return the number of offers before."""
        offers = self.offers.value
        self._synchronize()
        self._map_offers()
        self.publish()
        return offers

    def publish(self) -> None:
        """Tell peers how much of their windows is mapped here, while no kernel of this rank runs."""
        for rank in range(len(self._words)):
            word = self._words[self._rank] + _EXTENTS + 4 * rank
            _native.store_word(word, self._window.extent(rank) // _UNIT)

    def release(self) -> None:
        """Let go of memory that the window has given back; restore() maps other memory there, on all ranks."""
        for piece in self._pieces:
            piece.kept.close()
            piece.is_sent = True

    def close(self) -> None:
        """Drop the window, and stop offering and mapping memory.  Call it once."""
        self.release()
        self._kept.close()
        self._socket.close()
        self._opened = []  # a thread that still reads its words keeps them
        del self._window, self._synchronize

    def _settle(self, heap: Heap) -> None:
        """End what an interrupt has left half done, and forget pieces that are in use.

        A piece stays in the list until the heap holds it, so an interrupt on the way there loses nothing.
        """
        lost = sum(_native.read_word(words + _LOST) for words in self._words)
        for piece in self._pieces:
            if self._window.extent(self._rank) < piece.begin + piece.size:
                self._window.take(piece.begin + piece.size)
            if self._is_mapped(piece):
                piece.kept.close()
            elif lost != self._lost:
                piece.is_sent = False
        self._lost = lost
        self._pieces = [piece for piece in self._pieces if not heap.holds(piece.begin)]
        if all(piece.kept is not self._kept for piece in self._pieces):
            self._kept.close()

    def _take(self, nbytes: int) -> _Piece:
        """Map memory.  Raises RuntimeError, OSError: there is none."""
        self._kept = kept = ExitStack()
        try:
            piece = _Piece(*self._window.extend(nbytes, kept), kept)
        except (RuntimeError, OSError):
            kept.close()
            raise
        self._pieces.append(piece)
        self._window.take(piece.begin + piece.size)
        return piece

    def _offer(self, piece: _Piece) -> None:
        """Send memory to all peers, which pass over what they have mapped.  Raises OSError: a peer does not get it."""
        if piece.descriptor is not None:
            self._send(_OFFER.pack(self._rank, piece.begin, piece.size), piece.descriptor)
        if len(self._words) > 1:  # else nobody has to map it
            counter = self._words[0] + _OFFERS
            while not _native.replace_word(counter, before := _native.read_long_word(counter), before + 1):
                pass
        piece.is_sent = True

    def _log(self, error: Exception) -> None:
        log.info("rank %d: the window keeps its size: %s", self._rank, error)

    def _send(self, offer: bytes, descriptor: int) -> None:
        for rank, words in enumerate(self._words):
            if rank == self._rank:
                continue
            name = ctypes.string_at(words + _NAME, _NAME_BYTES)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as peer:
                peer.connect(b"\0" + name)
                _check_user(peer)
                socket.send_fds(peer, [offer], [descriptor])

    def _map_offers(self) -> None:
        """Map what peers have sent.  A rank that cannot map memory goes on without it."""
        if self._maps:  # an interrupt has ended the last call, and may have taken an offer with it
            lost = self._words[self._rank] + _LOST
            _native.store_word(lost, _native.read_word(lost) + 1)
        self._maps = True
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                break
            descriptors: list[int] = []
            try:
                with connection:
                    connection.settimeout(_SEND_S)
                    _check_user(connection)
                    offer, descriptors, *_ = socket.recv_fds(connection, _OFFER.size, 1, socket.MSG_CMSG_CLOEXEC)
                rank, begin, size = _OFFER.unpack(offer)
                if rank < len(self._words) and rank != self._rank and descriptors:
                    self._window.extend_peer(rank, begin, size, descriptors[0])
            except (RuntimeError, OSError, struct.error) as error:
                log.info("rank %d: memory of a peer could not be mapped: %s", self._rank, error)
            finally:
                close_descriptors(descriptors)
        self._maps = False

    def _is_mapped(self, piece: _Piece) -> bool:
        """Return whether all peers have mapped this rank's window up to the end of a piece."""
        own = _EXTENTS + 4 * self._rank
        peers = [words for rank, words in enumerate(self._words) if rank != self._rank]
        return all(_native.read_word(words + own) * _UNIT >= piece.begin + piece.size for words in peers)


def _check_user(connection: socket.socket) -> None:
    """Raise ConnectionError if the process at the other end is not of our user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
        raise ConnectionError("a process of another user")
