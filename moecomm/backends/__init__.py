"""The contract of a backend: how ranks reach each other's memory, and who runs a round.

A backend opens a Session: every rank's window mapped where it can be loaded from and stored to (`context.peers`, 0
where it can't),
an arena that hands out pieces of our own window, and an executor for the two operations.  Nothing else of moecomm knows
whether ranks are CPU threads, processes or GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch

from moecomm import _native
from moecomm.backends.collective import NoRoom, all_or_none
from moecomm.core.choices import BackendName
from moecomm.core.rendezvous import Rendezvous
from moecomm.errors import BadInput, Unsupported

_ON_GPUS = ("lsa", "gin", "nvshmem")  # in the order that "auto" prefers
NAMES = (*_ON_GPUS, "host")
_ASKED_FOR = "asked for"


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


def load(name: str) -> Backend:
    """The backend of that name."""
    if name not in NAMES:
        raise BadInput("backend", repr(name), f"auto, {', '.join(NAMES)}")
    return importlib.import_module(f"moecomm.backends.{name}")


def missing(name: str) -> str:
    """Empty if the backend of that name can run here; else the first thing missing, as a sentence."""
    return load(name).missing()


def choose(name: str, device: torch.device | None) -> tuple[BackendName, str]:
    """The backend for `name` ("auto" or one of NAMES) and why.  Raises Unsupported when a backend asked for by name
    can't run.

    A device that is asked for decides: CPU tensors travel over `host`, CUDA tensors over the first GPU backend that
    can run.
    """
    if name != "auto":
        if reason := missing(name):
            raise Unsupported(f"backend {name!r} can't run here: {reason}")
        return cast("BackendName", name), _ASKED_FOR
    if device is not None and device.type == "cpu":
        return "host", "device is the CPU"
    if not (reason := missing("lsa")):  # what it wants of a machine all GPU backends want
        return "lsa", "GPUs reach each other by load and store"
    if device is not None and device.type == "cuda":
        raise Unsupported(f"no GPU backend can run here: lsa: {reason}")
    return "host", f"no GPU backend can run here (lsa: {reason})"


def open_session(
    name: str, why: str, ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float
) -> tuple[Session, str]:
    """Collective: a session of what choose() has found, and why it is of that backend.

    Where no rank has asked for it by name, and it can't reach between these ranks, the next one is tried.

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: none works; names what each lacks.
    """
    if name not in _ON_GPUS or b"\1" in ranks.all_gather(bytes([why == _ASKED_FOR])):
        return load(name).open(ranks, shape, device, timeout_s), why
    reasons: list[str] = []
    for candidate in _ON_GPUS:
        try:
            with all_or_none(ranks):
                if reason := missing(candidate):
                    raise Unsupported(reason)
            session = load(candidate).open(ranks, shape, device, timeout_s)
        except NoRoom:
            raise
        except Unsupported as error:
            reasons.append(f"{candidate}: {error}")
            continue
        return session, f"what comes before it can't reach all ranks ({'; '.join(reasons)})" if reasons else why
    raise Unsupported(f"no GPU backend can run here: {'; '.join(reasons)}")
