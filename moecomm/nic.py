"""Whether this machine has a network card that GPUs can put through."""

from __future__ import annotations

from pathlib import Path


def has_rdma() -> bool:
    """Whether an RDMA NIC (InfiniBand, RoCE) is here."""
    return any(Path("/sys/class/infiniband").glob("*"))
