"""More of them, of the rules that several domains bring."""

from __future__ import annotations

from .mutants import Mutant

DOMAIN_MUTANTS = [
    # The link.
    Mutant(
        "signal overtakes what was put before it",
        "host/scaleout_link.cpp",
        "if (chosen->is_signal && std::any_of(",
        "if (left.empty() && std::any_of(",
        "domains plain",
    ),
    Mutant(
        "signal without release",
        "host/scaleout_link.cpp",
        "order.added, __ATOMIC_RELEASE",
        "order.added, __ATOMIC_RELAXED",
        "domains tsan",
    ),
    Mutant(
        "signal made what it lacks of nothing",
        "host/scaleout_link.cpp",
        "value - signaled}",
        "value}",
        "domains plain",
    ),
    Mutant(
        "mail read before its signal",
        "host/round.cpp",
        "return reaches(from) || ",
        "return ctx.rank >= 0 || ",
        "domains tsan",
    ),
    # Dispatch.
    Mutant(
        "landed before the tokens are put",
        "host/send.cpp",
        "    Delivery delivery(d_, d_.r.me, next_);\n",
        "    for (i32 domain = 0; domain < d_.r.domains(); ++domain)\n"
        "        if (domain != d_.r.domain())\n"
        "            d_.r.link().signal(d_.r.forwarder(domain), received_signal(d_.a.ctx.shape, "
        "d_.r.column_at_forwarder(domain), "
        "next_, d_.a.chunk_tokens), word_signal(d_.r.tag, static_cast<u32>(next_)));\n"
        "    Delivery delivery(d_, d_.r.me, next_);\n",
        "domains plain",
    ),
    Mutant(
        "a token of a chunk that lay there before",
        "host/scaleout_forward.cpp",
        "head.tag == d_.r.tag && head.token == number;",
        "head.tag == d_.r.tag;",
        "domains plain",
    ),
    Mutant(
        "a token of an earlier round",
        "host/scaleout_forward.cpp",
        "head.tag == d_.r.tag && head.token == number;",
        "head.token == number;",
        "domains plain",
    ),
    Mutant(
        "landing credit ignored",
        "host/send.cpp",
        "if (chunk_before() < 0) return -1;",
        "if (chunk_before() < (1 << 30)) return -1;",
        "domains plain",
    ),
    Mutant(
        "landing credit before the tokens are stored",
        "host/scaleout_forward.cpp",
        "    Delivery delivery(d_, column.source, chunk);\n",
        "    if (chunk + ring(column) < chunks(column))\n"
        "        d_.r.link().signal(column.source, receive_credit(shape, d_.r.domain(), chunk, "
        "sent(column).chunk_tokens), word_signal(d_.r.tag, static_cast<u32>(chunk)));\n"
        "    Delivery delivery(d_, column.source, chunk);\n",
        "domains tsan",
    ),
    Mutant(
        "forwarder raises its flags before it stores",
        "host/scaleout_forward.cpp",
        "    Delivery delivery(d_, column.source, chunk);\n",
        "    Delivery delivery(d_, column.source, chunk);\n    delivery.raise_flags();\n",
        "domains plain",
    ),
    Mutant(
        "nothing forwarded while a place is missing",
        "host/dispatch.cpp",
        "        forwarder.forward_arrived();\n        if (inbox != nullptr) inbox->take_arrived();\n"
        "        const auto go_on = [&] { return sender.has_place() || forwarder.any_arrived() || ",
        "        if (inbox != nullptr) inbox->take_arrived();\n"
        "        const auto go_on = [&] { return sender.has_place() || ",
        "domains plain",
    ),
    Mutant(
        "first half ends while others wait for credits",
        "host/dispatch.cpp",
        "for (; forwarder.owes_credit(); ",
        "for (; false; ",
        "domains plain",
    ),
    Mutant(
        "second half is forwarded from the start",
        "host/scaleout_forward.cpp",
        "while (column.next < chunks(column) && forwarded()) column.next += stride_;",
        "if (column.next < chunks(column) && forwarded()) column.next += stride_;",
        "domains plain",
    ),
    Mutant(
        "notices of a begun dispatch forgotten",
        "host/dispatch.cpp",
        "    d.r.load_headers();\n",
        "",
        "domains plain",
    ),
    # Combine.
    Mutant(
        "route of a token that did not land left",
        "host/scaleout_forward.cpp",
        "if (arrived == nullptr) return static_cast<void>(std::fill_n(kept, forwarded_words(shape), -1));",
        "if (arrived == nullptr) return;",
        "domains plain",
    ),
    Mutant(
        "domains summed from the last",
        "host/scaleout_source_rank.cpp",
        "    for (i32 domain = 0; domain < c_.r.domains(); ++domain) {\n"
        "        if (!comes_from(domain, token)) continue;",
        "    for (i32 domain = c_.r.domains() - 1; domain >= 0; --domain) {\n"
        "        if (!comes_from(domain, token)) continue;",
        "domains plain",
    ),
    Mutant(
        "sums of other domains not awaited",
        "host/scaleout_source_rank.cpp",
        "if (comes_from(domain, token)) return c_.r.forwarder(domain);",
        "if (comes_from(domain, token)) return -1;",
        "domains plain",
    ),
    Mutant(
        "returned before it is put, credit before it is read",
        "host/pull.cpp",
        "void Pull::pull(Chunk& chunk) {\n",
        "void Pull::pull(Chunk& chunk) {\n    pass_on(chunk.number);\n",
        "domains plain",
    ),
    Mutant(
        "credit for what was returned ignored",
        "host/scaleout_return_forward.cpp",
        "if (chunk < ring_ || !any_ours(chunk)) return true;",
        "if (chunk < (1 << 30)) return true;",
        "domains plain",
    ),
    Mutant(
        "gradients of another domain lost",
        "host/scaleout_return_forward.cpp",
        "owner >= 0 && c_.r.reaches(owner) ?",
        "owner >= 0 && owner == c_.r.me ?",
        "domains plain",
    ),
    # Straight.
    Mutant(
        "straight rows told before they are put",
        "host/scaleout_direct.cpp",
        "if (__atomic_sub_fetch(&left_[rank], 1, __ATOMIC_ACQ_REL) != 0 || ",
        "if (__atomic_sub_fetch(&left_[rank], 1, __ATOMIC_ACQ_REL) < 0 || ",
        "domains plain",
    ),
    Mutant(
        "a straight token of an earlier round",
        "host/scaleout_direct.cpp",
        "if (head.tag != d_.r.tag || head.token != number) continue;",
        "if (head.token != number) continue;",
        "domains plain",
    ),
    Mutant(
        "straight rows of one parity",
        "protocol/layout.h",
        "return w.packets + (round_parity(tag) * static_cast<u64>(s.ranks) + from) * static_cast<u64>(s.packet_bytes);",
        "return w.packets + (0 * static_cast<u64>(s.ranks) + from) * static_cast<u64>(s.packet_bytes);",
        "domains tsan",
    ),
    Mutant(
        "straight rows read before their signal",
        "host/scaleout_source_rank.cpp",
        "load_acquire(direct_from(rank)) == tag_signal(c_.r.tag)) continue;",
        "load_acquire(direct_from(rank)) == tag_signal(c_.r.tag)) continue;\n        return -1;",
        "domains plain",
    ),
    Mutant(
        "straight rows raise the flags of neighbours",
        "host/scaleout_direct.cpp",
        "Delivery here(d_, source, chunk, true);",
        "Delivery here(d_, source, chunk, false);",
        "domains plain",
    ),
    Mutant(
        "a dispatch that begins goes straight",
        "host/dispatch.h",
        "goes_direct(a.ctx.shape, a.num_tokens) && a.part == static_cast<i32>(Part::whole);",
        "goes_direct(a.ctx.shape, a.num_tokens);",
        "domains plain",
    ),
    Mutant(
        "straight rows wait for places of others",
        "host/combine.cpp",
        "    put_direct(c, sent, worker, stride, scratch.of);\n"
        "    for (i32 chunk = worker; chunk < chunks && !c.in_place; chunk += stride) {\n"
        "        if (!stage_for_all(c, pulls, chunk, scratch.of)) return;\n",
        "    for (i32 chunk = worker; chunk < chunks && !c.in_place; chunk += stride) {\n"
        "        if (!stage_for_all(c, pulls, chunk, scratch.of)) return;\n"
        "        if (chunk + stride >= chunks) put_direct(c, sent, worker, stride, scratch.of);\n",
        "domains plain",
    ),
    Mutant(
        "straight rows not added by domain",
        "host/scaleout_source_rank.cpp",
        "    add_staged(sum, rounded, c_.scaleout_type, 1.0f, n, 0, n);\n}",
        "    for (i32 rank = domain * c_.r.scaleup_ranks; rank < (domain + 1) * c_.r.scaleup_ranks; ++rank)\n"
        "        if (slots[rank] >= 0)\n"
        "            add_staged(sum, c_.put_by(rank, token), c_.staged_type, 1.0f, c_.a.hidden, column, n);\n}",
        "domains plain",
    ),
    # Weights that source ranks give.
    Mutant(
        "weights put after the mail",
        "host/combine.cpp",
        "    if (intact) post_weights(c);\n    announce(c, intact);\n",
        "    announce(c, intact);\n    if (intact) post_weights(c);\n",
        "domains plain",
    ),
    Mutant(
        "weights looked at before the mail is here",
        "host/stage.cpp",
        "    if (!c.r.tagged_words_arrived(source_rank)) return c.r.signal(tagged_words_signal(source_rank));\n",
        "",
        "domains tsan",
    ),
    Mutant(
        "straight rows weighed before the weights are here",
        "host/combine.cpp",
        "        if (c.own_weights && c.direct_to(source_rank) && !c.await_agreement()) return;\n",
        "",
        "domains plain",
    ),
    Mutant(
        "a forwarder weighs by what the dispatch carried",
        "host/combine.h",
        "if (own_weights) return own_weight(",
        "if (own_weights && source_rank == r.me) return own_weight(",
        "domains plain",
    ),
    Mutant(
        "weights of other domains of one parity",
        "host/combine.cpp",
        "c.r.link().put(to, weight_at(c.a.ctx.window, c.shape, c.r.tag, c.r.me, 0)",
        "c.r.link().put(to, weight_at(c.a.ctx.window, c.shape, 0, c.r.me, 0)",
        "domains plain",
    ),
    # Failures.
    Mutant(
        "other domains not told",
        "host/wait.cpp",
        "            link_of(ctx).abort(p, word);\n",
        "",
        "domains failures",
    ),
]
