// Dispatch on CPU ranks: count, announce, validate, send, forward, receive.
#include "dispatch.h"

#include <optional>
#include <thread>

#include "choose.h"
#include "executor.h"
#include "receive.h"
#include "scaleout_forward.h"
#include "seal.h"
#include "send.h"
#include "team.h"

namespace moecomm::host {

namespace {

BadEntry count(Dispatch& d, Team& team) {
    const Timed timed = d.r.watch.timed("count");
    if (d.repeat) {
        const bool intact = is_intact(tables_of(d.a)) && !is_stale(d.r.mask, round_of(d.a.route, d.r.ranks));
        return intact ? BadEntry{} : BadEntry{Argument::handle};
    }
    std::vector<BadEntry> bad(team.size());
    team.run([&](i32 worker) {
        for (i32 chunk = worker; chunk < d.plan.own_chunks(); chunk += team.size()) bad[worker] = worse(bad[worker], d.plan.count(chunk));
    });
    BadEntry worst;
    for (const BadEntry& b : bad) worst = worse(worst, b);
    return worst;
}

void announce(Dispatch& d, const BadEntry& bad) {
    const DispatchArgs& a = d.a;
    RoundHeader n{};
    n.status = static_cast<u32>(bad.argument);
    n.call = a.call;
    if (d.repeat)
        n.route_round = round_of(a.route, d.r.ranks);
    else if (bad.argument != Argument::none)
        n.bad_value = bad.value;
    else if (a.ctx.placed != 0)
        n.route_round = generation_of(d.r.placement);
    n.num_tokens = a.num_tokens;
    n.chunk_tokens = a.chunk_tokens;
    n.max_rows = a.max_rows;
    n.dispatch.x = a.out_x;
    n.dispatch.scales = a.out_scales;
    n.dispatch.src = a.out_src;
    n.dispatch.topk_idx = a.out_topk_idx;
    n.dispatch.weights = a.out_weights;
    n.dispatch.rows = a.out_rows;
    d.r.announce(n, d.repeat ? nullptr : d.plan.total_up(bad.argument != Argument::none));
}

// Validate the headers and counts of all ranks; nullopt if a wait has failed.
std::optional<ValidationResult> agree(Dispatch& d) {
    const Timed timed = d.r.watch.timed("agree");
    if (!d.r.await_headers()) return std::nullopt;
    const ValidationResult validation = d.r.validate_headers();
    if (validation.failure != Failure::none || d.repeat) return validation;
    if (!d.r.await_counts()) return std::nullopt;
    d.plan.gather();
    return d.plan.validate_capacity();
}

// Forward, and with `inbox` receive, until the next chunk has a place at its forwarders, which may themselves wait for this rank.
// False if the round has failed.
bool await_place(Dispatch& d, const Sender& sender, Forward& forwarder, Inbox* inbox) {
    while (!sender.has_place()) {
        forwarder.forward_arrived();
        if (inbox != nullptr) inbox->take_arrived();
        const auto go_on = [&] { return sender.has_place() || forwarder.any_arrived() || (inbox != nullptr && inbox->any_arrived()); };
        if (!d.r.watch.until(Phase::drained, go_on, [&] { return sender.missing(); })) return false;
    }
    return true;
}

// First half of a split dispatch: send all chunks, and forward only those whose credits peers need for sending theirs.
void send(Dispatch& d, i32 worker, i32 stride) {
    Sender sender(d, worker, stride);
    Forward forwarder(d, worker, stride);
    const Timed timed = d.r.watch.timed("send");
    while (!sender.done()) {
        if (!await_place(d, sender, forwarder, nullptr)) return;
        sender.send();
        forwarder.forward_arrived();
    }
    for (; forwarder.owes_credit(); forwarder.forward_arrived())
        if (!d.r.watch.until(Phase::payload, [&] { return forwarder.any_arrived(); }, [&] { return forwarder.missing(); })) return;
}

// Forward and receive all remaining chunks; return early if the round fails.
void receive(Dispatch& d, Forward& forwarder, DirectArrivals& direct, Inbox& inbox) {
    PeerWaits waits(d.a.ctx, Counter::wait_dispatch);
    const Timed timed = d.r.watch.timed("receive");
    const auto any = [&] {
        inbox.look_at_last(waits);
        return forwarder.any_arrived() || direct.any_arrived() || inbox.any_arrived();
    };
    const auto find = [&] { return forwarder.open() ? forwarder.missing() : direct.open() ? direct.missing() : inbox.missing(); };
    for (;;) {
        forwarder.forward_arrived();
        direct.take_arrived();
        inbox.take_arrived();
        if (!forwarder.open() && !direct.open() && !inbox.open()) return;
        if (!d.r.watch.until(Phase::payload, any, find)) return;
    }
}

// Send this rank's chunks, and receive arrived chunks in between while their rows are still in the cache.  A rank that is ahead of a peer
// yields, which helps where ranks outnumber cores.
void send_and_receive(Dispatch& d, i32 worker, i32 stride) {
    Sender sender(d, worker, stride);
    Forward forwarder(d, worker, stride);
    DirectArrivals direct(d, worker, stride);
    Inbox inbox(d, worker, stride);
    {
        const Timed timed = d.r.watch.timed("send");
        while (!sender.done()) {
            if (!await_place(d, sender, forwarder, &inbox)) return;
            const i32 chunk = sender.chunk();
            sender.send();
            forwarder.forward_arrived();
            direct.take_arrived();
            inbox.take_arrived();
            if (inbox.behind(chunk)) std::this_thread::yield();
        }
    }
    receive(d, forwarder, direct, inbox);
}

// The second half of a split dispatch.
void end(const DispatchArgs& args) {
    if (Round::state_of(args.ctx).last_dispatch == 0) return;  // the first half was invalid
    Dispatch d(args);
    if (d.r.watch.aborted()) return;
    Team team(args.workers);
    d.r.load_headers();
    team.run([&](i32 worker) {
        Forward forwarder(d, worker, team.size());
        DirectArrivals direct(d, worker, team.size());
        Inbox inbox(d, worker, team.size());
        receive(d, forwarder, direct, inbox);
    });
    if (!d.repeat && !d.r.watch.failed()) seal(tables_of(args));
}

void whole_or_begin(const DispatchArgs& args) {
    Dispatch d(args);
    if (d.r.watch.aborted()) return;
    if (is_balanced(args.ctx.placed) && !d.repeat && !choose_replicas(d)) return;
    Team team(args.workers);
    announce(d, count(d, team));
    const std::optional<ValidationResult> validation = agree(d);
    if (!validation) return;
    const bool good = validation->failure == Failure::none;
    d.r.state.last_dispatch = good ? d.r.tag : 0;
    if (!d.repeat) round_of(args.route, d.r.ranks) = d.r.tag;
    if (!good) {
        if (!d.repeat) {
            d.plan.clear();
            clear_unused(d);
            seal(tables_of(args));
        }
        d.r.leave_validation_result(*validation);
        return d.r.finish();
    }
    if (!d.repeat) {
        const Timed timed = d.r.watch.timed("place");
        d.plan.place();
        clear_padding(d);
        clear_unused(d);
    }
    count_rows(d);
    if (args.part == static_cast<i32>(Part::begin)) d.r.save_headers();
    const auto work = args.part == static_cast<i32>(Part::begin) ? send : send_and_receive;
    team.run([&](i32 worker) { work(d, worker, team.size()); });
    if (d.r.watch.failed()) return;
    if (!d.repeat && args.part == static_cast<i32>(Part::whole)) seal(tables_of(args));
    d.r.finish();
}

}  // namespace

void dispatch(const DispatchArgs& args) { with_shared_rings(args, args.part == static_cast<i32>(Part::end) ? end : whole_or_begin); }

}  // namespace moecomm::host
