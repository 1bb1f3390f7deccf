"""Opening of a Buffer's rounds, and its parts.  Its membership opens it again among fewer ranks, or more."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from moecomm import backends, config
from moecomm.base.choices import BackendName
from moecomm.base.placement import Placement, checked
from moecomm.base.processes import memory_bytes
from moecomm.base.protocol import MAX_HOST_RANKS
from moecomm.base.validation import check_flag, check_integer, seconds
from moecomm.errors import BadInput, PeerLost, RoundFailed, Timeout
from moecomm.fused import forms
from moecomm.gpu import limits
from moecomm.membership import masking, placing
from moecomm.membership.meeting import Meeting, Shrunk, counts_of, domain_ranks, ids_of, members_of, require_idle
from moecomm.membership.suspension import Suspension, interruption
from moecomm.observe import flight, stats, tracing
from moecomm.ranks import last_calls
from moecomm.ranks.group import Group, Members
from moecomm.ranks.opening import Opening, opening
from moecomm.ranks.rendezvous import rendezvous
from moecomm.ranks.settings import Settings, wanted_device
from moecomm.rounds import names
from moecomm.rounds.expert_tables import ExpertIds
from moecomm.rounds.rounds import Origin, Rounds
from moecomm.rounds.spans import now_ns, span
from moecomm.rounds.state import CollectiveCall

log = logging.getLogger("moecomm")


def open_rounds(
    ranks: Opening,
    settings: Settings,
    chosen_because: str,
    device: torch.device | None,
    timeout_s: float,
    ids: ExpertIds | None = None,
) -> Rounds:
    """Open a session of a Buffer, and end the opening.  Collective.  The caller sets `Rounds.members`.

    Args:
        ranks: that open it.
        settings: of this rank.
        chosen_because: the reason for the backend, as backends.choose() says it.
        device: that the caller named.
        timeout_s: of its rounds.
        ids: see Rounds.

    Raises:
        As Buffer.
    """
    identity = settings.agree(ranks)
    settings.check()
    on_host = settings.backend == "host"
    if not on_host:
        limits.check(settings)
    backend = backends.load(settings.backend)
    shape = settings.shape(backend)
    if on_host:
        settings.check_memory(backend, shape, memory_bytes())
    session, why = backends.open_session(settings.backend, chosen_because, ranks, shape, device, timeout_s)
    with ExitStack() as undo:
        undo.callback(session.close)
        fused_weights, layer_forms = forms.agree(ranks, settings, session.device)
        tables = session.row_tables(ranks, timeout_s) if settings.verify_every else None
        came_ns = now_ns()
        ranks.settle()
        left_ns = now_ns()
        undo.pop_all()
    session.context.timeout_ns = int(timeout_s * 1e9)
    origin = Origin(
        identity, why, chosen_because, settings.domain_ranks, fused_weights, layer_forms, (came_ns, left_ns)
    )
    return Rounds(session, settings, origin, ids, tables)


def open_first(
    group: Any,
    backend: BackendName,
    device: torch.device | str | int | None,
    timeout_s: float,
    placement: Placement | None,
    others: dict[str, Any],
) -> Rounds:
    """Open the rounds of a new Buffer.  Collective.

    Args:
        group, backend, device, timeout_s, placement: see Buffer.
        others: the other arguments of Buffer, which are those of Settings.

    Raises:
        As Buffer.
    """
    group = rendezvous(group)
    with opening(
        group, timeout_s, note="Buffer()", others=lambda: last_calls.others_over(group, names.ranks())
    ) as ranks:
        wanted, timeout_s = wanted_device(device), seconds(timeout_s)
        flight.prepare()
        stats.publish()
        tracing.prepare()
        name, because = backends.choose(config.asked_backend(backend), wanted)
        others["verify_every"] = config.verify_every(others["verify_every"])
        settings = Settings(ranks=ranks.ranks, backend=name, **others).placed(placement)
        rounds = open_rounds(ranks, settings, because, wanted, timeout_s)
    rounds.members = Members(group, ranks.number, timeout_s)
    return rounds


class Membership:
    """The ranks of an open Buffer: it is opened again among fewer of them, or with others."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def shrink(self, group: Any, keep_ids: bool) -> tuple[Rounds, Shrunk]:
        """Return the rounds of the Buffer after Buffer.shrink, and who is left."""
        check_flag("keep_ids", keep_ids)
        old = self._rounds
        call = "shrink(keep_ids=True)" if keep_ids else "shrink()"
        with CollectiveCall(old, 0), span(old.flight.spans, "shrink"):
            meeting = Meeting(old, call)
            with last_calls.noted_beside(old.ranks, call):
                if group is not None:
                    return self._reopen(rendezvous(group), keep_ids, meeting)
                meeting.require_member()
                while True:
                    survivors = meeting.survivors()
                    try:
                        return self._reopen(survivors, keep_ids, meeting)
                    except (PeerLost, Timeout) as error:
                        meeting.suspect(error)

    def _reopen(self, group: Group, keep_ids: bool, meeting: Meeting) -> tuple[Rounds, Shrunk]:
        """Open a session of these ranks.  Collective."""
        old = self._rounds
        timeout_s = old.members.timeout_s
        with opening(group, timeout_s, interruption=meeting.lost) as ranks:
            everybody: Sequence[int] = meeting.ranks  # none: the group is the caller's
            if not everybody:
                passed = ranks.all_gather(old.rank.to_bytes(4, "little"))
                everybody = [int.from_bytes(data, "little") for data in passed]
            shrunk = Shrunk.of(everybody, old.num_ranks)
            placement, ids = None, None
            if old.slots is not None:
                placement = placing.left(ranks, old.slots, shrunk.ranks)
                experts = placement.ranks * placement.slots
            elif keep_ids:
                ids = ids_of(old, shrunk.ranks)
                experts = len(ids.kept)
            else:
                experts = old.experts.count
            settings = replace(
                old.settings,
                ranks=len(everybody),
                num_experts=experts,
                domain_ranks=domain_ranks(shrunk.ranks, old),
                placement=placement,
            )
            rounds = open_rounds(ranks, settings, old.origin.chosen_because, old.device, timeout_s, ids)
            rounds.origin = rounds.origin._replace(domain_ranks=old.origin.domain_ranks)
        rounds.members = members_of(group, old, rounds, ranks.number, timeout_s)
        return rounds, shrunk

    def grow(self, group: Any, placement: Placement | None = None) -> Rounds:
        """Return the rounds of the Buffer after Buffer.grow."""
        old = self._rounds
        timeout_s = old.members.timeout_s
        with CollectiveCall(old, 0), span(old.flight.spans, "grow"):
            found = rendezvous(group)
            with opening(
                found,
                timeout_s,
                interruption=lambda: _ended(old),
                note="grow()",
                others=lambda: last_calls.others(old.ranks),
            ) as ranks:
                old.require_usable()
                if (checked(placement) is None) != (old.placement is None):
                    got, want = ("None", "that of all ranks") if placement is None else (repr(placement), "None")
                    raise BadInput("placement", got, f"{want}, as the Buffer was opened with one or without")
                require_idle(old, "grow")
                among: dict[str, Any] = {"ranks": ranks.ranks, "num_experts": old.experts.count}
                if old.origin.domain_ranks is not None and ranks.ranks % old.origin.domain_ranks == 0:
                    among["domain_ranks"] = old.origin.domain_ranks
                settings = replace(old.settings, placement=None, **among).placed(placement)
                rounds = open_rounds(ranks, settings, old.origin.chosen_because, old.device, timeout_s)
        rounds.members = Members(found, ranks.number, timeout_s)
        return rounds

    def compile_for(self, ranks: int, keep_ids: bool, domain_ranks: int | None) -> int:
        check_flag("keep_ids", keep_ids)
        check_integer("ranks", ranks, 1, MAX_HOST_RANKS)
        if domain_ranks is not None:
            check_integer("domain_ranks", domain_ranks, 1, ranks)
        rounds, found = self._rounds, 0
        rounds.require_open()
        keeps = keep_ids or rounds.placement is not None
        for experts in counts_of(rounds, ranks) if keeps else [rounds.experts.count]:
            among: dict[str, Any] = {"ranks": ranks, "num_experts": experts, "domain_ranks": domain_ranks}
            settings = replace(rounds.settings, placement=None, **among)
            settings.check()
            shape = settings.shape(backends.load(settings.backend))
            if rounds.placement is not None:
                shape.named_experts = rounds.experts.count
            found += rounds.session.compile_for(shape)
        return found

    def joining(self, group: Any) -> list[int]:
        self._rounds.require_open()
        opened = Opening(rendezvous(group))
        try:
            opened.timeout_s = self._rounds.members.timeout_s
            return opened.waiting()
        finally:
            opened.close()


def _ended(rounds: Rounds) -> RoundFailed | None:
    """Return the error that ends grow() on a rank: abort(), or a lost rank of the Buffer."""
    error = interruption(rounds, "grow")
    if error is not None:
        error.peer = -1  # the ranks that hear of it have other numbers
    return error


class Parts:
    """The objects that work on the rounds of a Buffer.  They are made anew when shrink() or grow() opens other rounds.

    Attributes:
        membership, masks, memory, counters, recorder: see docs/maintainers/architecture.md.

    Args:
        rounds: of the Buffer from now on, with members.
        before: its rounds until now.
    """

    def __init__(self, rounds: Rounds, before: Rounds | None) -> None:
        self.membership, self.masks = Membership(rounds), masking.Masks(rounds)
        self.memory, self.counters = Suspension(rounds), stats.Counters(rounds)
        rounds.flight.global_ranks = rounds.members.group.global_ranks()
        self.recorder = flight.Recorder(rounds, before)
        place = rounds.rank, rounds.num_ranks, rounds.session.name, rounds.origin.why, rounds.session.nbytes / 2**20
        log.info("rank %d of %d: %s (%s), %.1f MiB", *place)
