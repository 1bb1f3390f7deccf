"""Rounds: the state of a Buffer that dispatch, combine and fused layers work with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypeVar

import torch

from moecomm import _native
from moecomm.base.arrays import window_tensor
from moecomm.base.bound import Bound
from moecomm.base.experts import experts_of
from moecomm.base.placement import Placement
from moecomm.ranks.session import RowTables, Session
from moecomm.ranks.settings import Settings
from moecomm.rounds.expert_tables import ExpertIds, ExpertNames, LiveExperts
from moecomm.rounds.memory import WindowMemory
from moecomm.rounds.plans import PlanCache
from moecomm.rounds.sampling import Sampling
from moecomm.rounds.slots import Slots
from moecomm.rounds.spans import span
from moecomm.rounds.state import RoundState, collective
from moecomm.tuning.layers import Kind

_Part = TypeVar("_Part", bound="Part")


class Origin(NamedTuple):
    """The opening of a Buffer's rounds.

    Attributes:
        identity: by which its ranks name this opening, and no other.
        why: the reason for the backend, in words.
        chosen_because: the same before the ranks met; another opening of the Buffer begins with it.
        domain_ranks: that the user asked for, also while shrink() has left another number; None: whatever there are.
        fused_weights: for each dtype of weights whether layers that have not been measured run fused by default, on
            which its ranks have agreed.
        layer_forms: whether layers that were measured before run fused, likewise.
        barrier: when this rank came to the barrier that ends an opening, and when it left: CLOCK_MONOTONIC, in ns.
    """

    identity: str
    why: str
    chosen_because: str
    domain_ranks: int | None
    fused_weights: Mapping[torch.dtype, bool]
    layer_forms: Mapping[Kind, bool]
    barrier: tuple[int, int]


class Part:
    """A part of an open Buffer that belongs to another room, which adds it to Rounds.parts.

    Rounds know its class alone, and call these methods.  None of them does anything unless a class overrides it.

    Attributes:
        ends_with_memory: a release of the Buffer's memory closes it as well.
    """

    ends_with_memory: ClassVar[bool] = False

    def abort(self) -> None:
        """End every wait of this rank at once, from any thread."""

    def check(self, masked: bool) -> None:
        """Wait for the work so far, and raise the error of the first that went wrong.  `masked`: some rank is."""

    def close(self) -> None:
        """Drop what refers to the window, and give memory back.  Idempotent."""


class Rounds(RoundState, Bound):
    """Sizes, session, window memory and plans of a Buffer, and what its last rounds left behind.

    A Handle refers to it, and so keeps the session open when the Buffer itself is gone.

    Attributes:
        origin: how it was opened.
        experts: by which callers name them.
        slots: of its placement; None: it has none.
        sampling: chooses rounds to verify; None: none is.
        parts: of other rooms, by their classes.
        layer_forms: whether layers that have been measured run fused; those of the origin, and later ones.
        begun: the Routed of a dispatch_begin() whose dispatch_end() is yet to come.

    Args:
        session: that the backend has opened.
        settings: on which its ranks have agreed.
        origin: see Attributes.
        ids: of experts that callers name; None: those of the rounds.
        row_tables: hashes of the rows that combines move; CPU ranks that verify rounds.
    """

    def __init__(
        self,
        session: Session,
        settings: Settings,
        origin: Origin,
        ids: ExpertIds | None = None,
        row_tables: RowTables | None = None,
    ) -> None:
        super().__init__(session)
        shape = session.context.shape
        self.settings, self.origin = settings, origin
        self.rank, self.num_ranks, self.dtype = session.context.rank, settings.ranks, settings.dtype
        self.hidden, self.num_experts = settings.hidden, settings.num_experts
        self.topk, self.max_tokens = settings.topk, settings.max_tokens
        self.local_experts = experts_of(self.rank, self.num_experts, self.num_ranks)
        self.domain_ranks = shape.domain_ranks or settings.ranks
        self.device = session.device
        self.on_cpu = session.synchronous
        before, heap = _native.choice_bytes(shape) * settings.balances, session.context.window.heap
        taken = shape.heap_bytes - session.extensible - before
        arena = _native.Arena(heap + before, taken)
        self.memory = WindowMemory(arena, session.capturing, *settings.heap_parts(taken), session.extend)
        self.plans = PlanCache()
        known = (self.plans.table, self.memory.parts, self.flight, self.turn, session.context.record, self.on_cpu)
        self.known_calls = _native.KnownCalls(*known)
        self.parts: dict[type[Part], Part] = {}
        self.layer_forms = dict(origin.layer_forms)
        self.sampling = Sampling(settings.verify_every, row_tables) if settings.verify_every else None
        self.begun: Bound | None = None
        self._late: list[object] = []  # what masked ranks may still write to, since a dispatch has failed
        self.experts = ExpertNames(settings.named_experts, ids, self.device)
        self.slots: Slots | None = None
        if settings.placement is not None:
            self.slots = Slots(session, self.domain_ranks, settings.placement)
        elif settings.on_timeout == "mask":  # else the table of a placement does
            self.experts.live = LiveExperts(self.num_experts, self.device)

    @property
    def placement(self) -> Placement | None:
        """The placement that rounds follow, if there is one."""
        return None if self.slots is None else self.slots.placement

    def part(self, kind: type[_Part]) -> _Part | None:
        """Return the part of this class, if there is one."""
        found = self.parts.get(kind)
        return found if isinstance(found, kind) else None

    def add(self, part: _Part) -> _Part:
        """Add a part; return it."""
        self.parts[type(part)] = part
        return part

    def check_parts(self) -> None:
        """Wait for the work of all parts, and raise the error of the first that went wrong, if any."""
        for part in list(self.parts.values()):
            part.check(bool(self.masked))

    def release_parts(self) -> None:
        """Close the parts that end with the Buffer's memory.  Their rooms add others at the next use."""
        for kind, part in list(self.parts.items()):
            if part.ends_with_memory:
                part.close()
                del self.parts[kind]

    def copy_to(self, block: _native.Block, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to a block of the window, where peers can read it, and return it there.

        The copy follows all rounds so far: one on another stream may still use this memory.
        """
        self.session.order()
        address = self.session.context.peers[self.rank] + block.offset
        here = window_tensor(block, address, tuple(tensor.shape), tensor.dtype, self.device, self.session.owner)
        return here.copy_(tensor)

    def warn_of_copies(self) -> None:
        """Warn, once, that outputs are copied out of the window, unless the window is about to have room for them."""
        if not self.session.extending:
            self.memory.warn_of_copies()

    def abort(self) -> None:
        """End every wait of this rank at once, from any thread."""
        super().abort()
        for part in list(self.parts.values()):
            part.abort()

    def resumed(self, number: int, masked: frozenset[int]) -> None:
        """Take note that these ranks are masked, and rounds go on after this one.

        A masked rank that was stopped in a dispatch goes on to store its rows when it is resumed.  No output is given
        the memory where they belong, until it has come back or its process has ended.
        """
        pages = self.session.pages
        gone = self.session.dead_peers().keys() | (set() if pages is None else pages.left())
        if masked - gone:
            self._late += [*self.unfinished, self.begun]
        else:
            self._late.clear()
        self.masked, self.begun, self.calls = masked, None, 0
        self.unfinished.clear()
        if self.sampling is not None:
            self.sampling.restart()
        self.recovered()
        self.flight.resumed(number)

    @collective(rounds=0)
    def check(self) -> None:
        """Wait for every round so far, and raise the error of the first that went wrong, if any."""
        self.require_alive()
        self.raise_failure()
        self.wait()
        self.raise_failure()
        self.check_parts()
        self.flight.settle()

    def wait(self) -> None:
        """Wait for every round enqueued so far.  Their errors are for the caller to raise."""
        if self.on_cpu:  # rounds are over when they return
            return
        with span(self.flight.spans, "wait for the device"):
            self.session.synchronize()

    def _release(self) -> None:
        super()._release()
        self.plans.clear()
        self.sampling = None
        self.unfinished.clear()
        self._late.clear()
        for part in list(self.parts.values()):
            part.close()
        self.parts.clear()
