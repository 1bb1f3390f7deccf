"""Search for a network card that GPUs can put through."""

from __future__ import annotations

from pathlib import Path

DEVICES = Path("/sys/class/infiniband")
_LINKS = ("InfiniBand", "Ethernet")  # the second is RoCE


def has_rdma() -> bool:
    """Return whether there is a port that NCCL's InfiniBand transport, and so its GIN, would take.

    What counts is an ACTIVE port whose link is InfiniBand or Ethernet.  A port that is down does not, nor one of EFA,
    whose link is neither.  Whether this process may open the device, in a container say, is not looked at.
    """
    return any(_state(port) == "ACTIVE" and _read(port / "link_layer") in _LINKS for port in DEVICES.glob("*/ports/*"))


def _state(port: Path) -> str:
    """Return the state of a port: "ACTIVE" of "4: ACTIVE"."""
    return _read(port / "state").rpartition(": ")[2]


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # a device may go while we look
        return ""
