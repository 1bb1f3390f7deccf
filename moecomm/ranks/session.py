"""The contract of a backend: how ranks reach each other's memory, and who runs a round.

A backend opens a Session: the window of every rank, mapped where this rank can load from it and store to it
(`context.peers`, 0 where it can't), and an executor for dispatch and combine.  Other modules distinguish backends only
by whether a round is over when its call returns (`synchronous`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from moecomm import _native
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.pages import Pages
from moecomm.ranks.peers import Peers


class Schedule(NamedTuple):
    """Workers and chunks of a round."""

    workers: int  # threads (host) or blocks (GPU: one an SM)
    chunk_tokens: int  # tokens of a signal: 1, 2, 4, 8, 16 or 32.  A combine has that of its dispatch


class Heap(Protocol):
    """The memory of a window that rounds take blocks from."""

    def missing(self, nbytes: int) -> int:
        """Return the bytes that this rank's window lacks for a round of so many; 0: none."""
        ...

    def holds(self, offset: int) -> bool:
        """Return whether memory at this offset of the window is in use, or free for rounds.

        An interrupt may come after extend() or grow() and before their result is in use; then they return it again.
        """
        ...


class RowTables(Protocol):
    """Hashes of the rows that combines of CPU ranks move, of all ranks."""

    checks: _native.RowChecks

    def combine(self, args: _native.CombineArgs) -> None:
        """Run a combine whose rows are checked.  All ranks do."""
        ...


class Maskable(Protocol):
    """The part of a session with which ranks go on without others: see moecomm.membership.masking."""

    def last_round(self) -> int:
        """Return the number of the last round that has ended on this rank."""
        ...

    def begun(self) -> list[str]:
        """Return by rank the operation of the round that follows the last one here, or "" if it has not begun there."""
        ...

    def excluded(self) -> bool:
        """Return whether others have excluded this rank."""
        ...

    def exclude(self, rank: int) -> None:
        """End the waits of another rank, and let its rounds fail until it resumes.  No further rank learns of it."""
        ...

    def interrupt(self, rank: int) -> None:
        """End the round in which another rank waits for this one.  That rank raises Aborted."""
        ...

    def forget_interrupts(self) -> None:
        """Forget that others have interrupted this rank.  Called when no rank is in a round."""
        ...

    def resume(self, last_round: int, masked: Collection[int], agreement: int) -> set[int]:
        """Go on after this round without the masked ranks.  Forget the failure, and what failed rounds have left.

        Called when no rank that goes on is in a round.

        Args:
            last_round: its number.
            masked: ranks that take no part.
            agreement: its number, the same on all ranks that go on, and larger than before.

        Returns:
            Ranks that are lost, or whose puts may still arrive.  If there are any, all ranks agree again.
        """
        ...


class Session(Maskable, Protocol):
    """One rank's open windows and executor.  Made by Backend.open, collectively."""

    name: str  # of the backend, with the kind of window where there are several: "host", "lsa/vmm"
    device: torch.device
    context: _native.Context  # peers, shape, window, rank, record, abort_host: filled; timeout_ns is the Buffer's
    nbytes: int  # memory this rank holds for the Buffer
    extensible: int  # bytes at the end of Shape.heap_bytes that have no memory before extend()
    owner: object  # outlives every tensor in the window
    casts_formats: bool  # the executor casts rows to other formats than "fp8" on the way
    reduced_rows_in_heap: bool  # CombineArgs.reduced_rows: reduced rows may have a place each
    pages: Pages | None  # of these ranks, valid while the session is open; None: threads, or several hosts
    exclusive_gpu: bool  # GPUs: no other rank shares this GPU, so a kernel may be launched while its predecessor ends
    synchronous: bool  # a round is over when the call that runs it returns
    peers_read_weights: bool  # combine reads the weights of rows in this rank's window, so they have to be there

    @property
    def most_blocks(self) -> int:
        """GPUs: the most blocks of this rank that wait for peers at once."""
        ...

    def dispatcher(self, args: _native.DispatchArgs) -> Callable[[_native.DispatchArgs], None]:
        """Return the function that runs (host) or enqueues (GPUs) dispatches like this one, of as many tokens.

        Addresses, room, chunks and workers may differ.  Compiles and loads the kernels.  A _native.Runner also runs
        calls that Python does not look at: see csrc/bindings/known_calls.cpp.
        """
        ...

    def combiner(self, args: _native.CombineArgs) -> Callable[[_native.CombineArgs], None]:
        """Return the function that runs combines like this one.  `y` is in our window in all of them, or in none."""
        ...

    def row_tables(self, ranks: Rendezvous, timeout_s: float) -> RowTables | None:
        """Open the tables with which combines are verified.  Collective.  None: kernels of combine need none."""
        ...

    def compile_for(self, shape: _native.Shape) -> int:
        """Compile the kernels so far for ranks of another shape, without loading them; return their number."""
        ...

    def count_rejected(self) -> None:
        """Add 1 to State::rejected of this rank's window, in the order of the rounds.

        GPUs: enqueue that on the current stream; in a capture, as part of the graph.
        """
        ...

    def counters(self) -> torch.Tensor:
        """Return this rank's counters, int64, on the device: those of csrc/protocol/counters.h, not a copy.

        Valid while the session is open.
        """
        ...

    def place(self, words: Sequence[int]) -> None:
        """Write Placement and its table of csrc/protocol/placement.h, for rounds from now on.

        GPUs: enqueue that on the current stream, in the order of the rounds.
        """
        ...

    def read_counters(self) -> bytes | None:
        """Return a copy of the counters as they are now, from any thread, beside rounds under way.

        None: closed, or the device does not answer within 20 ms.  Raises RuntimeError as round_begun().
        """
        ...

    def relax_captures(self) -> None:
        """Let this thread read counters while another thread captures a graph."""
        ...

    def with_device(self, enqueue: Callable[..., None], *args: object) -> None:
        """Call `enqueue(*args)`.  GPUs: while this rank's GPU is the current one, in any thread."""
        ...

    def order(self) -> None:
        """GPUs: let work enqueued on the current stream from now on start after the last round, as rounds do."""
        ...

    def synchronize(self) -> None:
        """Wait for every round enqueued so far.  Returns in time even when one fails, because rounds have deadlines."""
        ...

    def round_begun(self) -> int | None:
        """GPUs: return the number of the last round that has begun, without waiting for it; None: not known.

        Raises RuntimeError where the device cannot be asked any more.
        """
        ...

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        ...

    def choose(self, args: _native.DispatchArgs) -> None:
        """GPUs: enqueue the choice of slots, and of experts to copy, for a dispatch with copies, which comes next."""
        ...

    def schedule(self, op: str, *, num_tokens: int, layout: str, num_sms: int | None, casts: bool = False) -> Schedule:
        """Choose workers and chunks of a "dispatch" or "combine" of so many tokens.

        `num_sms`: the caller's choice; `casts`: a combine casts its sums, with scales.
        """
        ...

    def abort(self, cause: int, culprit: int) -> None:
        """End every wait of this rank."""
        ...

    def abort_all(self) -> None:
        """End the waits of all ranks for the next round of this one, which is in none itself."""
        ...

    def dead_peers(self) -> dict[int, str]:
        """Return the ranks known to be gone, and why; with this rank's number, why its own rounds can't run."""
        ...

    def extend(self, nbytes: int, heap: Heap) -> tuple[int, int] | None:
        """Take memory for at least `nbytes` more of the heap, on this rank alone, also in a capture.

        Returns:
            Its offset in the window, and its bytes; peers reach it in all later rounds.  None: there is no more, or
            some peer has not mapped it yet.  When all peers have, a later call returns it, even if that call asks for
            more bytes.
        """
        ...

    @property
    def agrees(self) -> bool:
        """Return whether memory of extend() has to be mapped by peers first.

        Then ranks call grow() ahead of a round that needs more memory than there is.
        """
        ...

    def grow(
        self, nbytes: int, heap: Heap, ranks: Collection[int], meet: Callable[[], None]
    ) -> tuple[int, tuple[int, int] | None] | None:
        """Take memory for rounds of `nbytes`, or of more where another rank needs more.  Collective.

        Called when no rank is in a round, and not in a capture.

        Args:
            nbytes: bytes that this rank needs.
            heap: of this rank.
            ranks: the ranks that make this call.
            meet: a barrier of these ranks.

        Returns:
            The largest need of any rank, rounded up, in bytes; and offset and bytes of the memory taken here, or None
            if this window had enough.  None on every rank if one of them has no memory, or can't map a peer's.
        """
        ...

    @property
    def extending(self) -> bool:
        """Return whether extend() has taken memory that not all peers have mapped yet."""
        ...

    @property
    def offers(self) -> ctypes.c_uint64 | None:
        """Return a counter that all ranks share: when it changes, a peer waits for admit().  None: no peer ever does.

        Valid while the session is open.
        """
        ...

    def admit(self) -> int:
        """Wait for the rounds so far, and map the memory that peers offer.  Not in a capture.

        Returns the value of the counter `offers` from before the mapping.
        """
        ...

    def require_releasable(self) -> None:
        """Raise Unsupported, on every rank alike, where memory can't be released."""
        ...

    def release(self, ranks: Rendezvous) -> None:
        """Give back this rank's window from WindowLayout::staging on, and drop the peers' there.  Collective.

        Called when no rank is in a round.  Addresses stay.  What comes before stays as well: the counters and signals
        of the rounds, which go on where they were, and the words with which a rank aborts or leaves.
        """
        ...

    def restore(self, ranks: Rendezvous) -> None:
        """Map zeroed memory at the addresses of what release() has given back.  Collective.

        Raises:
            NoRoom, Unsupported: on every rank alike; the memory is released as before.
        """
        ...

    def close(self) -> None:
        """Close.  Local and idempotent.  Peers that still wait for this rank learn that it left.

        Outputs that are still referenced keep their memory until they are gone.
        """
        ...


class Backend(Protocol):
    """A module `moecomm.backends.<name>` with these functions."""

    def missing(self) -> str:
        """Return "" if this backend can run here; else the first thing missing, as a sentence a user can act on."""
        ...

    def ring_tokens(self, ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
        """`Shape.ring_tokens`: rows of each rank that wait at a time in a window for combine to read them."""
        ...

    def packet_bytes(self, ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
        """`Shape.packet_bytes`: room for the packets that one rank sends another in one round."""
        ...

    def direct_bytes(self, ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
        """`Shape.packet_bytes` with several domains: room for rows put directly to one rank of another domain."""
        ...

    def open(self, ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float) -> Session:
        """Open a session.  Collective.  Raises Unsupported if the backend can't run here."""
        ...

    def open_peers(self, ranks: Rendezvous, nbytes: int, device: torch.device | None, timeout_s: float) -> Peers:
        """Open memory of `nbytes` on every rank, which all of them reach by loads and stores.  Collective.

        Raises:
            BadInput: the device is not one of this backend.
            NoRoom, Unsupported: on every rank alike.
        """
        ...
