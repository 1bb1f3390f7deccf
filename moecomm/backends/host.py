"""CPU ranks of one machine: memfd windows that every rank maps, and the host executor.  The default without GPUs.

Several domains (`domain_ranks`) are as on GPUs: only a Link writes to windows of other domains.
"""

from __future__ import annotations

import ctypes
import os
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from moecomm import _native
from moecomm.backends.host_peers import HostPeers
from moecomm.backends.presence import leave_exit_error
from moecomm.base import packets
from moecomm.base.protocol import MAX_CHUNK, MAX_RANKS
from moecomm.errors import BadInput
from moecomm.ranks.collective import all_or_none, open_windows
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.session import Heap, Schedule
from moecomm.rounds import failures

_ADDRESSES = 32 << 30  # for the heap of a window, which takes memory where it is written
_PAGE_BYTES = 4096
_RING_BYTES = 64 << 20  # of a window, for the staging ring
END_S = 1.0  # that others wait for a rank that they exclude to end its round


def missing() -> str:
    """Return "": every Linux machine can run it."""
    return "" if hasattr(os, "memfd_create") else "memfd_create; moecomm runs on Linux"


def ring_tokens(ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
    """Return the rows that fit _RING_BYTES, in whole chunks: at most all tokens."""
    fit = _RING_BYTES // (ranks * staged_row_bytes) // MAX_CHUNK
    return max(1, min(fit, -(-max_tokens // MAX_CHUNK))) * MAX_CHUNK


def packet_bytes(ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
    """Return 0: between CPUs a signal after a row costs nothing."""
    return 0


def direct_bytes(ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
    """Return the bytes of the rows that are put directly to one rank of another domain."""
    return packets.room(ranks, max_tokens, staged_row_bytes)


class HostSession:
    """A Session of CPU ranks; see moecomm.ranks.session.Session."""

    name = "host"
    device = torch.device("cpu")
    casts_formats = False
    reduced_rows_in_heap = False
    exclusive_gpu = False
    extending, offers, agrees = False, None, False
    synchronous = peers_read_weights = True

    def __init__(self, ranks: Rendezvous, shape: _native.Shape, timeout_s: float) -> None:
        with ExitStack() as undo:
            peers = HostPeers(ranks, _native.window_layout(shape).bytes, timeout_s, _ADDRESSES)
            undo.callback(peers.close)
            self.extensible = peers.more
            shape.heap_bytes += peers.more
            self._open(peers, ranks, shape, undo)
            undo.pop_all()

    def _open(self, peers: HostPeers, ranks: Rendezvous, shape: _native.Shape, undo: ExitStack) -> None:
        self._peers, self._window, self.pages = peers, peers.window, peers.pages
        context = _native.Context()
        context.set_shape(shape)
        context.rank = ranks.rank
        addresses, size = peers.addresses, shape.domain_ranks or ranks.ranks
        if size < ranks.ranks:
            near = [rank // size == ranks.rank // size for rank in range(ranks.ranks)]
            addresses = [address if here else 0 for address, here in zip(addresses, near, strict=True)]
        if ranks.ranks <= MAX_RANKS:
            context.peers = addresses
        else:
            self._addresses = array("Q", addresses)
            context.all_peers = self._addresses.buffer_info()[0]
        self._link: _native.Link | None = None
        if size < ranks.ranks:
            far = [0 if here else address for address, here in zip(peers.addresses, near, strict=True)]
            self._link = _native.Link(shape, far)
            undo.callback(self._link.close)
            context.link = self._link.address
        context.record = peers.record
        context.abort_host = peers.abort_host
        self.context = context
        self._counters = peers.addresses[ranks.rank] + context.window.counters
        self._placement = peers.addresses[ranks.rank] + context.window.placement
        self._counter_bytes = context.window.staging - context.window.counters
        self.nbytes = self._taken = self._last = peers.nbytes
        self._announced = False  # to peers, that this rank leaves
        self._round = _native.Turn()  # of the thread that runs one: the process may end meanwhile, which closes
        self._runner = _native.HostRunner(self._round)
        self._threads = max(1, len(os.sched_getaffinity(0)) // ranks.ranks)

    @property
    def owner(self) -> object:
        """The object that must outlive every tensor in the window."""
        return self._window

    @property
    def most_blocks(self) -> int:
        return 0

    def dispatcher(self, args: _native.DispatchArgs) -> Callable[[_native.DispatchArgs], None]:
        """Return the function that runs a dispatch; it returns when the round is over."""
        return self._runner

    def combiner(self, args: _native.CombineArgs) -> Callable[[_native.CombineArgs], None]:
        """Return the function that runs a combine; it returns when the round is over."""
        return self._runner

    def compile_for(self, shape: _native.Shape) -> int:
        """Return 0: there is nothing to compile."""
        return 0

    def combine_checked(self, args: _native.CombineArgs, checks: _native.RowChecks) -> None:
        """Run a combine whose rows are checked.  All ranks do."""
        self._runner.combine_checked(args, checks)

    def row_tables(self, ranks: Rendezvous, timeout_s: float) -> RowTables:
        return RowTables(self, ranks, timeout_s)

    def count_rejected(self) -> None:
        if self._window is not None:
            _native.count_rejected(self.context)

    def counters(self) -> torch.Tensor:
        words = (ctypes.c_int64 * (self._counter_bytes // 8)).from_address(self._counters)
        return torch.frombuffer(words, dtype=torch.int64)

    def place(self, words: Sequence[int]) -> None:
        table = array("I", words)
        ctypes.memmove(self._placement, table.buffer_info()[0], table.itemsize * len(table))

    def choose(self, args: _native.DispatchArgs) -> None:
        """Do nothing: a dispatch chooses by itself."""

    def read_counters(self) -> bytes | None:
        window = self._window  # keeps the memory mapped, whatever another thread does
        return None if window is None else ctypes.string_at(self._counters, self._counter_bytes)

    def relax_captures(self) -> None:
        """Do nothing: there are no captures."""

    def with_device(self, enqueue: Callable[..., None], *args: object) -> None:
        """Call `enqueue`."""
        enqueue(*args)

    def order(self) -> None:
        """Do nothing: there are no streams."""

    def synchronize(self) -> None:
        """Do nothing: rounds are over when they return."""

    def round_begun(self) -> int | None:
        """Return None: rounds are over when they return."""
        return None

    def capturing(self) -> bool:
        return False

    def schedule(self, op: str, *, num_tokens: int, layout: str, num_sms: int | None, casts: bool = False) -> Schedule:
        """Choose threads: this rank's share of the cores, fewer for small rounds."""
        threads = num_sms or max(1, min(self._threads, num_tokens // 8))
        return Schedule(threads, min(8 if num_tokens <= 1024 else 32, _native.most_chunk_tokens(self.context.shape)))

    def abort(self, cause: int, culprit: int) -> None:
        """End every wait of this rank."""
        self._peers.abort(cause, culprit)

    def abort_all(self) -> None:
        if self._window is not None:
            _native.abort_all(self.context)

    def dead_peers(self) -> dict[int, str]:
        """Return the ranks whose process has ended."""
        return self._peers.dead_peers()

    def last_round(self) -> int:
        return _native.host_round(self.context)

    def begun(self) -> list[str]:
        ranks, layout, last_round = self.context.shape.ranks, self.context.window, _native.host_round(self.context)
        own = self._peers.addresses[self.context.rank]
        at = map(partial(_native.leave_offset, layout, ranks, last_round), range(ranks))
        return failures.begun_ops([ctypes.string_at(own + offset, 8) for offset in at], last_round)

    def excluded(self) -> bool:
        rank, layout = self.context.rank, self.context.window
        word = _native.read_word(self.context.peers[rank] + layout.abort)
        return word.to_bytes(4, "little") == _native.excluded_word(rank)

    def exclude(self, rank: int) -> None:
        self._await_end_of_round(rank)
        _native.exclude(self.context, rank)

    def interrupt(self, rank: int) -> None:
        word = self._peers.addresses[rank] + self.context.window.abort
        if _native.read_word(word) == 0:
            _native.store_word(word, int.from_bytes(_native.aborted_word(self.context.rank), "little"))

    def forget_interrupts(self) -> None:
        word = self._peers.addresses[self.context.rank] + self.context.window.abort
        ranks = range(self.context.shape.ranks)
        if _native.read_word(word).to_bytes(4, "little") in map(_native.aborted_word, ranks):
            _native.store_word(word, 0)

    def _await_end_of_round(self, rank: int) -> None:
        """Wait until a rank has ended the last round of this one, has failed, or is gone; END_S at most.

        Where ranks outnumber cores it may still be in that round: all its rows are there, yet it would be excluded.
        """
        window, layout = self._peers.addresses[rank], self.context.window
        last, until = self.last_round(), time.monotonic() + END_S
        while _native.read_word(window + layout.state) != last and _native.read_word(window + layout.abort) == 0:
            if rank in self.dead_peers() or time.monotonic() >= until:
                return
            time.sleep(0.001)

    def resume(self, last_round: int, masked: Collection[int], agreement: int) -> set[int]:
        for rank in range(self.context.shape.ranks):
            self._peers.ignore(rank, rank in masked)
        _native.resume(self.context, last_round, sorted(masked))
        dead = self.dead_peers().keys() - set(masked)
        for rank in dead:  # whose word has been cleared
            self.abort(failures.Failure.peer_lost, rank)
        return dead

    def extend(self, nbytes: int, heap: Heap) -> tuple[int, int] | None:
        """Take more of the window, of which peers have mapped all addresses."""
        if self._last < self._taken and not heap.holds(self._last):  # an interrupt came before its use
            self._taken = self._last
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        if self._window is None or self._taken + size > self._window.nbytes:
            return None
        begin = self._last = self._taken
        self._taken += size
        self.nbytes = self._taken
        return begin, size

    def grow(
        self, nbytes: int, heap: Heap, ranks: Collection[int], meet: Callable[[], None]
    ) -> tuple[int, tuple[int, int] | None] | None:
        """Do nothing: ranks do not agree, because memory of extend() is there at once."""
        raise AssertionError(self.agrees)

    def admit(self) -> int:
        """Do nothing: there are no offers."""
        return 0

    def require_releasable(self) -> None:
        """Do nothing: memory of every window can be released."""

    def release(self, ranks: Rendezvous) -> None:
        """Give back the pages of this rank's window; see Session.

        That is enough: peers map the same pages.  A Link may still have signals of the last round to move; these are
        in the part that stays.
        """
        with all_or_none(ranks):
            assert self._window is not None
            self.nbytes = self._window.release(self.context.window.staging)

    def restore(self, ranks: Rendezvous) -> None:
        """Take no memory: rounds take it, zeroed, where they touch it."""
        self.nbytes = self._taken

    def close(self) -> None:
        """Drop this rank's mappings; the memory goes with the last tensor and the last peer that uses it.

        A round in another thread is aborted.
        """
        with _native.AwaitedTurn(self._round, lambda: self.abort(failures.Failure.aborted, self.context.rank)):
            self._runner.closed = True
            self._close()

    def _close(self) -> None:
        """Close in steps that can be repeated, because Ctrl-C may come in between."""
        if self._window is not None:
            leave_exit_error(self.pages)
            if not self._announced and not failures.round_failed(self.context):
                _native.leave(self.context)
            self._announced = True
            if self._link is not None:  # before our process may end, and before the windows go
                self._link.close()
            self._window = None
        self._peers.close()


class RowTables:
    """Hashes of the rows that combines move, of all ranks, in memory outside of the windows.  Opening is collective.

    Attributes:
        checks: what combines compare rows with.

    Raises:
        Unsupported: there is no such memory on some rank, or it can't be passed on.
        Timeout, PeerLost, Aborted: the opening has failed on all ranks.
    """

    def __init__(self, session: HostSession, ranks: Rendezvous, timeout_s: float) -> None:
        self._session, shape = session, session.context.shape
        _, self._mapped = open_windows(ranks, _native.RowChecks.table_bytes(shape), timeout_s)
        self.checks = _native.RowChecks(shape, ranks.rank, [table.address for table in self._mapped])

    def combine(self, args: _native.CombineArgs) -> None:
        self._session.combine_checked(args, self.checks)


def open(ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float) -> HostSession:  # noqa: A001
    """Open a session.  Collective: see moecomm.ranks.session.Backend."""
    _check_device(device)
    return HostSession(ranks, shape, timeout_s)


def open_peers(ranks: Rendezvous, nbytes: int, device: torch.device | None, timeout_s: float) -> HostPeers:
    """Open memory of all ranks, without a session.  Collective: see moecomm.ranks.session.Backend."""
    _check_device(device)
    return HostPeers(ranks, nbytes, timeout_s)


def _check_device(device: torch.device | None) -> None:
    if device is not None and device.type != "cpu":
        raise BadInput("device", device, "the CPU, which is where backend='host' runs")
