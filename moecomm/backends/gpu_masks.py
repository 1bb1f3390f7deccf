"""Masks of ranks on GPUs: a rank's own window says which ranks take no part, and its kernels answer for them."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch

from moecomm import _native
from moecomm.backends import between_rounds, windows
from moecomm.backends.gpu_peers import CONTROL, GpuPeers
from moecomm.backends.lsa_kernels import is_multi_domain
from moecomm.gpu import cuda_driver
from moecomm.rounds import failures

_WORDS = CONTROL + 128  # offset in the control memory, behind what peeks and leaving use at the same time


class GpuMasks:
    """Masks of the ranks of a session; see moecomm.ranks.session.Maskable.

    Nothing runs in the windows: calls follow a failed round, whose kernels have ended or end, or a synchronized one.

    Args:
        peers: memory of the ranks.
        context: of this rank.
        window: its window.

    Attributes:
        masked: ranks that take no part.
    """

    masked: Collection[int] = ()

    def __init__(self, peers: GpuPeers, context: _native.Context, window: windows.Window) -> None:
        self._peers, self._device, self._context = peers, peers.device, context
        self._window: windows.Window | None = window

    def close(self) -> None:
        """Let go of the window."""
        self._window = None

    def last_round(self) -> int:
        """Return the number of the last round that has begun, once it has ended."""
        torch.cuda.synchronize(self._device)  # a graph may have been replayed on any stream
        return int.from_bytes(self._read(self._context.window.state), "little")

    def begun(self) -> list[str]:
        last_round, layout, ranks = self.last_round(), self._context.window, self._context.shape.ranks
        at = map(partial(_native.leave_offset, layout, ranks, last_round), range(ranks))
        return failures.begun_ops([self._read(offset, 8) for offset in at], last_round)

    def excluded(self) -> bool:
        return self._read(self._context.window.abort) == _native.excluded_word(self._context.rank)

    def exclude(self, rank: int) -> None:
        if peer := self._own_window().peers[rank]:  # 0: another domain, where its neighbors write the word
            self._write(peer + self._context.window.abort, _native.excluded_word(rank))

    def interrupt(self, rank: int) -> None:
        if peer := self._own_window().peers[rank]:  # 0: another domain, where its own deadline ends the wait
            self._write(peer + self._context.window.abort, _native.aborted_word(self._context.rank))

    def forget_interrupts(self) -> None:
        offset = self._context.window.abort
        if self._read(offset) in map(_native.aborted_word, range(self._context.shape.ranks)):
            self._write(self._own_window().address + offset, bytes(4))

    def abort_others(self) -> None:
        """Write the abort word of all ranks that take part and whose memory is mapped, beside kernels that run."""
        context = self._context
        if self.excluded():
            return
        word = _native.aborted_word(context.rank)
        for rank, peer in enumerate(self._own_window().peers):
            if peer and rank != context.rank and rank not in self.masked:
                self._write(peer + context.window.abort, word)

    def resume(self, last_round: int, masked: Collection[int], agreement: int) -> set[int]:
        own, layout, peers = self._own_window().address, self._context.window, self._peers
        for rank in range(self._context.shape.ranks):
            peers.ignore(rank, rank in masked)
        self.masked = masked
        self._write(own + layout.state, _native.resumed_state(last_round, sorted(masked)))
        if is_multi_domain(self._context.shape) and not peers.reach.puts:
            peers.copies.zero(own + layout.signals, layout.counters - layout.signals)
            self._write(own + layout.signals, _native.resumed_signals(self._context.shape, last_round))
        self._write(own + layout.abort, bytes(4))
        _native.forget_failure(self._context)
        dead = peers.dead_peers().keys() - set(masked)
        for rank in dead:  # whose word has been cleared
            peers.abort(failures.Failure.peer_lost, rank)
        if dead or not peers.reach.puts:
            return dead
        with torch.cuda.device(self._device):
            how = self._context, masked, agreement, last_round, peers.control, _WORDS
            missing = between_rounds.quiesce(peers.reach.shim, *how)
        if not missing:
            return set()
        # A loss ends the waits for all ranks: name only those that are lost.
        return peers.dead_peers().keys() - set(masked) or missing

    def _read(self, offset: int, nbytes: int = 4) -> bytes:
        """Return a word, or more, of this rank's window."""
        peers = self._peers
        with torch.cuda.device(self._device):
            cuda_driver.bind_thread(self._device.index)
            peers.copies.to_host(peers.control.address + _WORDS, self._own_window().address + offset, nbytes)
            peers.copies.wait()
        return peers.control.read(_WORDS, nbytes)

    def _write(self, address: int, data: bytes) -> None:
        peers = self._peers
        with torch.cuda.device(self._device):
            cuda_driver.bind_thread(self._device.index)
            peers.control.write(_WORDS, data)
            peers.copies.to_device(address, peers.control.address + _WORDS, len(data))
            peers.copies.wait()

    def _own_window(self) -> windows.Window:
        assert self._window is not None
        return self._window
