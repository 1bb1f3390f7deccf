// Rows that go direct to other domains leave before the ranks agree, right after counting, as packets do. Their place at the peer depends
// on the round's parity, the sender and the token alone, and their heads say where they come among this rank's rows; the owner, which knows
// all counts by then, finds the final row. Agreement and rows are under way together; otherwise one would begin when the other ends.
//
// Puts of the round before may still read their sources, so these have places of their own (csrc/protocol/domains.h). A domain has as many
// as it has ranks; with more other domains than these, rows leave after the agreement.
#pragma once
#include "send.cuh"

namespace moecomm {

// Called by a send warp. Moves the rows of its tokens to send slots, in a first pass over them, and begins to load those of the second.
template <class Call>
MOECOMM_FN void send_far(const Call& c, Sender<Call>& sender) {
    for (i32 n = 0; sender.has(n); ++n) {
        const Token<Call> token = load_token(c, sender.token_of(n));
        send_row(c, sender, token, places_of<true>(c, token));
    }
    bulk_wait<0>();
    sender.early = sender.done;
    for (i32 i = 0; i < Call::cfg.slots_ahead(); ++i) sender.load_next();
}

// Called by all threads of all blocks once the warps that count have placed their tokens. Send warps and the metadata warp write send
// slots, put warps put them; no other warp waits for either. If there is no room for a put, the failure record is filled, and later waits
// fail.
template <class Call>
MOECOMM_FN void leave_early(const Call& c, Sender<Call>& sender) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 metadata_warp = cfg.send_warps + cfg.receive_warps, put_warp = cfg.warps() - cfg.put_warps;
    constexpr i32 writers = (cfg.send_warps + 1) * kWarp;
    if (warp_id() < cfg.send_warps || warp_id() == metadata_warp) {
        fence_async_shared();  // bulk loads overwrite the counters
        barrier_sync(2, writers);
        if (warp_id() < cfg.send_warps) {
            send_far(c, sender);
        } else {
            for (i32 first = c.share.first; first < c.share.end; first += kWarp)
                write_heads<true>(c, first, min(first + kWarp, c.share.end));
        }
        barrier_arrive(3, writers + cfg.put_warps * kWarp);
    } else if (warp_id() >= put_warp) {
        barrier_sync(3, writers + cfg.put_warps * kWarp);
        MOECOMM_SPAN(put, c.round, threadIdx.x == put_warp * kWarp);
        put_all_direct(c, warp_id() - put_warp);
    }
}

}  // namespace moecomm
