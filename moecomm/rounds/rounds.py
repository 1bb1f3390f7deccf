"""Rounds: the state of a Buffer that dispatch, combine and fused layers work with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from moecomm import _native
from moecomm.base.arrays import window_tensor
from moecomm.base.bound import Bound
from moecomm.base.experts import experts_of
from moecomm.base.placement import NONE, Placement, Table, table
from moecomm.base.protocol import BALANCED, BY_TABLE, DIGEST_BITS
from moecomm.base.sampling import RowTables, Sampling
from moecomm.base.weak import WeakTable
from moecomm.ranks.session import Session
from moecomm.ranks.settings import Settings
from moecomm.rounds.expert_tables import AbsentEntries, ExpertIds, LiveExperts
from moecomm.rounds.memory import WindowMemory
from moecomm.rounds.plans import PlanCache
from moecomm.rounds.spans import span
from moecomm.rounds.state import RoundState, collective
from moecomm.tuning.layers import Kind


class Rounds(RoundState, Bound):
    """Sizes, session, window memory and plans of a Buffer, and what its last rounds left behind.

    A Handle refers to it, and so keeps the session open when the Buffer itself is gone.

    Attributes:
        why: the reason for the backend, in words.
        chosen_because: the same before the ranks met; another opening of the Buffer begins with it.

    Args:
        session: that the backend has opened.
        settings: on which its ranks have agreed.
        identity: by which its ranks name this opening, and no other.
        ids: of experts that callers name; None: those of the rounds.
        row_tables: hashes of the rows that combines move; CPU ranks that verify rounds.
        fused_weights: for each dtype of weights whether layers that have not been measured run fused by default, on
            which its ranks have agreed.
        layer_forms: for each tuning.layers.Kind of layers that have been measured whether they do, likewise.
    """

    why: str
    chosen_because: str

    def __init__(
        self,
        session: Session,
        settings: Settings,
        identity: str,
        ids: ExpertIds | None = None,
        row_tables: RowTables | None = None,
        fused_weights: Mapping[torch.dtype, bool] | None = None,
        layer_forms: dict[Kind, bool] | None = None,
    ) -> None:
        super().__init__(session)
        self.ids, self.identity = ids, identity
        self.fused_weights: Mapping[torch.dtype, bool] = fused_weights or {}
        self.layer_forms: dict[Kind, bool] = layer_forms or {}
        shape = session.context.shape
        self.settings = settings
        self.rank, self.num_ranks, self.dtype = session.context.rank, settings.ranks, settings.dtype
        self.hidden, self.num_experts = settings.hidden, settings.num_experts
        self.topk, self.max_tokens = settings.topk, settings.max_tokens
        self.local_experts = experts_of(self.rank, self.num_experts, self.num_ranks)
        self.domain_ranks = shape.domain_ranks or settings.ranks
        self.asked_domain_ranks = settings.domain_ranks  # for grow(), also while shrink() has left another number
        self.packet_room = shape.packet_bytes if self.domain_ranks == settings.ranks else 0
        self.device = session.device
        self.on_cpu = session.synchronous
        before, heap = _native.choice_bytes(shape) * settings.balances, session.context.window.heap
        taken = shape.heap_bytes - session.extensible - before
        arena = _native.Arena(heap + before, taken)
        self.memory = WindowMemory(arena, session.capturing, *settings.heap_parts(taken), session.extend)
        self.plans = PlanCache()
        known = (self.plans.table, self.memory.parts, self.flight, self.turn, session.context.record, self.on_cpu)
        self.known_calls = _native.KnownCalls(*known)
        self.routes: dict[tuple[str, int, int], Any] = {}  # of the dispatches of operators, see moecomm.ops.handles
        self.exchanges: Any = None  # moecomm.weights.slots.Exchanges, once weights of slots have been exchanged
        self.attempts = 0  # to agree with the ranks that are left, see moecomm.membership.meeting
        self.global_ranks: Sequence[int] = ()  # its ranks in the default group, where they are known
        self.absent = AbsentEntries(self.device)
        self.ended: Callable[[], None] = lambda: None  # called when the Buffer is closed: see observe.stats.publish
        self.retries = 0  # rounds of dispatches that had no room for their rows in one
        # When this rank came to the barrier that ends an opening, and when it left: CLOCK_MONOTONIC, in ns.
        self.barrier = (0, 0)
        self.sampling = Sampling(settings.verify_every) if settings.verify_every else None
        self.row_tables = row_tables
        self.begun: object = None  # the Routed of a dispatch_begin() whose dispatch_end() is yet to come
        self._late: list[object] = []  # what masked ranks may still write to, since a dispatch has failed
        self.replicas: dict[int, int] = {}  # by expert, for those of masked ranks
        self.placement, self.generation = settings.placement, 1
        # moecomm.weights.exchange.SharedTensor by address.
        self.slot_tensors: WeakTable[int, Any] = WeakTable()
        # By slot of this rank, the generation from which on its weights are those of its expert: see placing.left().
        self.filled: dict[int, int] = {}
        self.reserved: frozenset[int] = frozenset()  # empty slots that get no copies: they are being filled
        self.replicates = False  # layers copy experts to empty slots, also in replays of captured graphs
        masks = settings.on_timeout == "mask" and self.placement is None  # else the table of a placement does
        self.live = LiveExperts(self.num_experts, self.device) if masks else None
        if self.placement is not None:
            session.context.placed = BALANCED if settings.balances else BY_TABLE
            self.place(self.placement)
            session.synchronize()

    def table_of(self, placement: Placement) -> Table:
        """Return the table by which rounds follow a placement while no rank is masked and no slot reserved."""
        return table(placement, self.rank, self.domain_ranks, ())

    def place(self, placement: Placement, made: Table | None = None) -> None:
        """Write the table of a placement, for rounds from now on.  Does not wait for the device.

        `made`: see table_of().
        """
        empty, words = made or table(placement, self.rank, self.domain_ranks, self.masked, self.reserved)
        self.placement = placement
        head = self.generation, placement.num_experts, placement.digest % (1 << DIGEST_BITS), empty
        self.session.place([*head, *words])

    def reserve(self, slots: Collection[int]) -> None:
        """Let no layer copy experts to these slots from now on, also in replays of graphs.

        A change of generation, so that ranks which reserve them between other rounds raise Mismatch.
        """
        assert self.placement is not None
        if not self.reserved.issuperset(slots):
            self.reserved, self.generation = self.reserved.union(slots), self.generation + 1
            self.place(self.placement)

    def note_copies(self) -> None:
        """Note that layers write slots that are empty in this generation, where older placements had weights."""
        assert self.placement is not None
        for slot, expert in enumerate(self.placement.held[self.rank]):
            if expert == NONE:
                self.filled[slot] = self.generation

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
        if (exchanges := self.exchanges) is not None:
            exchanges.abort()

    def own_ids(self, topk_idx: Any) -> Any:
        """Return the ids by which rounds know the experts that a caller names; -1 for those of ranks that are lost."""
        if topk_idx is None or not self.translates:
            return topk_idx
        if self.ids is not None:
            topk_idx = self.ids.translate(topk_idx, self.absent)
        return topk_idx if self.live is None else self.live.translate(topk_idx, self.absent)

    @property
    def named_experts(self) -> int:
        """The experts that callers name: those that the Buffer was opened with.

        `num_experts` are fewer after shrink(keep_ids=True), and slots where there is a placement.
        """
        return self.settings.named_experts if self.ids is None else self.ids.count

    @property
    def translates(self) -> bool:
        """True if rounds do not know experts by the ids of callers."""
        return self.ids is not None or self.live is not None or self.placement is not None

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
        self.check_exchanges()
        self.flight.settle()

    def check_exchanges(self) -> None:
        """Wait for exchanges of weights of slots, and raise the error of the first that went wrong, if any."""
        if self.exchanges is not None:
            self.exchanges.check(bool(self.masked))

    def close_exchanges(self) -> None:
        """Give the memory of exchanges back.  The next exchange opens another."""
        if self.exchanges is not None:
            self.exchanges.close()
            self.exchanges = None

    def wait(self) -> None:
        """Wait for every round enqueued so far.  Their errors are for the caller to raise."""
        if self.on_cpu:  # rounds are over when they return
            return
        with span(self.flight.spans, "wait for the device"):
            self.session.synchronize()

    def _release(self) -> None:
        super()._release()
        self.plans.clear()
        self.row_tables, self.sampling = None, None
        self.unfinished.clear()
        self._late.clear()
        self.routes.clear()
        self.close_exchanges()
        self.ended()
