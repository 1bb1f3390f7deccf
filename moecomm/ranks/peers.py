"""Peers: memory of every rank, mapped here, and what ends waits for a rank that is gone.

It is what a Buffer's Session and a Window are built on.  HostPeers and GpuPeers implement it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moecomm.ranks.pages import Pages


class Peers(Protocol):
    """Zeroed memory of the same size on every rank.  Made collectively; close() is local and idempotent."""

    name: str  # of the backend, with the kind of window where there are several: "host", "lsa/vmm"
    device: torch.device
    rank: int
    addresses: list[int]  # by rank, of its memory as this rank reaches it; 0: it does not
    record: int  # address of a FailureRecord that the host reads
    abort_host: int  # address of the abort word that the host writes
    in_process: bool  # ranks are threads of this process
    pages: Pages | None  # None: ranks are threads, or on several hosts

    @property
    def nbytes(self) -> int:
        """Memory that this rank holds."""
        ...

    def owner(self, rank: int) -> object:
        """Return the object that keeps the memory of a rank mapped here."""
        ...

    def abort(self, cause: int, culprit: int) -> None:
        """End every wait of this rank."""
        ...

    def dead_peers(self) -> dict[int, str]:
        """Return the ranks known to be gone, and why."""
        ...

    def close(self) -> None:
        """Announce that this rank may end, stop watching the others, and drop their memory."""
        ...
