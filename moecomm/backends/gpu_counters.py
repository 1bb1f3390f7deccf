"""The counters of a rank on a GPU: in its window, where kernels add to them."""

from __future__ import annotations

import threading

import torch

from moecomm import _native
from moecomm.backends.gpu_peers import GpuPeers
from moecomm.gpu import cuda_driver

_PEEK_S = 0.02  # for a copy of a few hundred bytes, which other work may hold up


def nbytes(layout: _native.WindowLayout) -> int:
    """Return the size of the counters."""
    return layout.staging - layout.counters


class GpuCounters:
    """Reader of the counters of a session; see moecomm.ranks.session.Session.

    Args:
        peers: memory of the ranks.
        address: of this rank's window.
        layout: of the window.
        control_offset: of room for the counters in the control memory.
    """

    def __init__(self, peers: GpuPeers, address: int, layout: _native.WindowLayout, control_offset: int) -> None:
        self._peers, self._address, self._nbytes = peers, address + layout.counters, nbytes(layout)
        self._control_offset = control_offset
        self._reading = threading.RLock()  # of that room; close() takes it, too, and a signal handler may
        self._closed = False

    def tensor(self) -> torch.Tensor:
        return cuda_driver.int64_at(self._address, self._nbytes // 8, self._peers.device)

    def read(self) -> bytes | None:
        """Read the counters.  The caller looks whether this thread captures, because a capture must see no copy."""
        with self._reading:
            if self._closed:
                return None
            return self._peers.peek(self._control_offset, self._address, self._nbytes, _PEEK_S)

    def close(self) -> bool:
        """Wait for a read() of another thread, and let none begin.  Return False if that has been done before."""
        with self._reading:
            closed, self._closed = self._closed, True
            return not closed
