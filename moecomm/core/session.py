"""The contract of a backend: how ranks reach each other's memory, and who runs a round.

A backend opens a Session: the window of every rank, mapped where this rank can load from it and store to it
(`context.peers`, 0 where it can't); an arena that hands out blocks of this rank's window; and an executor for dispatch
and combine.  No other module knows whether ranks are CPU threads, processes or GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from moecomm import _native
from moecomm.core.group import Rendezvous


class Schedule(NamedTuple):
    """How a round is run."""

    workers: int  # threads (host) or blocks (GPU: one an SM)
    chunk_tokens: int  # tokens that a flag speaks of: 1, 2, 4, 8, 16 or 32.  A combine has that of its dispatch


class Session(Protocol):
    """One rank's open windows and executor.  Made by Backend.open, collectively."""

    name: str  # of the backend, with the kind of window where there are several: "host", "lsa/vmm"
    device: torch.device
    context: _native.Context  # peers, shape, window, rank, record, abort_host: filled; timeout_ns is the Buffer's
    arena: _native.Arena  # over the heap of our window; offsets are those of the window
    nbytes: int  # memory this rank holds for the Buffer
    owner: object  # what must outlive every tensor in the window
    reduced_rows_in_heap: bool  # CombineArgs.reduced_rows: reduced rows may have a place each
    alone: bool  # GPUs: no other rank is on ours, so kernels may be launched while those before them end

    @property
    def most_blocks(self) -> int:
        """GPUs: blocks that wait for others, of this rank at once."""
        ...

    def dispatcher(self, args: _native.DispatchArgs) -> Callable[[_native.DispatchArgs], None]:
        """What runs (host), or enqueues on the current stream (GPUs), dispatches like this one, of as many tokens:
        addresses, room, chunks and workers may differ.  Whatever has to be compiled or loaded is."""
        ...

    def combiner(self, args: _native.CombineArgs) -> Callable[[_native.CombineArgs], None]:
        """The same for combines.  All their `y` lie in our window if this one does, and else none."""
        ...

    def count_rejected(self) -> None:
        """Adds 1 to State::rejected of this rank's window, in the order of the rounds; GPUs: enqueues that on the
        current stream, in a capture as part of the graph."""
        ...

    def order(self) -> None:
        """GPUs: what is enqueued on the current stream from now on starts after the last round, as rounds do."""
        ...

    def synchronize(self) -> None:
        """Waits for every round enqueued so far; returns in time even when one fails, because rounds have deadlines."""
        ...

    def capturing(self) -> bool:
        """Whether what is enqueued now becomes part of a graph."""
        ...

    def schedule(self, op: str, *, num_tokens: int, layout: str, num_sms: int | None) -> Schedule:
        """How a "dispatch" or "combine" of so many tokens is run; `num_sms` is the caller's choice of workers."""
        ...

    def abort(self, cause: int, culprit: int) -> None:
        """Makes every wait of this rank end."""
        ...

    def dead_peers(self) -> dict[int, str]:
        """Ranks that are known to be gone, and why; our own: something that rounds need is broken here."""
        ...

    def close(self) -> None:
        """Local and idempotent: peers that still wait for this rank learn that it left.  Outputs that are still
        referenced keep their memory until they are gone."""
        ...


class Backend(Protocol):
    """A module `moecomm.backends.<name>` with these functions."""

    def missing(self) -> str:
        """Empty if this backend can run here; else the first thing that is missing, as a sentence a user can act on."""
        ...

    def ring_tokens(self, ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
        """`Shape.ring_tokens`: how many rows of each rank wait in a window at a time to be brought home."""
        ...

    def packet_bytes(self, ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
        """`Shape.packet_bytes`: room for the packets that one rank sends another in one round."""
        ...

    def direct_bytes(self, ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
        """The same with several domains: room for what one rank puts straight to one of another domain in one round."""
        ...

    def open(self, ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float) -> Session:
        """Collective.  Raises Unsupported if it can't run here."""
        ...
