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

from moecomm import _native
from moecomm.backends.windows import ExtensibleWindow
from moecomm.ranks.collective import all_or_none, close_descriptors, open_windows
from moecomm.ranks.group import Rendezvous

log = logging.getLogger("moecomm")

BYTES = 512  # of a rank's words
# Their offsets: offers of all ranks so far, a u64 of rank 0 alone; of grow(), the units that the rank needs, and
# whether it has taken and mapped memory, u32 each; the name of the rank's socket; u32 by rank, the extent of its window
# that the rank has mapped, in units.
_OFFERS, _NEED, _GROWN, _NAME, _EXTENTS = 0, 8, 12, 64, 128
_NAME_BYTES, _UNIT = 16, 4096
_OFFER = struct.Struct("<IQQ")  # rank, offset, bytes
_CREDENTIALS = struct.Struct("<iII")  # struct ucred
_SEND_S = 1.0  # between a rank's connection and its offer


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
        self._offered: list[tuple[int, int]] = []  # offsets and bytes of memory that is not in use yet
        self._refused = False  # extend() tries no more
        self._broken = False  # peers may have mapped another extent of this window than others
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
        """Return whether memory has been taken that not all peers have mapped yet."""
        return bool(self._offered)

    def extend(self, nbytes: int) -> tuple[int, int] | None:
        if not self._offered and not self._refused:
            self._refused = self._offer(nbytes) is None
        if not self._offered or not self._is_mapped(sum(self._offered[0])):
            return None
        return self._offered.pop(0)

    def grow(
        self, nbytes: int, missing: Callable[[int], int], ranks: Collection[int], meet: Callable[[], None]
    ) -> tuple[int, tuple[int, int] | None] | None:
        """See Session.grow.  No word is written again before all ranks have read it: they meet in between."""
        own, pages = self._words[self._rank], {rank: self._words[rank] for rank in ranks}
        _native.store_word(own + _NEED, -(-nbytes // _UNIT))
        meet()
        most = max(_native.read_word(page + _NEED) for page in pages.values()) * _UNIT
        lacks, offered = missing(most), None
        if lacks > 0:  # what an earlier call has taken that failed, or more
            earlier = (offer for offer in self._offered if offer[1] >= lacks)
            offered = next(earlier, None) or self._offer(lacks)
        self.publish()
        meet()
        self._map_offers()
        self.publish()
        taken = lacks == 0 or offered is not None
        mapped = (
            self._window.extent(rank) >= _native.read_word(page + _EXTENTS + 4 * rank) * _UNIT
            for rank, page in pages.items()
        )
        _native.store_word(own + _GROWN, int(taken and all(mapped)))
        meet()
        if not all(_native.read_word(page + _GROWN) for page in pages.values()):
            return None
        if offered is not None:
            self._offered.remove(offered)
        return most, offered

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

    def close(self) -> None:
        """Drop the window, and stop offering and mapping memory.  Call it once."""
        self._socket.close()
        self._opened = []  # a thread that still reads its words keeps them
        del self._window, self._synchronize

    def _offer(self, nbytes: int) -> tuple[int, int] | None:
        """Map memory and send it to all peers; return its offset and bytes, or None if that fails."""
        if self._broken:
            return None
        try:
            begin, size, descriptor = self._window.extend(nbytes)
            if descriptor is not None:
                self._broken = True
                try:
                    self._send(_OFFER.pack(self._rank, begin, size), descriptor)
                finally:
                    os.close(descriptor)
                self._broken = False
        except (RuntimeError, OSError) as error:
            log.info("rank %d: the window keeps its size: %s", self._rank, error)
            return None
        if len(self._words) > 1:  # else nobody has to map it
            counter = self._words[0] + _OFFERS
            while not _native.replace_word(counter, before := _native.read_long_word(counter), before + 1):
                pass
        self._offered.append((begin, size))
        return begin, size

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
        """Map what peers have sent.  A rank whose memory can't be mapped goes on without that memory."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
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

    def _is_mapped(self, extent: int) -> bool:
        """Return whether all peers have mapped this rank's window up to `extent`."""
        own = _EXTENTS + 4 * self._rank
        peers = [words for rank, words in enumerate(self._words) if rank != self._rank]
        return all(_native.read_word(words + own) * _UNIT >= extent for words in peers)


def _check_user(connection: socket.socket) -> None:
    """Raise ConnectionError if the process at the other end is not of our user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
        raise ConnectionError("a process of another user")
