"""GPUs of several NVLink domains, and the times of operators on them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from moecomm_bench.simulate.dlrm.gpu import Gpu, together
from moecomm_bench.simulate.dlrm.shape import Lookups
from moecomm_bench.simulate.nic import ModelNic

PIECES = 2 * 132 * 32  # of a fused lookup: two for each warp of the grid (moecomm/overlap/gpu.py); a put each
# How often a sum passes through memory on its way to a peer.  Over NVLink: stored in the peer's staging, read there,
# stored in the result.  Through a NIC also staged for the put, and read by the NIC.
NVLINK_PASSES, NIC_PASSES = 3, 5


@dataclass(frozen=True)
class Cluster:
    """`domains` NVLink domains of `ranks` GPUs, each with a NIC. With one domain the NIC is not used."""

    gpu: Gpu
    nic: ModelNic
    domains: int
    ranks: int = 1

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.domains * self.ranks

    def _near(self, sent: float) -> float:
        return sent * (self.ranks - 1) / self.gpus

    def _far(self, sent: float) -> float:
        return sent * (self.gpus - self.ranks) / self.gpus

    @property
    def _latency_us(self) -> float:
        return self.nic.latency_us if self.domains > 1 else 0.0

    def fused_us(self, lookups: Lookups) -> float:
        """Return the time of embedding_all_to_all in one kernel."""
        return self._overlapped_us(lookups, lookups.out_bytes)

    def fused_update_us(self, lookups: Lookups) -> float:
        """Return the time of a kernel that applies gradients of bags as they arrive; moecomm has none."""
        return self._overlapped_us(lookups, _updated_bytes(lookups))

    def _overlapped_us(self, lookups: Lookups, moved: float) -> float:
        bags, sent = self.gpu.bags, lookups.out_bytes
        passed = (NVLINK_PASSES - 1) * self._near(sent) + (NIC_PASSES - 1) * self._far(sent)
        memory_us = bags.memory_us(lookups, moved + passed)
        return bags.fixed_us + together(memory_us, *self._wires_us(sent)) + self._latency_us

    def wire_us(self, lookups: Lookups) -> float:
        """Return the time for which a fused kernel occupies its links."""
        return max(self._wires_us(lookups.out_bytes))

    def _wires_us(self, sent: float) -> tuple[float, float]:
        """Return the times of NVLink and of the NIC for the pieces of `sent` bytes of sums."""
        far = self._far(sent)
        return self._near(sent) / self.gpu.bags.wire_gbs / 1e3, self.nic.us(far, PIECES * far / sent)

    def all_to_all_us(self, sent: float) -> float:
        """Return the time of NCCL's all-to-all of a tensor of `sent` bytes; 0 on one GPU."""
        if self.gpus == 1:
            return 0.0
        over = self.gpu.all_to_all
        links_us = max(self._near(sent) / over.gbs / 1e3, self.nic.us(self._far(sent), self.gpus - self.ranks))
        return over.fixed_us + links_us + self._latency_us

    def copy_us(self, moved: float) -> float:
        """Return the time of torch's copy of `moved` bytes before an all-to-all."""
        return 2 * moved / self.gpu.all_to_all.copy_gbs / 1e3

    def all_reduce_us(self, reduced: float) -> float:
        """Return the time of NCCL's all-reduce of `reduced` bytes; 0 on one GPU.

        A ring inside domains and one between them work at the same time. The latency is that of a tree up and down.
        """
        if self.gpus == 1:
            return 0.0
        over = self.gpu.all_reduce
        near_us = 2 * (self.ranks - 1) / self.ranks * reduced / over.gbs / 1e3
        far_us = self.nic.us(2 * (self.domains - 1) / self.domains * reduced / self.ranks, 0)
        return over.fixed_us + max(near_us, far_us) + 2 * ceil(log2(self.domains)) * self._latency_us

    def update_us(self, lookups: Lookups) -> float:
        """Return the time of adding each bag's gradient to the rows of the bag: every row is read and written."""
        bags = self.gpu.bags
        return bags.fixed_us + bags.memory_us(lookups, _updated_bytes(lookups))


def _updated_bytes(lookups: Lookups) -> int:
    """Return the bytes of an update beside the rows that it reads: rows written, and gradients of bags."""
    return lookups.count * lookups.row_bytes + lookups.out_bytes
