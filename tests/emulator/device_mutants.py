"""Bugs of the kind that kernels have, a small edit each.  Every one must be caught: that is the test of the tests."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """Attributes:
    way: of test_mutants.WAYS, by which it must be caught.
    file: under csrc/dispatch or csrc/combine.
    old: occurs there exactly once.
    """

    name: str
    way: str
    file: str
    old: str
    new: str


MUTANTS = [
    # Few tokens, in packets.
    Mutant(
        "rows of all sources begin at the same place",
        "packets",
        "dispatch/unpack.cuh",
        "start + c.shared.into[source * cfg.ranges().most() + local];",
        "start;",
    ),
    Mutant(
        "a chunk begins where its word of tokens does",
        "packets",
        "dispatch/unpack.cuh",
        "first += __popc(arriving & ((1u << bit) - 1));",
        "",
    ),
    Mutant(
        "a token is wanted in place of the one before",
        "packets",
        "dispatch/count.cuh",
        "1u << token % 32);",
        "1u << (token + 1) % 32);",
    ),
    Mutant(
        "packets are read before they are there",
        "packets",
        "combine/collect.cuh",
        "here = here && is_tag(words[i].step[step].y);",
        "here = true;",
    ),
    Mutant(
        "rows of a packet are added without weights",
        "packets",
        "combine/push.cuh",
        "kWeighted ? __fmul_rn(weight, columns[i]) : columns[i]);",
        "columns[i]);",
    ),
    Mutant(
        "a rank pushes its first row for all",
        "packets",
        "combine/push.cuh",
        "f.flat_row = rows.first + row;",
        "f.flat_row = rows.first;",
    ),
    # Rows in one domain.
    Mutant(
        "tokens of one step get the same row of an expert",
        "rows",
        "dispatch/place.cuh",
        "cursors[expert] + __popc(same & below)",
        "cursors[expert]",
    ),
    Mutant(
        "rows of earlier sources are not counted",
        "rows",
        "dispatch/place.cuh",
        "cursors[column] += c.shared.base[column];",
        ";",
    ),
    Mutant(
        "only the first piece is copied to other rows of a token",
        "rows",
        "dispatch/receive.cuh",
        "(at.present & lanes_below()) != 0;",
        "(at.present & lanes_below()) != 0 && at.piece == 0;",
    ),
    Mutant(
        "a rank is told the rows at other ranks",
        "rows",
        "dispatch/metadata.cuh",
        "= e.owner == rank ? e.row : -1;",
        "= e.row;",
    ),
    Mutant(
        "reduce warps pass over a row",
        "rows",
        "combine/reduce_rows.cuh",
        "at += cfg.reduce_warps;",
        "at += cfg.reduce_warps + 1;",
    ),
    Mutant(
        "a place is staged to before it is free",
        "rows",
        "combine/reduce_rows.cuh",
        "if (before >= 0) {",
        "if (before >= 1 << 20) {",
    ),
    Mutant(
        "no credit is given",
        "rows",
        "combine/pull.cuh",
        "if (!gives_credit) return;",
        "return;",
    ),
    Mutant(
        "the last vector of a piece is not added",
        "rows",
        "combine/gather.cuh",
        "if (v * kWarp + lane_id() >= vectors) continue;",
        "if (v * kWarp + lane_id() >= vectors - 1) continue;",
    ),
    # Rows that forwarders relay between domains.
    Mutant(
        "one rank reads the first piece of a row again",
        "relays",
        "combine/scaleout/gather_rows.cuh",
        "if (order >= 0) source += Ring::kBytes;",
        "if (order > 0) source += Ring::kBytes;",
    ),
    Mutant(
        "a pair is added where one row is left",
        "relays",
        "combine/scaleout/gather_rows.cuh",
        "added + 1 < item.sources",
        "added < item.sources",
    ),
    Mutant(
        "sums are put before their places are free",
        "relays",
        "combine/scaleout/return_forward.cuh",
        "place_free = tokens_left == 0 || chunk_of(nth) < ring_of(nth);",
        "place_free = true;",
    ),
    Mutant(
        "only the first sums of a domain are awaited",
        "relays",
        "combine/scaleout/source_rank.cuh",
        "|| seen == chunk) return true;",
        "|| seen >= 0) return true;",
    ),
    Mutant(
        "a credit is missing",
        "relays",
        "combine/scaleout/flags.cuh",
        "chunk + ring < c.chunks()",
        "chunk + ring < c.chunks() - 1",
    ),
    Mutant(
        "a forwarder takes a head of an earlier round",
        "relays",
        "dispatch/scaleout/forward.cuh",
        "t.comes = load_fresh(head) == static_cast<i32>(c.round.tag) && load_fresh(head + 1) == number;",
        "t.comes = true;",
    ),
    Mutant(
        "a forwarder does not wait",
        "relays",
        "dispatch/scaleout/forward.cuh",
        "if (lane_id() == 0) arrived = await_signal(",
        "if (lane_id() == kWarp) arrived = await_signal(",
    ),
    # Rows that go straight to ranks of other domains.
    Mutant(
        "experts of other ranks are taken for its own",
        "straight",
        "dispatch/scaleout/forward.cuh",
        "if (t.entry.owner != c.me()) t.entry.owner = -1;",
        "",
    ),
    Mutant(
        "direct rows are not awaited",
        "straight",
        "combine/scaleout/source_rank.cuh",
        "if (c.domains().reaches(rank) || ((owners & ~here) >> rank & 1) == 0) continue;",
        "continue;",
    ),
    Mutant(
        "the chunk that completes a signal is another one",
        "straight",
        "combine/scaleout/direct.cuh",
        "chunk == first);",
        "chunk == first + 1);",
    ),
]
