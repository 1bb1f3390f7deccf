"""Reach: how the ranks of a session access each other's windows, the difference between the GPU backends."""

from __future__ import annotations

from typing import Protocol

import torch

from moecomm.backends import windows
from moecomm.ranks.group import Rendezvous


class Layout(Protocol):
    """The sizes of a window that its maker must know: WindowLayout of csrc/protocol/layout.h, or Extent of a Window."""

    @property
    def bytes(self) -> int:
        """Bytes of all."""
        ...

    @property
    def signals(self) -> int:
        """Offset of the signals that links write, which end where `counters` begin."""
        ...

    @property
    def counters(self) -> int:
        """Offset of the counters, which end where `staging` begins."""
        ...

    @property
    def staging(self) -> int:
        """Offset from which on memory can be released."""
        ...


class Reach:
    """Ways of a session's kernels to their peers.  Made collectively, ahead of the window.  This class: lsa.

    Attributes:
        backend: its name.
        near: whether every GPU must load from and store to every other; a class attribute, known before one is made.
        domain_ranks: neighbouring ranks that do: Shape.domain_ranks; 0: all.
        transport: how kernels of rounds reach their peers: see moecomm.gpu.linking.
        shim: what kernels that put are linked with, whether rounds have such or not; empty: nothing puts.
        link: Context.link, once the window is open.
        linger_s: how long a session that closes waits for the others to close.
        most_blocks: of a launch, so that what its warps put at a time fits the queues.
        more: addresses behind a window, for extensions; a session sets it before there is a window.
        least_chunks: (tokens, tokens of a chunk): a rank with so many tokens or more signals so many together at least.
    """

    backend = "lsa"
    near = True
    domain_ranks = 0
    transport = "lsa"
    shim = ""
    link = 0
    linger_s = 0.0
    most_blocks = 1 << 30
    more = 0
    least_chunks: tuple[tuple[int, int], ...] = ()

    def __init__(
        self,
        ranks: Rendezvous,
        peers: list[windows.Peer],
        device: torch.device,
        timeout_s: float,
        domain_ranks: int,
    ) -> None:
        """`domain_ranks`: what the Buffer was asked for; 0: whatever loads and stores reach."""
        self.ranks, self.peers, self.device, self.timeout_s = ranks, peers, device, timeout_s
        if ranks.ranks > 1:
            self._connect(domain_ranks)

    def _connect(self, domain_ranks: int) -> None:
        """Prepare the backend before there is a window.  Collective."""

    @property
    def puts(self) -> bool:
        """Return whether rounds put rows to ranks of other domains through a library."""
        return self.transport != "lsa" and self.transport == self.shim

    def watch(self, abort_word: int) -> None:
        """End the waits of a session when the library reports a peer as lost; 0: stop that."""

    def ignore(self, rank: int, ignored: bool) -> None:
        """Stop ending waits when the library reports this peer as lost; False: end them again."""

    def losses(self) -> dict[int, str]:
        """Return the peers that the library has reported as lost, and why; this rank's number: a local failure."""
        return {}

    def open_window(self, layout: Layout) -> windows.Window:
        """Open windows of this layout, not zeroed.  Collective, once.  A failure leaves nothing behind.

        Raises:
            NoRoom, Unsupported: on every rank alike.
        """
        return windows.open_window(
            *(self.ranks, self.peers, layout.bytes, self.device, self.timeout_s),
            resident=layout.staging,
            more=self.more,
        )
