"""Sizes that all ranks of a Window must agree on, compared once when it opens."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from moecomm import _native
from moecomm.core.group import Rendezvous
from moecomm.core.protocol import MAX_HOST_RANKS, MAX_RANKS
from moecomm.core.validation import is_integer
from moecomm.errors import BadInput, Mismatch

VERSION = 2  # of the layout in csrc/window/window.h
MAX_SIGNALS = _native.constants()["max_signals"]
_MOST_BYTES = 1 << 46
_MEMORY = ("memory of the Window's own", "torch's symmetric memory")
_PACKED = "<4q16s"


@dataclass(frozen=True)
class WindowSettings:
    """Sizes that a caller has asked for."""

    ranks: int
    nbytes: Any
    signals: Any
    torch_memory: bool  # adopted from torch's symmetric memory, or allocated there
    backend: str

    def agree(self, group: Rendezvous) -> None:
        """Compare with the other ranks.  Collective.

        Raises:
            Mismatch: on every rank, with the first field in which ranks differ.
            BadInput: at once, for a field that is no number.
        """
        names = ("version", "memory", "nbytes", "signals")
        mine = (VERSION, int(self.torch_memory), self.nbytes, self.signals)
        for name, value in zip(names, mine, strict=True):
            if not (is_integer(value) and -(1 << 63) <= value < 1 << 63):
                raise BadInput(name, repr(value), "a whole number, of at most 64 bits")
        packed = struct.pack(_PACKED, *map(int, mine), self.backend.encode())
        for rank, theirs in enumerate(group.all_gather(packed)):
            *numbers, backend = struct.unpack(_PACKED, theirs)
            for name, ours, other in zip(names, mine, numbers, strict=True):
                if ours != other:
                    if name == "memory":
                        ours, other = _MEMORY[bool(ours)], _MEMORY[bool(other)]
                    raise Mismatch(name, ours, other, rank)
            if (name := backend.rstrip(b"\0").decode(errors="replace")) != self.backend:
                raise Mismatch("backend", self.backend, name, rank)

    def check(self) -> None:
        """Raise BadInput for a value that can't be used.  Called after agree(), so that all ranks raise alike."""
        if not 1 <= self.nbytes <= _MOST_BYTES:
            raise BadInput("nbytes", self.nbytes, f"1 to {_MOST_BYTES}")
        if not 1 <= self.signals <= MAX_SIGNALS:
            raise BadInput("signals", self.signals, f"1 to {MAX_SIGNALS}")
        most = MAX_HOST_RANKS if self.backend == "host" else MAX_RANKS
        if not 1 <= self.ranks <= most:
            raise BadInput("group", f"{self.ranks} ranks", f"1 to {most}, which backend {self.backend!r} connects")
