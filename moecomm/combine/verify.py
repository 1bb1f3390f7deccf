"""Verified combines.

A rank hashes each row that it stores for another rank to add up, and that rank hashes it again as it adds it.  Hashes
lie in memory outside of the windows.  A dispatch of one token then tells all ranks what was found: see
moecomm/rounds/corruption.py.

On CPUs the executor compares the hashes (csrc/host/row_checks.h).  On GPUs the source rank of a token sends what it has
found back to the ranks that have rows of it, by the handle, and these compare (csrc/combine/row_hash.cuh).  Nothing
waits for a GPU, and a graph can capture it all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.base.protocol import hash_words, reads_in_place
from moecomm.combine.plan import Combining
from moecomm.dispatch.routed import Handle
from moecomm.dispatch.row_hash import hash_rows
from moecomm.dispatch.small import small_dispatch
from moecomm.dispatch.verify import Verdict, failed, table_of_rows
from moecomm.rounds import corruption
from moecomm.rounds.rounds import Rounds


def checked(rounds: Rounds, combining: Combining, handle: Handle, y: Any) -> HostCheck | DeviceCheck | None:
    """Return the check of a prepared combine that is verified; None for others.

    Also None for a combine between dispatch_begin and dispatch_end: verifying dispatches would overwrite the
    places of the dispatch that has begun.
    """
    assert rounds.sampling is not None, "rounds are verified"
    if not rounds.sampling.due("combine", rounds.session.capturing()) or rounds.begun is not None:
        return None
    try:
        if rounds.sampling.tables is not None:
            return HostCheck(rounds, combining)
        return DeviceCheck(rounds, combining, handle, y if combining.inputs is None else combining.inputs.y)
    except BaseException:
        rounds.sampling.forget("combine")
        raise


class HostCheck:
    """The check of one combine of CPU ranks."""

    def __init__(self, rounds: Rounds, combining: Combining) -> None:
        assert rounds.sampling is not None and rounds.sampling.tables is not None, "of CPU ranks that verify rounds"
        self._rounds, self._combining, self._tables = rounds, combining, rounds.sampling.tables
        self._verdict = Verdict(rounds, "combine")

    def launch(self) -> None:
        self._tables.checks.take()  # of a combine that has failed before it could tell
        record = self._combining.plan.record(self._combining.args)
        self._tables.combine(self._combining.args)
        self._rounds.flight.end(record)

    def stages(self) -> tuple[Callable[[], None], ...]:
        return self._tell, self._verdict.run

    def _tell(self) -> None:
        if not failed(self._rounds) and (row := self._tables.checks.take()) is not None:
            source, token_rank, token = row
            bits = corruption.row_bits(torch.tensor(source), torch.tensor(token_rank * self._rounds.max_tokens + token))
            self._verdict.say(torch.tensor(True), bits)


class DeviceCheck:
    """The check of one combine of GPU ranks.  Rows are pulled, or put to other domains, never pushed in packets.

    The source rank of a token hashes the rows that it adds, and sends the hashes back to the ranks that stored the
    rows, which compare.  Between domains, a forwarder puts the hashes of its rows, and a hash of its sum, beside the
    sum.  The source rank compares the hash of the sum, and sends the hashes of rows back.
    """

    def __init__(self, rounds: Rounds, combining: Combining, handle: Handle, y: torch.Tensor) -> None:
        self._rounds, self._combining, self._handle = rounds, combining, handle
        ranks, args, device = rounds.num_ranks, combining.args, rounds.device
        self._staged = torch.zeros(ranks, rounds.max_tokens, dtype=torch.int64, device=device)
        shape = rounds.session.context.shape
        self._size = shape.domain_ranks or ranks
        words = hash_words(ranks, ranks // self._size)
        self._added = torch.zeros(handle.num_tokens, words, dtype=torch.int64, device=device)
        self._y = y.flatten(0, -2) if reads_in_place(args) else None  # peers read it where it is
        self._unsummed = args.unsummed != 0
        if not self._unsummed:
            args.reduced_rows, combining.reduced_rows = 0, None  # through the ring, which has a place for each hash
        args.staged_hashes, args.added_hashes = self._staged.data_ptr(), self._added.data_ptr()
        self._launch = rounds.session.combiner(args)
        self._small = small_dispatch(rounds, handle.layout, True, self._added.shape[1])
        self._args, self._arrived = self._small.by_handle(handle, self._added)
        rounds.unfinished.append(self._arrived)
        self._verdict = Verdict(rounds, "combine")

    def launch(self) -> None:
        record = self._combining.plan.record(self._combining.args)
        self._launch(self._combining.args)
        self._rounds.flight.end(record)

    def stages(self) -> tuple[Callable[[], None], ...]:
        return self._send, self._compare, self._verdict.run

    def _send(self) -> None:
        if not failed(self._rounds):
            self._small.run(self._args)

    def _compare(self) -> None:
        if failed(self._rounds):
            return
        compared = [*self._differing_sum(), *self._differing_row()]
        if compared:
            is_bad, row = compared[-1]
            for other, its_row in compared[:-1]:
                is_bad, row = is_bad | other, torch.where(other, its_row, row)
            self._verdict.say(is_bad, row)

    def _differing_sum(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compare the sums of other domains with what their forwarders have told: whether one differs, and its bits."""
        rounds, domains = self._rounds, self._rounds.num_ranks // self._size
        if domains == 1 or len(self._added) == 0:
            return []
        computed = self._added[:, rounds.num_ranks : rounds.num_ranks + domains]
        bad = computed != self._added[:, rounds.num_ranks + domains : rounds.num_ranks + 2 * domains]
        place = bad.flatten().int().argmax().view(1)
        token, domain = place // domains, place % domains
        forwarder = domain * self._size + rounds.rank % self._size
        return [(bad.any(), corruption.row_bits(forwarder, rounds.rank * rounds.max_tokens + token))]

    def _differing_row(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compare this rank's rows with what others have found of them: whether one differs, and its bits."""
        rounds = self._rounds
        if len(self._arrived) == 0:
            return []
        src, in_use = table_of_rows(self._handle)
        source = src[:, 0].long().clamp(0, rounds.num_ranks - 1)
        token = src[:, 1].long().clamp(0, rounds.max_tokens - 1)
        if self._y is None:
            sent = self._staged[source, token]
        else:
            sent = hash_rows(self._y, None)
            if self._unsummed:  # a source rank tells the sum of the hashes of a token's rows here
                of_token = source * rounds.max_tokens + token
                self._staged.view(-1).index_add_(0, of_token, torch.where(in_use, sent, 0))
                sent = self._staged[source, token]
        bad = in_use & (source != rounds.rank) & (self._arrived[:, rounds.rank] != sent)
        first = bad.int().argmax().view(1)
        forwarded = None
        if self._size < rounds.num_ranks:  # then the forwarder of this domain has told the hash of a sum
            domains, own = rounds.num_ranks // self._size, rounds.rank // self._size
            told = self._arrived[:, rounds.num_ranks + domains + own]
            forwarded = ((source // self._size != own) & (told != 0))[first]
        flat = (source * rounds.max_tokens + token)[first]
        return [(bad.any(), corruption.row_bits(first.new_tensor(rounds.rank), flat, forwarded))]
