"""Collective steps of opening windows: failing on all ranks alike, and passing file descriptors."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol

from moecomm import _native
from moecomm.base.weak import WeakTable
from moecomm.errors import RoundFailed, Timeout, Unsupported
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.opening import Opening

_VERDICT = struct.Struct("<BQ511s")  # and a word that its rank passes, and the text of an error
_FINE, _UNSUPPORTED, _NO_ROOM = range(3)


class NoRoom(Unsupported):
    """Not enough device memory for a window.  Another kind of window would not fit either."""


class _FailedElsewhere(Exception):
    """The block of all_or_none() has failed on another rank, whose text is read at its end."""


class Passed:
    """Words that ranks pass each other with their verdicts in all_or_none().

    Attributes:
        word: of this rank, set in the block.
        words: those of all ranks, by rank, when the block has ended.
    """

    word = 0
    words: Sequence[int] = ()


@contextmanager
def all_or_none(ranks: Rendezvous) -> Iterator[Passed]:
    """Collective: the block succeeds on every rank, or raises the same class of error on every rank.

    Without it, the ranks that succeed would go on to the next collective call and wait there for those that did not.
    It ends with an all-gather, so it is also a barrier: when it returns, all ranks have finished the block.

    Raises:
        NoRoom, Unsupported: with the text of the lowest rank that failed, or of this rank.
        Timeout, PeerLost, Aborted: the opening has failed on all ranks.
    """
    error: Exception | None = None
    passed = Passed()
    try:
        yield passed
    except RoundFailed:  # the other ranks learn of it from the opening
        raise
    except _FailedElsewhere:
        pass
    except Exception as raised:  # noqa: BLE001 (reported to all ranks, then raised again)
        error = raised
    verdict = _FINE if error is None else _NO_ROOM if isinstance(error, NoRoom) else _UNSUPPORTED
    text = "" if error is None else str(error) or type(error).__name__
    everybody = ranks.all_gather(_VERDICT.pack(verdict, passed.word, text.encode()))
    verdicts, passed.words, texts = map(list, zip(*map(_VERDICT.unpack, everybody), strict=True))
    # One class for all: a rank that runs out of memory must not go another way than the others.
    raised_class = NoRoom if _NO_ROOM in verdicts else Unsupported
    if error is not None:
        raise raised_class(text) from error
    for rank, (found, words) in enumerate(zip(verdicts, texts, strict=True)):
        if found != _FINE:
            raise raised_class(f"rank {rank}: {words.rstrip(bytes(1)).decode(errors='replace')}")


def share_descriptor(ranks: Rendezvous, descriptor: int, timeout_s: float) -> list[int]:
    """Return every rank's file descriptor, by rank; the own entry is -1.  Collective.  The caller closes them.

    They travel over a Unix socket between processes of one user, checked by credentials and a nonce.  No name is left
    behind.

    Raises:
        Unsupported: some rank did not get them all; no rank keeps any.
        Timeout, PeerLost, Aborted: the opening has failed on all ranks.
    """
    nonce = ranks.all_gather(secrets.token_bytes(16))[0]
    with all_or_none(ranks):
        exchange = _native.Exchange(ranks.rank, ranks.ranks, nonce)
    received: list[int] = []
    try:
        packed = ranks.all_gather(bytes([len(exchange.address)]) + exchange.address.ljust(64, b"\0"))
        with all_or_none(ranks):
            addresses = [address[1 : 1 + address[0]] for address in packed]
            try:
                received = exchange.share(descriptor, addresses, timeout_s, lambda: _check(ranks))
            except TimeoutError as error:
                if not isinstance(ranks, Opening):
                    raise
                raise ranks.failed(Timeout, -1, f"{error} ({ranks.where})") from error
    except BaseException:
        close_descriptors(received)
        raise
    finally:
        exchange.close()
    return received


def _check(ranks: Rendezvous) -> None:
    """Raise the error that ends a wait inside of all_or_none(): the opening or the block elsewhere has failed."""
    if not isinstance(ranks, Opening):
        return
    ranks.check()
    if any(data[0] != _FINE for data in ranks.posted()):
        raise _FailedElsewhere


class MappedWindow(Protocol):
    """The window of a rank, as this rank reaches it."""

    @property
    def address(self) -> int:
        """0 once closed."""
        ...

    def close(self) -> None:
        """Let go of the mapping.  Idempotent."""
        ...


class _ThreadWindow:
    """The window of a rank that is a thread of this process, which has it mapped.  It lives as long as one uses it."""

    def __init__(self, window: _native.HostWindow) -> None:
        self.address = window.address
        self._window: _native.HostWindow | None = window

    def close(self) -> None:
        self.address, self._window = 0, None


_of_threads: WeakTable[int, _native.HostWindow] = WeakTable()  # by address


def open_windows(ranks: Rendezvous, nbytes: int, timeout_s: float) -> tuple[_native.HostWindow, list[MappedWindow]]:
    """Make a window of so many bytes on every rank; return this rank's, and all of them, by rank.  Collective.

    Raises:
        Unsupported: there is no such memory on some rank, or it can't be passed on.
        Timeout, PeerLost, Aborted: the opening has failed on all ranks.
    """
    with ExitStack() as undo:
        with all_or_none(ranks) as passed:
            mine = _native.HostWindow(nbytes)
            undo.callback(mine.close)
            if ranks.in_process:
                _of_threads.add(mine.address, mine)
                passed.word = mine.address
        mapped = _find_windows(ranks, mine, passed.words) if ranks.in_process else _map_windows(ranks, mine, timeout_s)
        undo.pop_all()
    return mine, mapped


def _find_windows(ranks: Rendezvous, mine: _native.HostWindow, addresses: Sequence[int]) -> list[MappedWindow]:
    """Find the windows of ranks that are threads.  They share mappings: one a pair would be too many for 256 ranks."""
    found: list[MappedWindow] = []
    with all_or_none(ranks):  # nobody closes its window before all have found it
        for address in addresses:
            window = _of_threads.get(address)
            assert window is not None, "its rank is in this block, too"
            found.append(mine if window is mine else _ThreadWindow(window))
    return found


def _map_windows(ranks: Rendezvous, mine: _native.HostWindow, timeout_s: float) -> list[MappedWindow]:
    descriptors = share_descriptor(ranks, mine.fd, timeout_s)
    with ExitStack() as undo:
        undo.callback(close_descriptors, descriptors)
        windows: list[MappedWindow] = []
        with all_or_none(ranks):
            for rank in range(ranks.ranks):
                if rank == ranks.rank:
                    windows.append(mine)
                    continue
                fd, descriptors[rank] = descriptors[rank], -1  # attach() takes it, also when it fails
                windows.append(_native.HostWindow.attach(fd, mine.nbytes))
                undo.callback(windows[-1].close)
        undo.pop_all()
    return windows


def close_descriptors(descriptors: Sequence[int]) -> None:
    """Close the descriptors of share_descriptor(); -1: none."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def host_identity() -> bytes:
    """Return 32 bytes that are equal for two processes if and only if they can pass file descriptors."""
    parts = [socket.gethostname()]
    # Containers of one machine share the boot id, and may share the name, but abstract sockets end at the namespace.
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return hashlib.sha256("\0".join(parts).encode()).digest()
