"""Bugs of the kind that protocols have, a small edit each.  Every one must be caught: that is the test of the tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # under csrc/
    old: str  # occurs there exactly once
    new: str
    # "plain", "tsan", "asan": random rounds; "failures": the failing rounds.  With "domains " before: several domains.
    # Of kernels: see tests/emulator/device_mutants.py.
    caught_by: str


RELAXED = "[](u64* flag, u64 value) { __atomic_store_n(flag, value, __ATOMIC_RELAXED); }"

MUTANTS = [
    # Orders: flags that do not cover what they stand for.
    Mutant(
        "payload flag without release",
        "host/deliver.cpp",
        "store_release(arrived, chunk_signal",
        f"{RELAXED}(arrived, chunk_signal",
        "tsan",
    ),
    Mutant(
        "notice without release",
        "host/round.cpp",
        "store_release(&there[w]",
        f"{RELAXED}(&there[w]",
        "tsan",
    ),
    Mutant(
        "reduced flag without release",
        "host/stage.cpp",
        "store_release(at<u64>(c.a.ctx, puller, reduced_for",
        f"{RELAXED}(at<u64>(c.a.ctx, puller, reduced_for",
        "tsan",
    ),
    Mutant(
        "drained flag without release",
        "host/combine.cpp",
        "store_release(at<u64>(c.a.ctx, c.r.neighbor(step), drained_at",
        f"{RELAXED}(at<u64>(c.a.ctx, c.r.neighbor(step), drained_at",
        "tsan",
    ),
    Mutant(
        "credit without release",
        "host/pull.cpp",
        "store_release(at<u64>(c_.a.ctx, c_.r.neighbor(step), credit_of",
        f"{RELAXED}(at<u64>(c_.a.ctx, c_.r.neighbor(step), credit_of",
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
        "has_reached(signal_tag(load_acquire(flag)), wanted",
        "has_reached(signal_tag(__atomic_load_n(flag, __ATOMIC_RELAXED)), wanted",
        "tsan",
    ),
    Mutant(
        "credit read without acquire",
        "host/combine.cpp",
        "load_acquire(credit_of(c, source_rank, chunk)) ==",
        "__atomic_load_n(credit_of(c, source_rank, chunk), __ATOMIC_RELAXED) ==",
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
        "weights of another round",
        "host/stage.cpp",
        "signal_tag(load_relaxed(word)) != c.r.tag) return word;",
        "signal_tag(load_relaxed(word)) == ~0u) return word;",
        "plain",
    ),
    Mutant(
        "a reader that is ahead counts as late",
        "host/combine.cpp",
        "return has_reached(signal_tag(load_acquire(flag)), wanted, c.r.tag);",
        "return signal_tag(load_acquire(flag)) == wanted;",
        "plain",
    ),
    Mutant(
        "one notice instead of two by parity",
        "protocol/layout.h",
        "return w.tagged_words + (round_parity(tag) *",
        "return w.tagged_words + (0 *",
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
        "host/deliver.cpp",
        "        store_release(arrived, chunk",
        "        if (count_[here] > 0) store_release(arrived, chunk",
        "plain",
    ),
    Mutant(
        "last chunk not waited for",
        "host/receive.h",
        "next_[source] < chunks_of(source)",
        "next_[source] < d_.sent(source).num_tokens / d_.sent(source).chunk_tokens",
        "plain",
    ),
    Mutant(
        "only the first chunk awaited",
        "host/pull.cpp",
        "!has_tag(flag(p, chunk.number), c_.r.tag)) return false;",
        "!has_tag(flag(p, 0), c_.r.tag)) return false;",
        "plain",
    ),
    Mutant(
        "second half waits for the round before it",
        "host/dispatch.h",
        "static_cast<i32>(Part::end) ? state.last_dispatch :",
        "static_cast<i32>(Part::end) ? round_tag(state.round) :",
        "plain",
    ),
    # The ring of staged rows.
    Mutant(
        "credit ignored",
        "host/combine.cpp",
        "if (before < 0 || !rows_here(c, source_rank, chunk)) return true;",
        "if (before < c.shape.max_tokens) return true;",
        "plain",
    ),
    Mutant(
        "credit granted too early",
        "host/pull.cpp",
        "void Pull::pull(Chunk& chunk) {\n",
        "void Pull::pull(Chunk& chunk) {\n    if (followed(chunk.number)) grant_credit(chunk.number);\n",
        "tsan",
    ),
    Mutant(
        "ring a chunk longer than it is",
        "host/combine.cpp",
        "if (before < 0 ||",
        "if (before <= 0 ||",
        "tsan",
    ),
    Mutant(
        "credit of the chunk before",
        "host/pull.cpp",
        "word_signal(c_.r.tag, static_cast<u32>(chunk)));",
        "word_signal(c_.r.tag, static_cast<u32>(chunk - 1)));",
        "plain",
    ),
    Mutant(
        "an older credit after a later one",
        "host/pull.cpp",
        "return has_step(chunk.number) && ",
        "return ",
        "plain",
    ),
    Mutant(
        "nothing pulled while a credit is missing",
        "host/combine.cpp",
        "        if (pulls.pull_ready()) continue;\n"
        "        const auto go_on = [&] { "
        "return std::any_of(waiting, waiting + count, can_stage) || pulls.any_ready(); };",
        "        const auto go_on = [&] { return std::any_of(waiting, waiting + count, can_stage); };",
        "plain",
    ),
    Mutant(
        "ranges of another source",
        "host/stage.cpp",
        "[static_cast<i64>(source_rank) * c.shape.max_tokens + chunk]",
        "[static_cast<i64>((source_rank + 1) % c.r.ranks) * c.shape.max_tokens + chunk]",
        "plain",
    ),
    # Places.
    Mutant(
        "slot off by one",
        "host/send.cpp",
        "cursors[d.a.ctx.shape.slots + owner]++;",
        "++cursors[d.a.ctx.shape.slots + owner];",
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
        "host/receive.cpp",
        "copy_row(x + to * a.row_bytes,",
        "if (d_.topk > kMaxTopk) copy_row(x + to * a.row_bytes,",
        "plain",
    ),
    Mutant(
        "weights of padding left",
        "host/receive.cpp",
        "            if (weights != nullptr) weights[row] = 0.0f;\n",
        "",
        "plain",
    ),
    Mutant(
        "weights beside foreign experts left",
        "host/deliver.cpp",
        "weights[there + k] = here ? entry.weight : 0.0f;",
        "weights[there + k] = entry.weight;",
        "plain",
    ),
    Mutant(
        "scales that become columns land beside their row",
        "host/deliver.cpp",
        "const i64 scale_row = d_.scale_columns ? slot : row;",
        "const i64 scale_row = row;",
        "plain",
    ),
    Mutant(
        "only the first row of a token has scale columns",
        "host/receive.cpp",
        "if (rows[k] >= 0) store_scale_column(scales, rows[k]);",
        "if (rows[k] >= 0) return store_scale_column(scales, rows[k]);",
        "plain",
    ),
    Mutant(
        "scale columns of all experts in one group",
        "host/receive.cpp",
        "batched ? row / rows_of_expert : 0,",
        "0,",
        "plain",
    ),
    # Sums.
    Mutant(
        "ranks summed from the last",
        "host/gather.cpp",
        "for (i32 p = 0; p < c_.r.scaleup_ranks && !one_by_one; ++p) {",
        "for (i32 p = c_.r.scaleup_ranks - 1; p >= 0 && !one_by_one; --p) {",
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
        "host/combine.h",
        "return at<const float>(a.ctx, owner, r.header(owner).combine.weights)[row];",
        "return 1.0f;",
        "plain",
    ),
    Mutant(
        "a token's only row staged without its weight",
        "host/stage.cpp",
        "if (!c.own_weights) c.staged_weight(staged) = factor_of(c, source_rank, token, k, rows[k]);",
        "if (!c.own_weights) c.staged_weight(staged) = 1.0f;",
        "plain",
    ),
    Mutant(
        "sum of rows in place not rounded for the wire",
        "host/gather.cpp",
        "    if (c_.staged_type == Type::fp32) return add_row(sum, reinterpret_cast<const u8*>(partial.of)",
        "    if (c_.staged_type < Type::e4m3) return add_row(sum, reinterpret_cast<const u8*>(partial.of)",
        "plain",
    ),
    Mutant(
        "rows summed from the last",
        "host/stage.cpp",
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
    Mutant(
        "power of two below the scale", "host/casts.h", "(bits_of(f) + 0x7fffffu) >> 23", "bits_of(f) >> 23", "plain"
    ),
    # Failures.
    Mutant(
        "a word of a notice read without its tag",
        "host/round.cpp",
        "if (signal_tag(word) != tag) return false;",
        "if (w == 0 && signal_tag(word) != tag) return false;",
        "failures",
    ),
    Mutant(
        "a count read without its tag",
        "host/round.cpp",
        "if (!has_tag(word(), tag)) return false;",
        "if (column == 0 && !has_tag(word(), tag)) return false;",
        "failures",
    ),
    Mutant(
        "counts of a leaving rank believed",
        "host/dispatch.cpp",
        "if (validation.failure != Failure::none || d.repeat) return validation;",
        "if ((validation.failure != Failure::none && validation.failure != Failure::peer_lost) || d.repeat) "
        "return validation;",
        "failures",
    ),
    Mutant(
        "a leaving rank writes its notice alone",
        "host/membership.cpp",
        "announce({}, std::vector<i32>(ctx.window.columns).data());",
        "announce({}, nullptr);",
        "failures",
    ),
    Mutant(
        "end of a void dispatch waits",
        "host/dispatch.cpp",
        "    if (Round::state_of(args.ctx).last_dispatch == 0) return;  // the first half was invalid\n",
        "",
        "failures",
    ),
    Mutant("void round can be ended", "host/dispatch.cpp", "good ? d.r.tag : 0;", "d.r.tag;", "failures"),
    Mutant(
        "abort between the halves not seen",
        "host/dispatch.cpp",
        "    if (d.r.watch.aborted()) return;\n    Team team(args.workers);\n    d.r.load_headers",
        "    Team team(args.workers);\n    d.r.load_headers",
        "failures",
    ),
    Mutant(
        "handles of a combine not looked at",
        "host/combine.cpp",
        "intact = is_intact(tables_of(args)) &&",
        "intact = true &&",
        "failures",
    ),
    Mutant(
        "handles of a repeat not looked at", "host/dispatch.cpp", "is_intact(tables_of(d.a)) &&", "true &&", "failures"
    ),
    Mutant("sums of handles not compared", "host/seal.cpp", "== reader.digest()", "!= 0", "failures"),
    Mutant("who has sent what not looked at", "host/seal.cpp", "if (!read_sent()) return false;", "", "failures"),
    Mutant(
        "handles not compared", "protocol/slots.h", "theirs.route_round != mine.route_round &&", "false &&", "failures"
    ),
    Mutant(
        "round of a dispatch not kept",
        "host/dispatch.cpp",
        "if (!d.repeat) round_of(",
        "if (false) round_of(",
        "failures",
    ),
    Mutant(
        "a handle not told",
        "host/combine.cpp",
        "n.route_round = round_of(c.a.route, c.r.ranks);",
        "n.route_round = 0;",
        "failures",
    ),
    Mutant(
        "a repeat like any other",
        "host/dispatch.cpp",
        "if (d.repeat)\n        n.route_round",
        "if (false)\n        n.route_round",
        "failures",
    ),
    Mutant("ids not checked", "host/plan.cpp", "valid_id(slot, shape_.slots);", "slot >= -1000;", "failures"),
    Mutant(
        "weights not checked", "host/plan.cpp", "BadEntry bad = bad_weight(first, end);", "BadEntry bad;", "failures"
    ),
    Mutant(
        "capacity not checked",
        "host/plan.cpp",
        "rows_needed(p) > r_.header(p).max_rows",
        "rows_needed(p) > (1ll << 40)",
        "failures",
    ),
    Mutant(
        "capacity of an expert not checked", "host/plan.cpp", "total_[e] > group", "total_[e] > (1ll << 40)", "failures"
    ),
    Mutant(
        "every rank has as many rows of an expert as we have",
        "host/plan.cpp",
        "batched_group(r_.header(rank).max_rows",
        "batched_group(a_.max_rows",
        "plain",
    ),
    Mutant("void round does not count", "host/dispatch.cpp", "return d.r.finish();", "return;", "failures"),
    Mutant(
        "abort word not looked at",
        "protocol/deadline.h",
        "        back_off(++tries_);\n        if (load_relaxed(d.abort_here) != 0 || ",
        "        back_off(++tries_);\n        if (",
        "failures",
    ),
    Mutant("peers not told", "host/wait.cpp", "    abort_all_windows(ctx_, word);\n", "", "failures"),
    Mutant(
        "messenger named instead of the culprit", "host/wait.cpp", "abort_culprit(word);", "missing.peer;", "failures"
    ),
    Mutant(
        "later record overwrites the first",
        "protocol/record.h",
        "    if (load_acquire(&out->code) != 0) return;\n",
        "",
        "failures",
    ),
]
