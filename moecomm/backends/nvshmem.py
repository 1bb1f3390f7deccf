"""NVSHMEM: a symmetric heap, loads and stores among ranks that share memory, put and signal to all others."""

from __future__ import annotations

import torch

from moecomm import _native
from moecomm.backends import gpu_peers, lsa, nvshmem_runtime, windows
from moecomm.backends.reach import Layout, Reach
from moecomm.backends.windows import local
from moecomm.errors import Unsupported
from moecomm.ranks.collective import all_or_none
from moecomm.ranks.group import Rendezvous

ring_tokens, packet_bytes, direct_bytes = lsa.ring_tokens, lsa.packet_bytes, lsa.direct_bytes


def missing() -> str:
    """Return "" if NVSHMEM can be used here; else the first thing missing, as a sentence."""
    return lsa.missing() or nvshmem_runtime.missing()


class NvshmemWindow:
    """A Window in the symmetric heap of NVSHMEM."""

    def __init__(self, kind: str, block: nvshmem_runtime.Block, peers: list[int]) -> None:
        self.kind, self.peers = kind, peers
        self.owner: object = block
        self.address, self.nbytes = block.address, block.nbytes

    def close(self) -> None:
        """Nothing: peers' memory is NVSHMEM's, and ours is given up with the last reference to `owner`."""


class NvshmemReach(Reach):
    """The one NVSHMEM of this process; its team of shared memory is a domain, or consists of several.

    If the team has all ranks, their windows are mapped everywhere, and domains are parts of one, as those of lsa are:
    kernels store into them by bulk copies.  If not, kernels reach all other domains by the library.
    """

    backend = "nvshmem"
    near = False
    shim = "nvshmem"

    def _connect(self, domain_ranks: int) -> None:
        ranks = self.ranks
        with all_or_none(ranks):
            if ranks.in_process:
                raise Unsupported("ranks are threads of one process, which has one NVSHMEM; it wants a process a rank")
        nvshmem_runtime.start(ranks, self.device)
        with all_or_none(ranks):
            scaleup_ranks = nvshmem_runtime.scaleup_ranks()
        sizes = [data[0] for data in ranks.all_gather(bytes([scaleup_ranks]))]
        with all_or_none(ranks):
            if len(set(sizes)) != 1 or ranks.ranks % sizes[0]:
                raise Unsupported(f"ranks share memory with {sizes} ranks: domains must have the same size")
            if domain_ranks != 0 and sizes[0] % domain_ranks:
                raise Unsupported(f"domain_ranks={domain_ranks}: {sizes[0]} neighbouring ranks share memory")
        if (near := domain_ranks or sizes[0]) < ranks.ranks:
            self.domain_ranks = near
        if sizes[0] < ranks.ranks:
            self.transport = self.shim

    def open_window(self, layout: Layout) -> windows.Window:
        ranks = self.ranks
        if ranks.ranks == 1:  # nobody to reach
            return local.open_window(ranks, layout.bytes, self.device, resident=layout.staging)
        block = nvshmem_runtime.take(ranks, layout.bytes, self.device)
        size = self.domain_ranks if self.puts else ranks.ranks
        with all_or_none(ranks):
            peers = []
            for peer in range(ranks.ranks):
                near = peer // size == ranks.rank // size
                peers.append(nvshmem_runtime.address_of(block, peer) if near else 0)
                if near and not peers[-1]:
                    raise Unsupported(
                        f"ranks {ranks.rank} and {peer} do not share memory, though both are in NVSHMEM's team of those"
                    )
        return NvshmemWindow("network" if self.puts else "p2p", block, peers)


def open(  # noqa: A001
    ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float
) -> lsa.LsaSession:
    """Collective: see moecomm.ranks.session.Backend."""
    return lsa.open_session(ranks, shape, device, timeout_s, NvshmemReach, missing())


def open_peers(ranks: Rendezvous, nbytes: int, device: torch.device | None, timeout_s: float) -> gpu_peers.GpuPeers:
    """Open memory of all ranks, without a session.  Collective: see moecomm.ranks.session.Backend."""
    return gpu_peers.open_peers(ranks, nbytes, device, timeout_s, NvshmemReach, missing())
