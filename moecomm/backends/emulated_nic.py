"""An emulated NIC between the domains of an lsa Buffer, for tests and benchmarks: csrc/transport/nic.cuh.

MOECOMM_NIC selects it.  Kernels are the same; their puts and signals keep to a bandwidth, a latency and a rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moecomm import config
from moecomm.errors import BadInput

_CHANNELS = 16  # kNicChannels
_LIMITS = ((0.001, 10_000.0), (0.0, 10_000.0), (0.001, 1000.0))


@dataclass(frozen=True)
class Nic:
    """The figures of a NIC in one direction; the defaults are about those of 400 Gb/s."""

    gbs: float = 50.0
    latency_us: float = 3.0
    mega_messages: float = 10.0  # a second

    def __str__(self) -> str:
        return f"emulated NIC of {self.gbs:g} GB/s, {self.latency_us:g} us, {self.mega_messages:g} M messages/s"


def parse(argument: str, text: str) -> Nic:
    """Return the NIC of "GB/s,us,M/s", such as "50,3,10"; numbers may be left out at the end.

    Raises:
        BadInput: it is something else; names `argument`.
    """
    try:
        numbers = [float(word) for word in text.split(",")]
        fits = len(numbers) <= len(_LIMITS) and all(
            low <= number <= high for number, (low, high) in zip(numbers, _LIMITS, strict=False)
        )
    except ValueError:
        fits = False
    if not fits:
        raise BadInput(argument, repr(text), "GB/s (0.001 to 10000), us (0 to 10000), M messages/s (0.001 to 1000)")
    return Nic(*numbers)


def asked() -> Nic | None:
    """Return the NIC that MOECOMM_NIC asks for, if any.  Raises BadInput."""
    text = config.emulated_nic()
    return None if text is None else parse("MOECOMM_NIC", text)


def link(nic: Nic | None, windows: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int64 words for Context.link: the windows of all ranks and, of a NIC, NicLink with zeros behind it."""
    if nic is None:
        return torch.tensor(windows, dtype=torch.int64, device=device)
    rates = [round(1000 / nic.gbs), round(1e6 / nic.mega_messages), round(1000 * nic.latency_us)]
    state = [0] * (2 + _CHANNELS * len(windows))
    return torch.tensor([*windows, *rates, *state], dtype=torch.int64, device=device)
