"""The NIC of each GPU, which connects domains, described by four numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan

from moecomm.errors import BadInput

SOURCES = {
    "gbs": "NVIDIA ConnectX-7 user manual: one port of NDR 400 Gb/s; line rate, nothing taken off for headers",
    "latency_us": "GPU-Initiated Networking for NCCL, arXiv:2511.15076: a round trip of a small put in 16.7 us (GDAKI)",
    "mega_messages": "NVIDIA ConnectX-6 user manual: 215 million messages a second; for ConnectX-7 none was found",
    "efficiency": "moecomm_bench/simulate/h200.json, `nic`: fitted to published times of libraries whose GPUs post to "
    "ConnectX-7; headers, congestion, incast and slow ranks together",
}


@dataclass(frozen=True)
class ModelNic:
    """The NIC of one GPU, in one direction. SOURCES names the origin of the defaults.

    Attributes:
        gbs: line rate, 1e9 bytes per second; may be infinite.
        latency_us: from a put with a signal in one kernel until the kernel that waits for it sees it.
        mega_messages: 1e6 puts and signals per second; may be infinite.
        efficiency: the share of the line rate that rows reach; `moecomm simulate fit` writes it.
    """

    gbs: float = 50.0
    latency_us: float = 16.7 / 2
    mega_messages: float = 215.0
    efficiency: float = 1.0

    def check(self) -> None:
        """Raise BadInput if a value is out of range."""
        for name, value in (("nic_gbs", self.gbs), ("nic_mega_messages", self.mega_messages)):
            if isnan(value) or value <= 0:
                raise BadInput(name, value, "more than 0")
        if not 0 < self.efficiency <= 1:
            raise BadInput("nic_efficiency", self.efficiency, "more than 0, at most 1")
        if not 0 <= self.latency_us < inf:
            raise BadInput("nic_latency_us", self.latency_us, "0 or more")

    def us(self, sent: float, messages: float) -> float:
        """Return the microseconds of `sent` bytes in `messages` messages without latency: the slower of both limits."""
        return max(sent / (self.gbs * self.efficiency) / 1e3, messages / self.mega_messages)
