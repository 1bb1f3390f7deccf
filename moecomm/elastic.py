"""Elastic ranks: a Buffer is opened again among fewer ranks, or more, in the same processes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from moecomm import backends
from moecomm.backends.row_tables import RowTables
from moecomm.base.integers import check_integer
from moecomm.base.processes import memory_bytes
from moecomm.base.protocol import MAX_HOST_RANKS
from moecomm.base.validation import check_flag
from moecomm.errors import MoecommError, RoundFailed
from moecomm.fused import forms
from moecomm.gpu import limits
from moecomm.masking import MaskableRanks
from moecomm.membership import masking, membership
from moecomm.membership.membership import Meeting, Shrunk, counts_of, ids_of, members_of, require_idle
from moecomm.membership.suspension import Members, interruption
from moecomm.observe import flight, tracing
from moecomm.ranks import last_calls
from moecomm.ranks.group import Group
from moecomm.ranks.opening import Opening, opening
from moecomm.ranks.rendezvous import rendezvous
from moecomm.ranks.settings import Settings
from moecomm.rounds import names
from moecomm.rounds.expert_tables import ExpertIds
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.spans import now_ns, span
from moecomm.rounds.state import CollectiveCall

log = logging.getLogger("moecomm")


class _Chosen(Protocol):
    chosen_because: str
    why: str


def open_rounds(
    buffer: _Chosen,
    ranks: Opening,
    settings: Settings,
    device: torch.device | None,
    timeout_s: float,
    ids: ExpertIds | None = None,
) -> Rounds:
    """Open a session of a Buffer, and end the opening.  Collective.  Sets `why`, the reason for the backend.

    `ids`: see Rounds.

    Raises:
        As Buffer.
    """
    identity = settings.agree(ranks)
    settings.check()
    if settings.backend == "host":
        settings.check_memory(backends.load("host"), memory_bytes())
    else:
        limits.check(settings)
    shape = settings.shape(backends.load(settings.backend))
    how = settings.backend, buffer.chosen_because
    session, buffer.why = backends.open_session(*how, ranks, shape, device, timeout_s)
    with ExitStack() as undo:
        undo.callback(session.close)
        fused = forms.agree(ranks, settings, session.device)
        tables = RowTables(ranks, shape, timeout_s) if settings.verify_every and session.device.type == "cpu" else None
        came_ns = now_ns()
        ranks.settle()
        left_ns = now_ns()
        undo.pop_all()
    session.context.timeout_ns = int(timeout_s * 1e9)
    rounds = Rounds(session, settings, identity, ids, tables, fused)
    rounds.barrier = came_ns, left_ns
    return rounds


class ElasticRanks(MaskableRanks):
    """The part of a Buffer that changes its ranks."""

    rounds: Rounds
    num_experts: int
    chosen_because: str
    why: str
    _members: Members

    def _take(self, rounds: Rounds, members: Members) -> None:
        """Make these the rounds of this Buffer."""
        before: Rounds | None = vars(self).get("rounds")
        self.rounds, self._members = rounds, members
        if rounds.settings.on_timeout == "mask":
            rounds.recover = partial(masking.recover, weakref.proxy(rounds), members)
        rounds.global_ranks = members.group.global_ranks()
        last_calls.watch(rounds, members)
        flight.watch(rounds, before)
        tracing.watch(rounds, before)
        self.rank, self.num_ranks, self.domain_ranks = rounds.rank, rounds.num_ranks, rounds.domain_ranks
        own = rounds.local_experts
        self.local_experts = own if rounds.ids is None else rounds.ids.range_of(own)
        self.name = names.give(rounds)  # by which operators find it
        log.info(
            "rank %d of %d: %s (%s), %.1f MiB",
            self.rank,
            self.num_ranks,
            rounds.session.name,
            self.why,
            rounds.session.nbytes / 2**20,
        )

    def shrink(self, group: Any = None, *, keep_ids: bool = False) -> Shrunk:
        """Go on with the ranks that are left, after PeerLost, Timeout or Aborted.  Collective among them.

        They agree on who is left, open new windows, and number themselves 0 to R-1 in the order they had.  A rank that
        others have named in a Timeout has 50 ms to come, any other `timeout_s`, unless its process has ended or has
        closed the Buffer.  Ranks that are lost meanwhile are left out, too.  The old windows are given back, and never
        used again, because a rank that was taken for lost may still write to them.

        Outputs of earlier rounds stay valid; handles can't be used any more, nor graphs that were captured.  Until
        shrink() returns, both windows take memory.

        Args:
            group: a group of the ranks that are left, in the order they had: for ranks on several hosts whose store
                is lost.  None: no group is needed.
            keep_ids: True: experts keep their ids and their ranks; those of lost ranks are not there, and ids of theirs
                count as -1.  False: all `num_experts` are there, shared anew among the ranks, and the caller moves
                weights to where `local_experts` says.

        Returns:
            The ranks that go on and those that are lost, by their numbers before.

        Raises:
            Excluded: the others go on without this rank.
            BadInput: a call during a capture, or a `group` that can't be used.
            Mismatch: another rank calls mask() or unmask(), or has another `keep_ids`; nothing has changed.
            Timeout, PeerLost, Aborted, Unsupported: the Buffer could not be opened again; shrink() can be repeated.
            Closed, ConcurrentCall: as everywhere.
        """
        check_flag("keep_ids", keep_ids)
        old = self.rounds
        with CollectiveCall(old, 0), span(old.flight.spans, "shrink"):
            meeting = Meeting(old, self._members, "shrink(keep_ids=True)" if keep_ids else "shrink()")
            with meeting.noted():
                for found in meeting.attempts(group):
                    try:
                        rounds, members, shrunk = self._reopen(found, keep_ids, meeting.lost)
                    except MoecommError as error:
                        meeting.failed(error)
                    else:
                        break
        self._take(rounds, members)
        old.retire()
        return shrunk

    def _reopen(
        self, group: Group, keep_ids: bool, lost: Callable[[], RoundFailed | None]
    ) -> tuple[Rounds, Members, Shrunk]:
        """Open a session of these ranks.  Collective."""
        old, before = self.rounds, self._members.timeout_s
        with opening(group, before, interruption=lost) as ranks:
            everybody = [int.from_bytes(data, "little") for data in ranks.all_gather(old.rank.to_bytes(4, "little"))]
            shrunk = Shrunk.of(everybody, old.num_ranks)
            ids = ids_of(old, shrunk.ranks) if keep_ids else None
            settings = replace(
                old.settings,
                ranks=len(everybody),
                num_experts=self.num_experts if ids is None else len(ids.kept),
                domain_ranks=membership.domain_ranks(shrunk.ranks, old),
            )
            rounds = open_rounds(self, ranks, settings, old.device, before, ids)
        return rounds, members_of(group, old, rounds, ranks.number, before), shrunk

    def grow(self, group: Any) -> None:
        """Go on with more ranks, or others.  Collective among all of them.

        Ranks that join open a Buffer over this group, with the arguments that this one was opened with, and wait until
        the others call grow(), which make rounds meanwhile.  All `num_experts` are shared anew; the caller moves
        weights to where `local_experts` says.  Outputs, handles, graphs and memory are as in shrink().  A rank that is
        not to go on closes its Buffer.

        Args:
            group: of all ranks that go on, as for opening a Buffer.  It sets their numbers.  It needs a store, but no
                backend: torch.distributed.ProcessGroup(store, rank, ranks) is enough, of a store that outlives the
                ranks.

        Raises:
            As opening a Buffer does: this one then stays as it was, and goes on with rounds, or with shrink() if it has
                lost a rank.  PeerLost: also if a rank of this Buffer is lost before it comes; its `peer` is then -1.
            BadInput: also for a call during a capture.
            Closed, ConcurrentCall, Timeout, PeerLost, Aborted: as everywhere.
        """
        old, timeout_s = self.rounds, self._members.timeout_s
        with CollectiveCall(old, 0), span(old.flight.spans, "grow"):
            old.require_usable()
            require_idle(old, "grow")
            found = rendezvous(group)
            with opening(
                found,
                timeout_s,
                interruption=lambda: _ended(old),
                note="grow()",
                others=lambda: last_calls.others(old, self._members),
            ) as ranks:
                settings = replace(old.settings, ranks=ranks.ranks, num_experts=self.num_experts)
                rounds = open_rounds(self, ranks, settings, old.device, timeout_s)
        self._take(rounds, Members(found, ranks.number, timeout_s))
        old.retire()

    def compile_for(self, ranks: int, *, keep_ids: bool = False, domain_ranks: int | None = None) -> int:
        """Compile the kernels of the rounds so far for another number of ranks, so that shrink() or grow() need not.

        Kernels are compiled for a number of ranks, and each takes seconds.  They go to a cache on disk, so one rank of
        a host, of which all ranks use one cache, makes this call; peers learn nothing of it.  It may be repeated after
        rounds of other kinds.  In a thread of its own it may run beside rounds.

        Args:
            ranks: as many as shrink() may leave, or as grow() makes.
            keep_ids: as for shrink().
            domain_ranks: with several domains: the ranks of one.  None: all.

        Returns:
            The number of kernels: 0 on CPU ranks.

        Raises:
            BadInput: no such number of ranks.  Closed: the Buffer is closed.
            Unsupported: the kernels of these ranks can't be compiled.
        """
        check_flag("keep_ids", keep_ids)
        check_integer("ranks", ranks, 1, MAX_HOST_RANKS)
        if domain_ranks is not None:
            check_integer("domain_ranks", domain_ranks, 1, ranks)
        old, found = self.rounds, 0
        old.require_open()
        for experts in counts_of(old, ranks) if keep_ids else [self.num_experts]:
            settings = replace(old.settings, ranks=ranks, num_experts=experts, domain_ranks=domain_ranks)
            settings.check()
            found += old.session.compile_for(settings.shape(backends.load(settings.backend)))
        return found

    def joining(self, group: Any) -> list[int]:
        """Return the ranks of a group that have come to open a Buffer, and wait for the others to call grow().

        Not collective: any rank may look, between two rounds.  A rank that has come is watched in grow(), so that its
        end is an error at once; one that has not is awaited for `timeout_s`.

        Args:
            group: as for grow().

        Raises:
            Closed: the Buffer is closed.  BadInput: no such group.  Timeout, PeerLost: its store does not answer.
        """
        self.rounds.require_open()
        opened = Opening(rendezvous(group))
        try:
            opened.timeout_s = self._members.timeout_s
            return opened.waiting()
        finally:
            opened.close()


def _ended(rounds: Rounds) -> RoundFailed | None:
    """Return the error that ends grow() on a rank: abort(), or a lost rank of the Buffer."""
    error = interruption(rounds, "grow")
    if error is not None:
        error.peer = -1  # the ranks that hear of it have other numbers
    return error
