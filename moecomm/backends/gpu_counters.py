"""The counters of a rank on a GPU: in its window, where kernels add to them."""

from __future__ import annotations

import threading

import torch

from moecomm import _native
from moecomm.backends import windows
from moecomm.backends.gpu_peers import GpuPeers
from moecomm.gpu import cuda_driver

_PEEK_S = 0.02  # for a copy of a few hundred bytes, which other work may hold up


def nbytes(layout: _native.WindowLayout) -> int:
    """Return the size of the counters."""
    return layout.staging - layout.counters


class Counters:
    """The part of a session on GPUs that reads the counters; see moecomm.ranks.session.Session."""

    device: torch.device
    context: _native.Context
    reading = threading.RLock()  # of the place in the control memory; close() takes it, too, and a signal handler may
    _window: windows.Window | None
    _peers: GpuPeers
    _closed: bool
    _counters_at: int  # offset of room for them in the control memory

    def capturing(self) -> bool:
        raise NotImplementedError

    def counters(self) -> torch.Tensor:
        """See Session."""
        assert self._window is not None
        layout = self.context.window
        return cuda_driver.int64_at(self._window.address + layout.counters, nbytes(layout) // 8, self.device)

    def read_counters(self) -> bytes | None:
        """See Session.  A capture of this thread must not see the copy."""
        with self.reading:
            if self._closed or self._window is None or self.capturing():
                return None
            layout = self.context.window
            address = self._window.address + layout.counters
            return self._peers.peek(self._counters_at, address, nbytes(layout), _PEEK_S)
