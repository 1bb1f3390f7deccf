"""Limits that a user chooses, and the Buffers of a group, which all layers with the same sizes share."""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from moecomm.base.choices import BackendName, Quantize
from moecomm.buffer import Buffer
from moecomm.ranks.opening import gather
from moecomm.ranks.rendezvous import rendezvous
from moecomm.ranks.settings import Settings
from moecomm.rounds.call_count import CallCount

Key = tuple[int, torch.dtype, torch.device]  # columns of a token, and what and where it is


class Limits(NamedTuple):
    """Limits that a user chooses; alike on all ranks.

    Attributes:
        max_tokens: room for so many tokens a rank from the start; None: what the first dispatch has.  A rank that has
            more takes a larger Buffer, on all ranks together.
        max_rows: rows, a (token, expert) each, that this rank has room for; more is bad input on every rank.  None: 1.5
            times those of even routing, and more go in several rounds.  Not read where experts are padded to their
            capacity.
        window_bytes: see Buffer; None: two rounds of so many rows; three of padded experts.
        num_sms: see Buffer.dispatch.
        timeout_s: how long a rank waits for another, in seconds.  Ranks of a training job drift apart by whatever one
            of them does alone: writing a checkpoint, compiling.
        backend: see Buffer; None: "host" for tensors on the CPU, else "auto".
    """

    max_tokens: int | None = None
    max_rows: int | None = None
    window_bytes: int | None = None
    num_sms: int | None = None
    timeout_s: float = 600.0
    backend: BackendName | None = None


class Formats(NamedTuple):
    """Formats in which rows travel; None: as they are.  See moecomm.ops.dispatch and combine.

    Attributes:
        quantize: rows of a dispatch.
        grad_wire: gradients of the experts' results.
    """

    quantize: Quantize | None = None
    grad_wire: Quantize | None = None


PLAIN = Formats()


class Buffers:
    """Base of the objects that open the Buffers of a group.

    Args:
        group: a torch.distributed process group.
        num_experts: of all its ranks.
        topk: the most experts a token picks.
        limits: see Limits.
    """

    def __init__(self, group: Any, num_experts: int, topk: int, limits: Limits) -> None:
        self._group, self._ranks = group, rendezvous(group)
        self._num_experts, self._topk, self.limits = num_experts, topk, limits
        self.calls = CallCount()

    def _open(self, key: Key, tokens: int, window: Callable[[Settings], int | None]) -> Buffer:
        """Open a Buffer for as many tokens as any rank has.  Collective: every rank is here, in the same dispatch.

        Args:
            key: hidden size, dtype and device of the tokens.
            tokens: number of this rank's tokens.
            window: computes the window's bytes, unless the user chose them; None: Buffer's own choice.
        """
        hidden, dtype, device = key
        everybody = gather(self._ranks, struct.pack("<q", tokens), self.limits.timeout_s)
        most = max(int(struct.unpack("<q", theirs)[0]) for theirs in everybody)
        settings = Settings(self._ranks.ranks, hidden, self._num_experts, self._topk, most, dtype, "", None)
        chosen = self.limits.window_bytes
        buffer = Buffer(
            self._ranks,
            hidden=hidden,
            num_experts=self._num_experts,
            topk=self._topk,
            max_tokens=most,
            dtype=dtype,
            backend=self.limits.backend or ("host" if device.type == "cpu" else "auto"),
            device=device,
            timeout_s=self.limits.timeout_s,
            window_bytes=window(settings) if chosen is None else chosen,
        )
        self.calls.add(buffer.rounds)
        return buffer


B = TypeVar("B", bound=Buffers)
_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[tuple[Any, ...], Buffers] = weakref.WeakValueDictionary()


def shared(kind: type[B], group: Any, num_experts: int, topk: int, limits: Limits) -> B:
    """Return this process's Buffers of this kind for these arguments; shared as long as anything refers to it."""
    with _lock:
        key = (kind, id(group), num_experts, topk, limits)  # it keeps its group, so that the id stays its own
        found = _shared.get(key)
        if not isinstance(found, kind):
            found = _shared[key] = kind(group, num_experts, topk, limits)
        return found
