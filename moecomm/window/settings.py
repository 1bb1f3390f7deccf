"""Sizes that all ranks of a Window must agree on, compared once when it opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moecomm import _native
from moecomm.base.processes import memory_bytes
from moecomm.base.protocol import MAX_HOST_RANKS, MAX_RANKS
from moecomm.errors import BadInput
from moecomm.ranks.opening import Opening
from moecomm.ranks.settings import check_numbers

VERSION = 2  # of the layout in csrc/window/window.h
MAX_SIGNALS = _native.constants()["max_signals"]
_MOST_BYTES = 1 << 46


@dataclass(frozen=True)
class WindowSettings:
    """Sizes that a caller has asked for."""

    ranks: int
    nbytes: Any
    signals: Any
    backend: str

    def agree(self, ranks: Opening) -> None:
        """Compare with the other ranks.  Collective.

        Raises:
            Mismatch: on every rank, with the first field in which ranks differ.
            BadInput: at once, for a field that is no number.
        """
        sizes: dict[str, Any] = {"nbytes": self.nbytes, "signals": self.signals}
        check_numbers(sizes, sizes)
        numbers = dict(zip(sizes, map(int, sizes.values()), strict=True))
        ranks.compare({"version": VERSION, **numbers, "backend": self.backend})

    def check(self) -> None:
        """Raise BadInput for a value that can't be used.  Called after agree(), so that all ranks raise alike."""
        if not 1 <= self.nbytes <= _MOST_BYTES:
            raise BadInput("nbytes", self.nbytes, f"1 to {_MOST_BYTES}")
        if self.backend == "host" and self.nbytes > (there := memory_bytes()):
            raise BadInput("nbytes", self.nbytes, f"at most the {there} bytes of this machine")
        if not 1 <= self.signals <= MAX_SIGNALS:
            raise BadInput("signals", self.signals, f"1 to {MAX_SIGNALS}")
        most = MAX_HOST_RANKS if self.backend == "host" else MAX_RANKS
        if not 1 <= self.ranks <= most:
            raise BadInput("group", f"{self.ranks} ranks", f"1 to {most}, which backend {self.backend!r} connects")
