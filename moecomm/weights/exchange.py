"""Tensors of experts at one place in a Window of all ranks: what every exchange of weights reads and writes.

The tensors of a rank lie one after the other.  Who reads what from whom is the caller's business, and so is the order:
a rank writes, all ranks come to a barrier of the Window, others read, and another barrier lets it write again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moecomm.base.weak import WeakTable
from moecomm.rounds.rounds import Part, Rounds
from moecomm.window import Window

_ALIGNMENT = 256  # bytes; of a tensor in the Window
Kind = tuple[Sequence[int], torch.dtype]  # shape and dtype of a tensor of one expert


@dataclass(frozen=True, eq=False)
class SharedTensor:
    """A tensor `[rows, ...]` of each rank, `offset` bytes from the begin of its memory; ranks have one name for it."""

    window: Window
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    name: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def of(self, rank: int) -> torch.Tensor:
        """Return the tensor of a rank.  Raises Closed."""
        return self.window.tensor(self.shape, self.dtype, rank=rank, offset=self.offset)


class SharedTensors(Part):
    """Tensors of ExpertWeights of a Buffer, by the address of this rank's."""

    def __init__(self) -> None:
        self.by_address: WeakTable[int, SharedTensor] = WeakTable()


class Exchange:
    """A Window with `rows` experts of each rank.  Opening it is collective.

    Args:
        rounds: of the Buffer whose ranks exchange weights.
        rows: experts of a rank that its tensors have room for.
        kinds: of the tensors, by name.
        more: bytes behind the tensors, which are the caller's.

    Attributes:
        nbytes: of the tensors of a rank.

    Raises:
        As Window.
    """

    def __init__(self, rounds: Rounds, rows: int, kinds: Mapping[str, Kind], more: int = 0) -> None:
        places: dict[str, int] = {}
        self.rows, self.nbytes = rows, 0
        for name, (shape, dtype) in kinds.items():
            places[name] = self.nbytes
            self.nbytes += -(-rows * math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        about: dict[str, Any] = {"backend": rounds.settings.backend, "device": rounds.device}
        members = rounds.members
        self.window = Window(members.group, self.nbytes + more, **about, timeout_s=members.timeout_s)
        self.tensors = {
            name: SharedTensor(self.window, (rows, *shape), dtype, places[name], f"{name} at {places[name]}")
            for name, (shape, dtype) in kinds.items()
        }
        self._of_ranks: dict[int, list[torch.Tensor]] = {}  # each is made once: that takes longer than a copy

    def of(self, rank: int) -> list[torch.Tensor]:
        """Return the tensors of a rank.  Raises Closed, but not after they have been returned before."""
        if rank not in self._of_ranks:
            with torch.inference_mode(False):  # else they could be written in that mode alone
                self._of_ranks[rank] = [tensor.of(rank) for tensor in self.tensors.values()]
        return self._of_ranks[rank]

    def close(self) -> None:
        """Give the memory back.  Tensors that are still referenced stay valid."""
        self._of_ranks.clear()
        self.window.close()


def shown(kinds: Mapping[str, Kind]) -> dict[str, str]:
    """Return texts of tensors that ranks must pass alike, by argument."""
    return {
        "shapes": ", ".join(f"{name} {list(shape)}" for name, (shape, _) in kinds.items()),
        "dtype": ", ".join(f"{name} {dtype}" for name, (_, dtype) in kinds.items()),
    }
