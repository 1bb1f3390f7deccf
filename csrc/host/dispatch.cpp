// Dispatch on the host: count, announce, agree, send, relay, receive.
#include "dispatch.h"

#include <optional>
#include <thread>

#include "executor.h"
#include "receive.h"
#include "relay.h"
#include "seal.h"
#include "send.h"
#include "team.h"

namespace moecomm::host {

namespace {

BadEntry count(Dispatch& d, Team& team) {
    if (d.repeat) return is_intact(tables_of(d.a)) ? BadEntry{} : BadEntry{Argument::handle};
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
    Notice n{};
    n.status = static_cast<u32>(bad.argument);
    n.call = a.call;
    n.value = d.repeat ? round_of(a.route, d.r.ranks) : bad.value;
    n.num_tokens = a.num_tokens;
    n.chunk_tokens = a.chunk_tokens;
    n.max_rows = a.max_rows;
    n.x = a.out_x;
    n.scales = a.out_scales;
    n.src = a.out_src;
    n.topk_idx = a.out_topk_idx;
    n.weights = a.out_weights;
    n.rows = a.out_rows;
    d.r.announce(n, d.repeat ? nullptr : d.plan.total_up(bad.argument != Argument::none));
}

// What the mail of all ranks comes to; nothing if it did not come.
std::optional<Verdict> agree(Dispatch& d) {
    if (!d.r.await_notices()) return std::nullopt;
    const Verdict verdict = d.r.judge();
    if (verdict.failure != Failure::none || d.repeat) return verdict;
    if (!d.r.await_counts()) return std::nullopt;
    d.plan.gather();
    return d.plan.judge_capacity();
}

// Relays, and receives if this dispatch does, while the next chunk has no place at its relays: those may wait for us.  False: the round is
// lost.
bool await_place(Dispatch& d, const Sender& sender, Relay& relay, Inbox* inbox) {
    while (!sender.has_place()) {
        relay.relay_landed();
        if (inbox != nullptr) inbox->take_arrived();
        const auto go_on = [&] { return sender.has_place() || relay.any_landed() || (inbox != nullptr && inbox->any_arrived()); };
        if (!d.r.watch.until(Phase::drained, go_on, [&] { return sender.missing(); })) return false;
    }
    return true;
}

// Sends, and relays no more than others need to do the same: the rest belongs to the second half.
void send(Dispatch& d, i32 worker, i32 stride) {
    Sender sender(d, worker, stride);
    Relay relay(d, worker, stride);
    while (!sender.done()) {
        if (!await_place(d, sender, relay, nullptr)) return;
        sender.send();
        relay.relay_landed();
    }
    for (; relay.owes_credit(); relay.relay_landed())
        if (!d.r.watch.until(Phase::payload, [&] { return relay.any_landed(); }, [&] { return relay.missing(); })) return;
}

// Everything that is not here yet.
void receive(Dispatch& d, Relay& relay, StraightCome& straight, Inbox& inbox) {
    const auto any = [&] { return relay.any_landed() || straight.any_come() || inbox.any_arrived(); };
    const auto find = [&] { return relay.open() ? relay.missing() : straight.open() ? straight.missing() : inbox.missing(); };
    for (;;) {
        relay.relay_landed();
        straight.take_come();
        inbox.take_arrived();
        if (!relay.open() && !straight.open() && !inbox.open()) return;
        if (!d.r.watch.until(Phase::payload, any, find)) return;
    }
}

// Sends our chunks and takes in what has arrived between them: those rows are still in the cache.  Where ranks outnumber cores, one that
// is ahead lets the others catch up.
void send_and_receive(Dispatch& d, i32 worker, i32 stride) {
    Sender sender(d, worker, stride);
    Relay relay(d, worker, stride);
    StraightCome straight(d, worker, stride);
    Inbox inbox(d, worker, stride);
    while (!sender.done()) {
        if (!await_place(d, sender, relay, &inbox)) return;
        const i32 chunk = sender.chunk();
        sender.send();
        relay.relay_landed();
        straight.take_come();
        inbox.take_arrived();
        if (inbox.behind(chunk)) std::this_thread::yield();
    }
    receive(d, relay, straight, inbox);
}

// The second half of a dispatch that was begun.
void end(const DispatchArgs& args) {
    if (Round::state_of(args.ctx).last_dispatch == 0) return;  // it was void
    Dispatch d(args);
    if (d.r.watch.aborted()) return;
    Team team(args.workers);
    d.r.recall_notices();
    team.run([&](i32 worker) {
        Relay relay(d, worker, team.size());
        StraightCome straight(d, worker, team.size());
        Inbox inbox(d, worker, team.size());
        receive(d, relay, straight, inbox);
    });
    if (!d.repeat && !d.r.watch.failed()) seal(tables_of(args));
}

}  // namespace

void dispatch(const DispatchArgs& args) {
    if (args.part == static_cast<i32>(Part::end)) return end(args);
    Dispatch d(args);
    if (d.r.watch.aborted()) return;
    Team team(args.workers);
    announce(d, count(d, team));
    const std::optional<Verdict> verdict = agree(d);
    if (!verdict) return;
    const bool good = verdict->failure == Failure::none;
    d.r.state.last_dispatch = good ? d.r.tag : 0;
    if (!d.repeat) round_of(args.route, d.r.ranks) = d.r.tag;
    if (!good) {
        if (!d.repeat) {
            d.plan.clear();
            clear_unused(d);
            seal(tables_of(args));
        }
        d.r.leave_verdict(*verdict);
        return d.r.finish();
    }
    if (!d.repeat) {
        d.plan.place();
        clear_padding(d);
        clear_unused(d);
    }
    if (args.part == static_cast<i32>(Part::begin)) d.r.keep_notices();
    const auto work = args.part == static_cast<i32>(Part::begin) ? send : send_and_receive;
    team.run([&](i32 worker) { work(d, worker, team.size()); });
    if (d.r.watch.failed()) return;
    if (!d.repeat && args.part == static_cast<i32>(Part::whole)) seal(tables_of(args));
    d.r.finish();
}

}  // namespace moecomm::host
