"""Tape: the calls of one rank that a recorder has seen, on the CPU.

Tensors on GPUs are copied to pinned memory behind the work of the current stream. The host does not wait for them; a
later call takes over the copies that have arrived.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch

from moecomm.errors import Unsupported
from moecomm.rounds.rounds import Rounds
from moecomm.routing.recorded import id_dtype

_PIECE = 4 << 20  # bytes
_ALIGNMENT = 16


class _Copy(NamedTuple):
    """A call whose tensors are on their way to the CPU."""

    layer: int
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    done: torch.cuda.Event


class Tape:
    """The calls of one rank.

    Args:
        rank, ranks: the rank, and how many there are.
        experts: ids that are neither -1 nor below this make the call invalid.

    Attributes:
        layers: names, in order of their first call.
        tokens: seen so far, those of invalid calls too.
        invalid: calls with ids of no expert, which are left out.
        full: True once nothing more is to be recorded.
    """

    def __init__(self, rank: int, ranks: int, experts: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.layers: dict[str, int] = {}
        self.tokens = self.invalid = 0
        self.full = False
        self._experts = experts
        self._steps: list[int] = []  # calls so far, by layer
        self._records: list[tuple[int, int, int]] = []
        self._ids: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._copies: deque[_Copy] = deque()
        self._pinned = _PinnedMemory()
        self._buffers: weakref.WeakKeyDictionary[Rounds, tuple[int, int]] = weakref.WeakKeyDictionary()

    def add(self, layer: str, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> None:
        """Add a call. Raises Unsupported in the capture of a CUDA graph, which would record one replay of many."""
        if topk_idx.is_cuda:
            with torch.cuda.device(topk_idx.device):
                if torch.cuda.is_current_stream_capturing():
                    raise Unsupported(
                        f"recording the routing of {layer!r} in the capture of a CUDA graph: run it eagerly"
                    )
                self._begin(layer, topk_idx, topk_weights)
            self._take_arrived()
            return
        self._take(self._place(layer), topk_idx, topk_weights)
        self.tokens += len(topk_idx)

    def turn_of(self, rounds: Rounds) -> tuple[int, int]:
        """Count a dispatch of a Buffer: the number of the Buffer on this rank, and of its earlier dispatches."""
        number, calls = self._buffers.get(rounds, (len(self._buffers), 0))
        self._buffers[rounds] = (number, calls + 1)
        return number, calls

    def finish(self, topk: int, weights: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Wait for copies; returns records, topk_idx and topk_weights as a file has them."""
        while self._copies:
            self._copies[0].done.synchronize()
            self._take_arrived()
        none = torch.empty(0, topk, device="cpu")
        records = torch.tensor(self._records, dtype=torch.int32, device="cpu").view(-1, 3)
        ids = torch.cat([none.to(id_dtype(self._experts)), *self._ids])
        return records, ids, torch.cat([none.float(), *self._weights]) if weights else None

    def _place(self, layer: str) -> int:
        if layer not in self.layers:
            self.layers[layer] = len(self.layers)
            self._steps.append(0)
        return self.layers[layer]

    def _begin(self, layer: str, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> None:
        ids = self._pinned.copy_of(topk_idx)
        weights = None if topk_weights is None else self._pinned.copy_of(topk_weights)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()  # on the current stream, behind the copies
        self._copies.append(_Copy(self._place(layer), ids, weights, done))
        self.tokens += len(topk_idx)

    def _take_arrived(self) -> None:
        while self._copies and self._copies[0].done.query():  # type: ignore[no-untyped-call]
            copy = self._copies.popleft()
            self._take(copy.layer, copy.topk_idx, copy.topk_weights)

    def _take(self, place: int, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> None:
        if topk_idx.numel() and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < self._experts:
            self.invalid += 1
            return
        self._records.append((place, self._steps[place], len(topk_idx)))
        self._steps[place] += 1
        self._ids.append(topk_idx.to(id_dtype(self._experts), copy=True))
        if topk_weights is not None:
            self._weights.append(topk_weights.to(torch.float32, copy=True))


class _PinnedMemory:
    """Pinned memory for copies, taken in large pieces: allocating some may wait for the device.

    torch keeps a piece that all copies have left, and gives it out again.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, which holds the values once the current stream is there."""
        room = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._left) < room:
            self._left = torch.empty(max(room, _PIECE), dtype=torch.uint8, device="cpu", pin_memory=True)
        place, self._left = self._left[: tensor.nbytes], self._left[room:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
