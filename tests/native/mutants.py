"""Bugs of the kind that protocols have, a small edit each.  Every one must be caught: that is the test of the tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # under csrc/
    old: str  # occurs there exactly once
    new: str
    caught_by: str  # "plain", "tsan": random rounds; "failures": the failing rounds


RELAXED = "[](u64* flag, u64 value) { __atomic_store_n(flag, value, __ATOMIC_RELAXED); }"

MUTANTS = [
    # Orders: flags that do not cover what they stand for.
    Mutant(
        "payload flag without release",
        "host/dispatch.cpp",
        "store_release(at<u64>(d.a.ctx, rank, arrived_at",
        f"{RELAXED}(at<u64>(d.a.ctx, rank, arrived_at",
        "tsan",
    ),
    Mutant(
        "notice without release",
        "host/round.cpp",
        "store_release(&there->tag",
        f"{RELAXED}(&there->tag",
        "tsan",
    ),
    Mutant(
        "reduced flag without release",
        "host/combine.cpp",
        "store_release(at<u64>(c.a.ctx, source, reduced_at",
        f"{RELAXED}(at<u64>(c.a.ctx, source, reduced_at",
        "tsan",
    ),
    Mutant(
        "drained flag without release",
        "host/combine.cpp",
        "store_release(at<u64>(c.a.ctx, c.r.peer(turn), drained_at",
        f"{RELAXED}(at<u64>(c.a.ctx, c.r.peer(turn), drained_at",
        "tsan",
    ),
    Mutant(
        "flags read without acquire",
        "host/wait.h",
        "return signal_tag(load_acquire(flag)) == tag;",
        "return signal_tag(__atomic_load_n(flag, __ATOMIC_RELAXED)) == tag;",
        "tsan",
    ),
    Mutant(
        "drained flag read without acquire",
        "host/combine.cpp",
        "static_cast<i32>(signal_tag(load_acquire(flag)) - round)",
        "static_cast<i32>(signal_tag(__atomic_load_n(flag, __ATOMIC_RELAXED)) - round)",
        "tsan",
    ),
    # Rounds that run into each other.
    Mutant(
        "staging overwritten before it is drained",
        "host/combine.cpp",
        "last != 0 && !await_drained(c, last)",
        "last == ~0u && !await_drained(c, last)",
        "tsan",
    ),
    Mutant(
        "a reader that is ahead counts as late",
        "host/combine.cpp",
        "- round) >= 0;",
        "- round) == 0;",
        "plain",
    ),
    Mutant(
        "one notice instead of two by parity",
        "protocol/layout.h",
        "return w.notices + ((round & 1) *",
        "return w.notices + ((round & 0) *",
        "plain",
    ),
    Mutant(
        "no notice without tokens",
        "host/dispatch.cpp",
        "    announce(d, count(",
        "    if (args.num_tokens > 0) announce(d, count(",
        "plain",
    ),
    Mutant(
        "no flag for a chunk without rows",
        "host/dispatch.cpp",
        "        store_release(at<u64>(d.a.ctx, rank, arrived_at",
        "        if (count[rank] > 0) store_release(at<u64>(d.a.ctx, rank, arrived_at",
        "plain",
    ),
    Mutant(
        "last chunk not waited for",
        "host/dispatch.cpp",
        "next_[source] < ceil_div(n.num_tokens, n.chunk_tokens)",
        "next_[source] < n.num_tokens / n.chunk_tokens",
        "plain",
    ),
    Mutant(
        "block counted from the start of the reducer",
        "host/combine.cpp",
        "(slot[p] - c_.slot_base[p]) / kMinChunk",
        "slot[p] / kMinChunk",
        "plain",
    ),
    # Places.
    Mutant(
        "slot off by one",
        "host/dispatch.cpp",
        "cursors[d.a.ctx.shape.experts + owner]++;",
        "++cursors[d.a.ctx.shape.experts + owner];",
        "plain",
    ),
    Mutant(
        "base counts our own rows too",
        "host/plan.cpp",
        "if (source == r_.me) earlier_ = total_;",
        "if (source == r_.me + 1) earlier_ = total_;",
        "plain",
    ),
    Mutant(
        "alignment ignored",
        "host/plan.cpp",
        "start += aligned_group(total_[e], a_.alignment);",
        "start += total_[e];",
        "plain",
    ),
    Mutant(
        "further rows of a token not copied",
        "host/dispatch.cpp",
        "copy_payload(d_, d_.r.me, rows[k],",
        "if (d_.topk > kMaxTopk) copy_payload(d_, d_.r.me, rows[k],",
        "plain",
    ),
    Mutant(
        "weights of padding left",
        "host/dispatch.cpp",
        "            if (weights != nullptr) weights[row] = 0.0f;\n",
        "",
        "plain",
    ),
    Mutant(
        "weights beside foreign experts left",
        "host/dispatch.cpp",
        "weights[there + k] = here ? w : 0.0f;",
        "weights[there + k] = w;",
        "plain",
    ),
    # Sums.
    Mutant(
        "ranks summed from the last",
        "host/combine.cpp",
        "for (i32 p = 0; p < c_.r.ranks && !several; ++p) {",
        "for (i32 p = c_.r.ranks - 1; p >= 0 && !several; --p) {",
        "plain",
    ),
    Mutant(
        "caller gets its rows back while peers read them",
        "host/combine.cpp",
        "if (c.in_place && !await_drained(c, c.r.tag)) return;",
        "",
        "tsan",
    ),
    Mutant(
        "rows in place not weighted",
        "host/combine.cpp",
        "from.weights != 0 ? at<const float>(a.ctx, rank, from.weights)[row] : 1.0f;",
        "1.0f;",
        "plain",
    ),
    Mutant(
        "sum of rows in place not rounded for the wire",
        "host/combine.cpp",
        "    if (c_.staged_type == Type::fp32) return add_row(sum, reinterpret_cast<const u8*>(partial)",
        "    if (c_.staged_type < Type::e4m3) return add_row(sum, reinterpret_cast<const u8*>(partial)",
        "plain",
    ),
    Mutant(
        "rows summed from the last",
        "host/combine.cpp",
        "    for (i32 k = 0; k < c.topk; ++k)\n        if (rows[k] >= 0) from.add(",
        "    for (i32 k = c.topk - 1; k >= 0; --k)\n        if (rows[k] >= 0) from.add(",
        "plain",
    ),
    Mutant(
        "product and sum rounded once",
        "host/rows.cpp",
        "s = s + fa * Kind::load(a[i]);",
        "s = __builtin_fmaf(fa, Kind::load(a[i]), s);",
        "plain",
    ),
    Mutant(
        "only the last four rows count", "host/rows.cpp", "float s = Fresh ? 0.0f : sum[i];", "float s = 0.0f;", "plain"
    ),
    Mutant("ties rounded up", "host/casts.h", " + ((bits >> 16) & 1u)) >> 16;", " + 1u) >> 16;", "plain"),
    # Failures.
    Mutant("ids not checked", "host/plan.cpp", "if (!valid_id(id, shape_.experts)) {", "if (id < -1000) {", "failures"),
    Mutant(
        "weights not checked", "host/plan.cpp", "BadEntry bad = bad_weight(first, end);", "BadEntry bad;", "failures"
    ),
    Mutant(
        "capacity not checked",
        "host/plan.cpp",
        "rows_needed(p) > r_.notice(p).max_rows",
        "rows_needed(p) > (1ll << 40)",
        "failures",
    ),
    Mutant("void round does not count", "host/dispatch.cpp", "return d.r.finish();", "return;", "failures"),
    Mutant(
        "abort word not looked at",
        "protocol/deadline.h",
        "        back_off(tries);\n        if (load_relaxed(d.abort_here) != 0 || ",
        "        back_off(tries);\n        if (",
        "failures",
    ),
    Mutant("peers not told", "host/wait.cpp", "    tell_everybody(ctx_, word);\n", "", "failures"),
    Mutant(
        "messenger named instead of the culprit", "host/wait.cpp", "abort_culprit(word);", "missing.peer;", "failures"
    ),
    Mutant(
        "later record overwrites the first",
        "host/wait.cpp",
        "    if (load_acquire(&out->code) != 0) return;\n",
        "",
        "failures",
    ),
]
