"""Rounds: the state of a Buffer that dispatch, combine and fused layers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypeVar

import torch

from moecomm import _native
from moecomm.base.arrays import window_tensor
from moecomm.base.bound import Bound
from moecomm.base.experts import experts_of
from moecomm.base.placement import Placement
from moecomm.gpu.tuning.layers import Kind
from moecomm.ranks.session import RowTables, Session
from moecomm.ranks.settings import Settings
from moecomm.rounds.expert_tables import ExpertIds, ExpertNames, LiveExperts
from moecomm.rounds.memory import WindowMemory
from moecomm.rounds.plans import PlanCache
from moecomm.rounds.sampling import Sampling
from moecomm.rounds.slots import Slots
from moecomm.rounds.spans import span
from moecomm.rounds.state import RoundState, collective

_Part = TypeVar("_Part", bound="Part")


class Origin(NamedTuple):
    """The opening of a Buffer's rounds.

    Attributes:
        identity: name of this opening, the same on its ranks, and of no other.
        why: the reason for the backend, in words.
        chosen_because: the reason before the ranks met, with which another opening of the Buffer begins.
        domain_ranks: ranks of a domain that the user asked for, even if shrink() has left fewer; None: not given.
        fused_weights: for each dtype of weights, whether layers that have not been measured run fused by default; ranks
            have agreed on it.
        layer_forms: for each kind of layer that was measured before, whether it runs fused; agreed on likewise.
        barrier: times at which this rank reached and left the barrier that ends an opening: CLOCK_MONOTONIC, in ns.
    """

    identity: str
    why: str
    chosen_because: str
    domain_ranks: int | None
    fused_weights: Mapping[torch.dtype, bool]
    layer_forms: Mapping[Kind, bool]
    barrier: tuple[int, int]


class Part:
    """A part of an open Buffer that another folder of moecomm defines and adds to Rounds.parts.

    Rounds knows only this class, and calls its methods.  They do nothing unless a subclass overrides them.

    Attributes:
        ends_with_memory: a release of the Buffer's memory closes it as well.
    """

    ends_with_memory: ClassVar[bool] = False

    def abort(self) -> None:
        """End every wait of this rank at once, from any thread."""

    def check(self, masked: bool) -> None:
        """Wait for the work so far, and raise the first error.  `masked`: some rank is masked."""

    def close(self) -> None:
        """Drop references to the window, and give memory back.  Idempotent."""


class Rounds(RoundState, Bound):
    """Sizes, session, window memory and plans of a Buffer, and the state that its last rounds left behind.

    A Handle refers to it, and so keeps the session open when the Buffer itself is gone.

    Attributes:
        origin: the opening of the Buffer.
        experts: names that callers have for experts.
        slots: slots of the placement; None: there is no placement.
        sampling: chooses the rounds to verify; None: no round is verified.
        parts: parts that other folders have added, by class.
        layer_forms: whether layers that have been measured run fused: those of `origin`, and later ones.
        begun: the Routed of a dispatch_begin() whose dispatch_end() is yet to come.
        driven: one thread prepares the calls of all ranks before it launches any of them (moecomm.testing).

    Args:
        session: opened by the backend.
        settings: agreed on by all ranks.
        origin: see Attributes.
        ids: ids that callers have for experts; None: those of the rounds.
        row_tables: hashes of the rows that combines move, on CPU ranks that verify rounds.
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
        parts = settings.heap_parts(taken)
        self.memory = WindowMemory(arena, session.capturing, *parts, extend=session.extend, agrees=session.agrees)
        self.plans = PlanCache()
        known = (self.plans.table, self.memory.parts, self.flight, self.turn, session.context.record, self.on_cpu)
        self.known_calls = _native.KnownCalls(*known)
        self.parts: dict[type[Part], Part] = {}
        self.layer_forms = dict(origin.layer_forms)
        self.sampling = Sampling(settings.verify_every, row_tables) if settings.verify_every else None
        self.begun: Bound | None = None
        self.driven = False
        self._late: list[object] = []  # outputs of failed dispatches, which masked ranks may still write
        self.experts = ExpertNames(settings.named_experts, ids, self.device)
        self.slots: Slots | None = None
        if settings.placement is not None:
            self.slots = Slots(session, self.domain_ranks, settings.placement)
        elif settings.on_timeout == "mask":  # a placement's table does the same
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
        """Wait for the work of all parts, and raise the first error, if any."""
        for part in list(self.parts.values()):
            part.check(bool(self.masked))

    def release_parts(self) -> None:
        """Close the parts that end with the Buffer's memory.  The next use adds them again."""
        for kind, part in list(self.parts.items()):
            if part.ends_with_memory:
                part.close()
                del self.parts[kind]

    def copy_to(self, block: _native.Block, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to a block of the window, where peers can read it, and return the copy.

        The copy waits for all rounds so far, because one on another stream may still use this memory.
        """
        self.session.order()
        address = self.session.context.peers[self.rank] + block.offset
        here = window_tensor(block, address, tuple(tensor.shape), tensor.dtype, self.device, self.session.owner)
        return here.copy_(tensor)

    def warn_of_copies(self) -> None:
        """Warn, once, that outputs are copied out of the window, unless the window is about to grow."""
        if not self.session.extending:
            self.memory.warn_of_copies()

    def abort(self) -> None:
        """End every wait of this rank at once, from any thread."""
        super().abort()
        for part in list(self.parts.values()):
            part.abort()

    def resumed(self, number: int, masked: frozenset[int]) -> None:
        """Record the masked ranks, and go on with rounds after `number`.

        A masked rank whose process was stopped in a dispatch stores its rows when the process continues.  So no output
        gets the memory of that dispatch until the rank has come back, or its process has ended.
        """
        pages = self.session.pages
        gone = self.session.dead_peers().keys() | (set() if pages is None else pages.left())
        if masked - gone:
            self._late += [*self.unfinished, self.begun]
        else:
            self._late.clear()
        self.masked, self.begun, self.calls = masked, None, 0
        self.unfinished.clear()
        self.memory.disagree()
        if self.sampling is not None:
            self.sampling.restart()
        self.recovered()
        self.flight.resumed(number)

    @collective(rounds=0)
    def check(self) -> None:
        """Wait for every round so far, and raise the first error, if any."""
        self.require_alive()
        self.raise_failure()
        self.wait()
        self.raise_failure()
        self.check_parts()
        self.flight.settle()

    def wait(self) -> None:
        """Wait for every round enqueued so far.  The caller raises their errors."""
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
