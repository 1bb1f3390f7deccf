"""Bugs of the kind that kernels have, a small edit each.  Every one must be caught: that is the test of the tests."""

from __future__ import annotations

from ..native.mutants import Mutant

# Under csrc/dispatch or csrc/combine; `caught_by`: of test_mutants.WAYS.
MUTANTS = [
    # Few tokens, in packets.
    Mutant(
        "rows of all sources begin at the same place",
        "dispatch/unpack.cuh",
        "start + c.shared.into[source * cfg.ranges().most() + local];",
        "start;",
        "packets",
    ),
    Mutant(
        "a chunk begins where its word of tokens does",
        "dispatch/unpack.cuh",
        "first += __popc(arriving & ((1u << bit) - 1));",
        "",
        "packets",
    ),
    Mutant(
        "a token is wanted in place of the one before",
        "dispatch/count.cuh",
        "1u << token % 32);",
        "1u << (token + 1) % 32);",
        "packets",
    ),
    Mutant(
        "packets are read before they are there",
        "combine/collect.cuh",
        "here = here && is_tag(words[i].step[step].y);",
        "here = true;",
        "packets",
    ),
    Mutant(
        "rows of a packet are added without weights",
        "combine/push.cuh",
        "kWeighted ? __fmul_rn(weight, columns[i]) : columns[i]);",
        "columns[i]);",
        "packets",
    ),
    Mutant(
        "a rank pushes its first row for all",
        "combine/push.cuh",
        "f.flat_row = rows.first + row;",
        "f.flat_row = rows.first;",
        "packets",
    ),
    # Rows in one domain.
    Mutant(
        "tokens of one step get the same row of an expert",
        "dispatch/place.cuh",
        "cursors[expert] + __popc(same & below)",
        "cursors[expert]",
        "rows",
    ),
    Mutant(
        "rows of earlier sources are not counted",
        "dispatch/place.cuh",
        "cursors[column] += c.shared.base[column];",
        ";",
        "rows",
    ),
    Mutant(
        "only the first piece is copied to other rows of a token",
        "dispatch/receive.cuh",
        "(at.present & lanes_below()) != 0;",
        "(at.present & lanes_below()) != 0 && at.piece == 0;",
        "rows",
    ),
    Mutant(
        "a rank is told the rows at other ranks",
        "dispatch/metadata.cuh",
        "= e.owner == rank ? e.row : -1;",
        "= e.row;",
        "rows",
    ),
    Mutant(
        "reduce warps pass over a row",
        "combine/reduce_rows.cuh",
        "at += cfg.reduce_warps;",
        "at += cfg.reduce_warps + 1;",
        "rows",
    ),
    Mutant(
        "a place is staged to before it is free",
        "combine/reduce_rows.cuh",
        "if (before >= 0) {",
        "if (before >= 1 << 20) {",
        "rows",
    ),
    Mutant(
        "no credit is given",
        "combine/pull.cuh",
        "if (!gives_credit) return;",
        "return;",
        "rows",
    ),
    Mutant(
        "the last vector of a piece is not added",
        "combine/gather.cuh",
        "if (v * kWarp + lane_id() >= vectors) continue;",
        "if (v * kWarp + lane_id() >= vectors - 1) continue;",
        "rows",
    ),
    # Rows that forwarders relay between domains.
    Mutant(
        "one rank reads the first piece of a row again",
        "combine/scaleout/gather_rows.cuh",
        "if (order >= 0) source += Ring::kBytes;",
        "if (order > 0) source += Ring::kBytes;",
        "relays",
    ),
    Mutant(
        "a pair is added where one row is left",
        "combine/scaleout/gather_rows.cuh",
        "added + 1 < item.sources",
        "added < item.sources",
        "relays",
    ),
    Mutant(
        "sums are put before their places are free",
        "combine/scaleout/return_forward.cuh",
        "place_free = tokens_left == 0 || chunk_of(nth) < ring_of(nth);",
        "place_free = true;",
        "relays",
    ),
    Mutant(
        "only the first sums of a domain are awaited",
        "combine/scaleout/source_rank.cuh",
        "|| seen == chunk) return true;",
        "|| seen >= 0) return true;",
        "relays",
    ),
    Mutant(
        "a credit is missing",
        "combine/scaleout/flags.cuh",
        "chunk + ring < c.chunks()",
        "chunk + ring < c.chunks() - 1",
        "relays",
    ),
    Mutant(
        "a forwarder takes a head of an earlier round",
        "dispatch/scaleout/forward.cuh",
        "t.comes = load_fresh(head) == static_cast<i32>(c.round.tag) && load_fresh(head + 1) == number;",
        "t.comes = true;",
        "relays",
    ),
    Mutant(
        "a forwarder does not wait",
        "dispatch/scaleout/forward.cuh",
        "if (lane_id() == 0) arrived = await_signal(",
        "if (lane_id() == kWarp) arrived = await_signal(",
        "relays",
    ),
    # Rows that go straight to ranks of other domains.
    Mutant(
        "experts of other ranks are taken for its own",
        "dispatch/scaleout/forward.cuh",
        "if (t.entry.owner != c.me()) t.entry.owner = -1;",
        "",
        "straight",
    ),
    Mutant(
        "direct rows are not awaited",
        "combine/scaleout/source_rank.cuh",
        "if (c.domains().reaches(rank) || ((owners & ~here) >> rank & 1) == 0) continue;",
        "continue;",
        "straight",
    ),
    Mutant(
        "the chunk that completes a signal is another one",
        "combine/scaleout/direct.cuh",
        "chunk == first);",
        "chunk == first + 1);",
        "straight",
    ),
]
