"""ExpertWeights: the weights of a Buffer's slots in memory that all ranks read, and their way to another placement.

A slot is read by layers of its own rank, and by copies of others.  prefetch() writes slots that are empty.  It orders
these writes after both kinds of reads: its copies follow the last round of this rank and all work that is enqueued on
the current stream, which by then has no round of a placement that names the slot; and they follow a barrier of the
copies of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, Protocol

import torch

from moecomm.base import placement as placements
from moecomm.base.placement import NONE, Placement, Table
from moecomm.base.validation import check_dtype, check_real, check_shape
from moecomm.errors import BadInput
from moecomm.gpu import plain_kernel
from moecomm.membership.placing import set_placement
from moecomm.membership.suspension import refuse_capture
from moecomm.ranks.opening import opening
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.slots import Slots
from moecomm.weights.exchange import Exchange, Kind, SharedTensors, shown
from moecomm.window.pace import PAUSE, Pace

_RATES = 1e-3, 1e6  # GB/s
_DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int8, torch.int32),
    *(torch.float8_e4m3fn, torch.float8_e8m0fnu),
)


class Buffer(Protocol):
    """A moecomm.Buffer, whose room is above this one."""

    rounds: Rounds


class ExpertWeights:
    """Weights of the slots of a Buffer with a placement, in a Window.  Ranks copy experts from each other.

    A rank fills slots that are empty, while rounds go on, and all ranks then switch at the same round:

        weights = ExpertWeights(buffer, {"w13": (2 * I, H), "w2": (H, I)}, dtype=torch.bfloat16)
        weights["w13"][slot].copy_(...)  # of each slot that holds an expert
        while weights.prefetch(target) != buffer.placement:
            ...  # rounds by the placement so far
            weights.commit()

    Slots that are in use are never written, so where all slots are full nothing can move: leave some empty.  Opening
    is collective, and so are prefetch() and commit().

    Weights of experts that a commit() takes away stay where they are until the next prefetch().  Enqueue what reads
    them before that, on the current stream.  Should a rank be lost, shrink() may go back to that placement.

    Args:
        buffer: opened with a placement.  GPUs: in one NVLink domain.
        shapes: of an expert's tensors, by name.
            All ranks pass the same in the same order.
        dtype: of all of them, or of each by name.

    Raises:
        BadInput: a Buffer without a placement, a shape or dtype that can't be, weights that no memory has room for.
        Mismatch: ranks passed other shapes, names or dtypes, or the same in another order.
        Unsupported, Timeout, PeerLost, Aborted: as opening a Window.
    """

    def __init__(
        self,
        buffer: Buffer,
        shapes: Mapping[str, Sequence[int]],
        *,
        dtype: torch.dtype | Mapping[str, torch.dtype] = torch.bfloat16,
    ) -> None:
        rounds = getattr(buffer, "rounds", None)
        if not isinstance(rounds, Rounds) or rounds.slots is None:
            raise BadInput("buffer", repr(buffer), "a Buffer that was opened with a placement")
        members = rounds.members
        how: dict[str, Any] = {"of": "ExpertWeights", "note": "ExpertWeights()"}
        with opening(members.group, members.timeout_s, **how) as ranks:
            kinds = _kinds(shapes, dtype)
            ranks.compare(shown(kinds))  # copies find tensors by place
            ranks.settle()
        slots = rounds.slots.placement.slots
        try:
            self._exchange = Exchange(rounds, slots, kinds)
        except BadInput as error:
            if error.argument != "nbytes":
                raise
            want = f"weights of {slots} slots in all that take {error.want}"
            raise BadInput("shapes", f"{error.got} bytes on each rank", want, error.rank) from None
        shared = rounds.part(SharedTensors) or rounds.add(SharedTensors())
        for tensor in self._exchange.tensors.values():
            shared.by_address.add(tensor.of(rounds.rank).data_ptr(), tensor)
        self._buffer, self._rounds, self._slots = buffer, rounds, rounds.slots
        self._window = self._exchange.window
        self._stream: torch.cuda.Stream | None = None
        if rounds.device.type == "cuda":
            self._stream = torch.cuda.Stream(rounds.device)  # type: ignore[no-untyped-call]
            plain_kernel.load(PAUSE, rounds.device.index)  # now: loading waits for kernels that are running
        self._next: tuple[Placement, Table] | None = None  # fills empty slots of the placement of generation `_since`
        self._since = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return `[slots, *shape]`, the tensor of that name of this rank.

        Raises:
            BadInput: no such name.
            Closed: after close().
        """
        tensors = self._exchange.tensors
        if name not in tensors:
            raise BadInput("name", repr(name), " or ".join(map(repr, tensors)))
        return tensors[name].of(self._rounds.rank)

    def prefetch(self, target: Placement, *, max_gbs: float | None = None) -> Placement:
        """Start to copy the experts that a placement has in other slots, and return what commit() sets.  Collective.

        That is `target` but for the order of a rank's slots, where ranks have empty slots enough; else a step towards
        it: experts that are needed no more are gone, and as many new ones are there as found an empty slot.  GPUs copy
        on a stream of their own, by copy engines, after the work of all ranks that is enqueued now; no host waits.

        Args:
            target: of the same experts, ranks and at most as many slots.  Experts that no rank holds since a loss get
                no slot: write their weights yourself, then call set_placement().
            max_gbs: copies of this rank take at most so many GB/s (10^9 bytes a second); None: all that they get.
                CPU ranks: the call takes as long.

        Raises:
            BadInput: what can't be placed, another `choice` that commit() would refuse, or a Buffer that has shrunk:
                its ranks open other ExpertWeights.
            Closed: the Buffer is closed.
            As Window.barrier().
        """
        rounds, slots = self._rounds_of_buffer()
        rounds.require_usable()
        if max_gbs is not None:
            check_real("max_gbs", max_gbs, *_RATES)
        refuse_capture(rounds, "prefetch")
        before = slots.placement
        after = step(before, target)
        if before.choice == "balanced":
            new = (after.experts != before.experts) & (after.experts != NONE)
            slots.reserve(new.flatten().nonzero().flatten().tolist(), rounds.masked)
        rounds.session.order()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(rounds.device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._window.barrier()  # earlier copies of all ranks have ended
            pace = None if max_gbs is None else Pace(rounds.device, max_gbs)
            self._fill(before, after, pace)
        self._next, self._since = (after, slots.table_of(after)), slots.generation
        return after

    def commit(self) -> None:
        """Let all ranks follow the placement of the last prefetch() from the next round on.  Collective.

        Waits for no rank and no round, but for copies of this rank that have not come yet.  GPUs: make some rounds
        between prefetch() and commit(), or the rounds that are enqueued may end during this wait.

        Raises:
            BadInput: nothing was prefetched, or the placement has changed since; a Buffer that has shrunk.
            As Buffer.set_placement() and Window.barrier().
        """
        rounds, slots = self._rounds_of_buffer()
        if self._next is None or slots.generation != self._since:
            raise BadInput("commit", "nothing to commit", "prefetch() first, by the placement that the Buffer has now")
        if self._stream is not None:
            self._stream.synchronize()
        self._window.raise_failure()
        reserved, slots.reserved = slots.reserved, frozenset()
        try:
            set_placement(rounds, *self._next)
        except BaseException:
            slots.reserved = reserved
            raise
        self._next = None

    def close(self) -> None:
        """Give the memory back.  Tensors that are still referenced stay valid."""
        self._exchange.close()

    def _rounds_of_buffer(self) -> tuple[Rounds, Slots]:
        if self._buffer.rounds is not self._rounds:
            raise BadInput("buffer", "one that has shrunk", "other ExpertWeights of the ranks that are left")
        return self._rounds, self._slots

    def _fill(self, before: Placement, after: Placement, pace: Pace | None) -> None:
        mine = self._exchange.of(self._rounds.rank)
        for slot, rank, source in _copies(self._rounds, before, after):
            self._slots.filled[slot] = self._slots.generation + 1
            for to, origin in zip(mine, self._exchange.of(rank), strict=True):
                if pace is None:
                    to[slot].copy_(origin[source])
                else:
                    pace.copy(to[slot], origin[source])


def _kinds(shapes: object, dtype: object) -> dict[str, Kind]:
    """Return the kinds of tensors by name.  Raises BadInput."""
    if not isinstance(shapes, Mapping) or not shapes:
        raise BadInput("shapes", repr(shapes), "shapes by name")
    kinds: dict[str, Kind] = {}
    for name, shape in shapes.items():
        kind: Any = dtype.get(name) if isinstance(dtype, Mapping) else dtype
        check_dtype("dtype", kind, _DTYPES)
        kinds[name] = check_shape("shapes", shape), kind
    return kinds


def _copies(rounds: Rounds, before: Placement, after: Placement) -> list[tuple[int, int, int]]:
    """Return the slots of this rank that get an expert, and for each a rank and its slot that had it before.

    That is this rank if it can be, else one of its domain, else any: the next one in order of ranks.
    """
    me, ranks, domain = rounds.rank, before.ranks, rounds.domain_ranks
    away = [  # of each slot
        (rank - me) % ranks + ranks * (rank // domain != me // domain)
        for rank in range(ranks)
        for _ in range(before.slots)
    ]
    found = []
    for slot, (old, new) in enumerate(zip(before.held[me], after.held[me], strict=True)):
        if new not in (NONE, old):
            source = min(before.slots_by_expert[new], key=away.__getitem__)
            found.append((slot, *divmod(source, before.slots)))
    return found


def step(before: Placement, target: Placement) -> Placement:
    """Return the placement nearest to `target` that fills only slots that are empty before, the same on all ranks.

    No expert is lost on the way: one stays where it is until another slot holds it.  An expert that no slot holds
    before, since its ranks are lost, gets none: there are no weights to copy.

    Raises:
        BadInput: other experts or ranks, more slots, or another choice where that can't change.
    """
    target = placements.successor("target", before, target)
    found, known = [], {expert for expert, slots in enumerate(before.slots_by_expert) if slots}
    for held, wanted in zip(before.held, target.held, strict=True):
        left = list(filter(known.__contains__, wanted))
        slots = [NONE] * before.slots
        for slot, expert in enumerate(held):
            if expert in left:
                slots[slot] = expert
                left.remove(expert)
        for slot, expert in enumerate(held):
            if expert == NONE and left:
                slots[slot] = left.pop(0)
        found.append(slots)
    there = set(chain.from_iterable(found))
    for slots, held in zip(found, before.held, strict=True):
        for slot, expert in enumerate(held):
            if slots[slot] == NONE and expert != NONE and expert not in there:
                slots[slot] = expert
                there.add(expert)
    return placements.unchecked(before, found, target.choice)
