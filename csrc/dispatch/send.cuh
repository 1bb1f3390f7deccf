// Step 4, second half: rows travel from x through shared memory to every rank that wants them; then each chunk is signaled.
#pragma once
#include "../device/quantize.cuh"
#include "metadata.cuh"
#include "scaleout_put.cuh"
#include "token.cuh"

namespace moecomm {

// Addresses of the token's row and scales at the peers that this lane serves; null where the peer does not want the token.
template <class Call>
struct Places {
    u8* row[Call::cfg.peers_per_lane()];
    u8* scales[Call::cfg.peers_per_lane()];
};

// A send warp: moves every send_warps-th row of this block, piece by piece, through a ring of bulk copies. Loads run ahead of stores. All
// lanes call all methods together.
//
// A bulk store into a peer's memory costs a multiprocessor about the same time for 1792 bytes as for 3584, and this bounds few blocks. So
// pieces are large, and a cast row is cast piece by piece but stored at once.
//
// Every lane commits one group of stores for each piece (cast: each row), even an empty one, so that groups and pieces count alike in all
// lanes.
template <class Call>
struct Sender {
    static constexpr DispatchConfig cfg = Call::cfg;
    static constexpr i32 kSlots = cfg.ring_slots, kAhead = cfg.slots_ahead();
    static constexpr i32 kRowBytes = cfg.hidden * bytes_of(cfg.type);
    static constexpr i32 kPieces = cfg.pieces();                // in a row
    static constexpr i32 kGroups = cfg.quantize ? 1 : kPieces;  // in a row
    // Rows of a warp that may be in flight when the warp checks whether a chunk is finished. One row of every warp keeps the links full for
    // long. With more, receivers that have to copy rows would learn of chunks late, and of the last chunks all at once.
    static constexpr i32 kOpen = 1;

    const Call& c;
    i32 loaded = 0, used = 0;   // pieces of this warp
    i32 done = 0, flagged = 0;  // rows of this warp; chunks that this warp has finished
    i32 early = 0;              // several domains: rows of a first pass over the tokens (scaleout_early.cuh)

    const GlobalScale given;  // rows are cast to a format that takes one

    MOECOMM_FN explicit Sender(const Call& call) : c(call), given(call.global_scale()) {}

    // The n-th token of this warp, and the number of its tokens before token `end` of the block.
    MOECOMM_FN i32 token_of(i32 n) const {
        if constexpr (cfg.domains() > 1) return c.share.first + warp_id() + (n - early) * cfg.send_warps;
        return c.share.first + warp_id() + n * cfg.send_warps;
    }
    MOECOMM_FN static i32 tokens_before(i32 end) { return end > warp_id() ? ceil_div(end - warp_id(), cfg.send_warps) : 0; }
    MOECOMM_FN bool has(i32 n) const { return token_of(n) < c.share.end; }

    MOECOMM_FN u8* held(i32 piece) const { return c.shared.ring[piece % kSlots][warp_id()]; }
    MOECOMM_FN u64* full(i32 piece) const { return &c.shared.full[piece % kSlots][warp_id()]; }

    // Starts the bulk load of this warp's next piece, if there is one. The ring slot is free: the stores that read it are complete (see
    // bulk_wait_read), or the cast has finished with it.
    MOECOMM_FN void load_next() {
        const i32 n = loaded / kPieces;
        if (!has(n)) return;
        if constexpr (!cfg.quantize) bulk_wait_read<kSlots - kAhead - 1>();
        __syncwarp();
        if (lane_id() == 0) {
            const i32 at = loaded % kPieces * cfg.piece_columns * bytes_of(cfg.type);
            const u8* row = reinterpret_cast<const u8*>(c.a.x) + token_of(n) * c.a.x_stride;
            bulk_load(held(loaded), row + at, min(cfg.piece_bytes(), kRowBytes - at), full(loaded));
        }
        ++loaded;
    }
    MOECOMM_FN void await_piece() const { copy_wait(full(used), used / kSlots & 1); }
    // Waits for loads in flight: a block must not end while a load writes to its shared memory.
    MOECOMM_FN void drop_loads() {
        for (; used < loaded; ++used) await_piece();
    }

    MOECOMM_FN void store(const Places<Call>& to, i64 at, const u8* from, i32 bytes) const {
#pragma unroll
        for (i32 i = 0; i < cfg.peers_per_lane(); ++i)
            if (to.row[i] != nullptr) bulk_store(to.row[i] + at, from, bytes);
    }
    MOECOMM_FN void commit() const {
        __syncwarp();
        bulk_commit();
    }
    MOECOMM_FN void store_row(const Places<Call>& to) {
        for (i32 i = 0; i < kPieces; ++i) {
            const i32 at = i * cfg.piece_columns * bytes_of(cfg.type);
            load_next();
            await_piece();
            store(to, at, held(used), min(cfg.piece_bytes(), kRowBytes - at));
            commit();
            ++used;
        }
        ++done;
    }
    MOECOMM_FN u8* cast() const { return c.shared.cast[warp_id()][done % kCasts]; }
    MOECOMM_FN u8* scales() const { return reinterpret_cast<u8*>(c.shared.scales[warp_id()][done % kCasts]); }
    // Casts the next piece of the current row.
    MOECOMM_FN void cast_piece() {
        await_piece();
        const i32 at = used % kPieces * cfg.piece_columns;
        u8* const scales_there = scales() + at / cfg.group() * cfg.scale_size();
        quantize_piece<cfg, cfg.piece_columns>(at, cast() + cfg.value_bytes(at), held(used), scales_there, given);
        __syncwarp();  // the ring slot is free
        ++used;
    }
    // Casts up to `pieces` pieces of the first row, while its destination is not known yet.
    MOECOMM_FN void cast_ahead(i32 pieces) {
        if constexpr (cfg.quantize) {
            for (; warp_id() < cfg.send_warps && pieces > 0 && used < min(loaded, kPieces); --pieces) {
                load_next();
                cast_piece();
            }
        }
    }
    MOECOMM_FN void cast_and_store_row(const Places<Call>& to) {
        bulk_wait_read<kCasts - 1>();
        __syncwarp();
        while (used < (done + 1) * kPieces) {
            load_next();
            cast_piece();
        }
        fence_async_shared();
        __syncwarp();
        store(to, 0, cast(), cfg.row_bytes);
        if constexpr (cfg.scale_bytes > 0) store_scales(to, scales());
        commit();
        ++done;
    }
    // Copies scales with ordinary stores, and zeros up to the end of the row. A bulk store of so few bytes would cost a multiprocessor as
    // much as one of a quarter of a row.
    MOECOMM_FN void store_scales(const Places<Call>& to, const u8* scales) const {
        constexpr i32 filled = cfg.row_scales() * cfg.scale_size();
#pragma unroll
        for (i32 i = 0; i < cfg.peers_per_lane(); ++i) {
            for (u32 wanted = __ballot_sync(kAllLanes, to.scales[i] != nullptr); wanted != 0; wanted &= wanted - 1) {
                u8* there = reinterpret_cast<u8*>(__shfl_sync(kAllLanes, reinterpret_cast<u64>(to.scales[i]), __ffs(wanted) - 1));
                if constexpr (cfg.scale_bytes == filled && filled % 16 == 0) {
                    for (i32 v = lane_id(); v < filled / 16; v += kWarp)
                        reinterpret_cast<uint4*>(there)[v] = reinterpret_cast<const uint4*>(scales)[v];
                } else {
                    copy_small(there, scales, filled);
                    if (cfg.scale_bytes > filled && lane_id() < cfg.scale_bytes - filled) there[filled + lane_id()] = 0;
                }
            }
        }
    }

    // Several domains: number of chunks of this block whose send slots are free.
    i32 placed = 0;
    // Waits until the send slots of `chunk` are free. Returns false if the wait failed; the failure record is filled.
    MOECOMM_FN bool await_send_slots(i32 chunk) {
        if (chunk - c.share.first_chunk < placed) return true;
        placed = chunk - c.share.first_chunk + 1;
        if (c.turn_of(chunk) < ring_chunks(c.shape(), c.a.chunk_tokens)) return true;
        finish_chunks<0, false>();  // chunks that hold the slots now must be sent first
        if (moecomm::await_send_slots(c, chunk)) return true;
        bulk_wait<0>();  // a block must not end while a store reads its shared memory
        return false;
    }

    // Arrives at the step of each chunk whose rows are stored, while at most `open` rows of this warp may be in flight. `all`: every row of
    // the warp was sent, so all its chunks qualify. bulk_wait sees the stores complete; the arrival of lane 0 releases them.
    template <i32 open, bool all = open == 0>
    MOECOMM_FN void finish_chunks() {
        while (flagged < c.steps()) {
            const i32 end = min((flagged + 1) * c.a.chunk_tokens, c.share.end - c.share.first);
            if (!all && tokens_before(end) + open > done - (cfg.domains() > 1 ? early : 0)) return;
            bulk_wait<open * kGroups>();
            __syncwarp();  // all lanes' stores come before lane 0's release
            if (lane_id() == 0) c.shared.chunk_steps.arrive(c.round, flagged);
            ++flagged;
        }
    }
};

// Called by the metadata warp. Writes the metadata of each chunk of the block, and for several domains the heads of send slots. Stops if a
// wait for send slots fails; the failure record is filled. Chunks of few tokens, which wait for no send slots, are written together,
// because each chunk would wait for the same loads.
template <class Call>
MOECOMM_FN void write_metadata(const Call& c) {
    const bool together = Call::cfg.domains() > 1 && c.direct() && c.share.end - c.share.first <= kWarp;
    for (i32 chunk = c.share.first_chunk, next; chunk < c.share.end_chunk; chunk = next) {
        next = together ? c.share.end_chunk : chunk + 1;
        const i32 first = chunk * c.a.chunk_tokens, end = c.chunk_end(next - 1);
        if constexpr (!Call::cfg.repeat) write_metadata_of(c, first, end);
        if constexpr (Call::cfg.domains() > 1) {
            if (!c.leaves_early()) {
                if (!await_send_slots(c, next - 1)) return;
                write_heads<false>(c, first, end);
            }
        }
        for (i32 done = chunk; done < next; ++done)
            if (lane_id() == 0 && (Call::cfg.signals_early() || done + 1 == c.share.end_chunk))
                c.shared.chunk_steps.arrive(c.round, c.step_of_chunk(done - c.share.first_chunk));
    }
}

// Called by the flag warp. Signals each chunk of the block to all ranks of the domain once all other warps have finished it. The fence
// waits until their stores have reached the peers, which takes long while links are busy; a send warp that waited would not send. One fence
// covers all chunks finished by then. Returns early if a wait fails; the failure record is filled.
template <class Call>
MOECOMM_FN void raise_flags(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    for (i32 chunk = c.share.first_chunk, next; chunk < c.share.end_chunk; chunk = next) {
        if (__any_sync(kAllLanes, !c.shared.chunk_steps.await(c.round, c.step_of_chunk(chunk - c.share.first_chunk)))) return;
        for (next = chunk + 1; next < c.share.end_chunk; ++next)
            if (!__all_sync(kAllLanes, c.shared.chunk_steps.is_done(c.step_of_chunk(next - c.share.first_chunk)))) break;
        c.transport.fence();
        for (i32 i = lane_id(); i < (next - chunk) * cfg.ranks; i += kWarp) {
            const i32 p = rotated<cfg.ranks>(c.me(), i % cfg.ranks), which = chunk + i / cfg.ranks;
            if (!c.domains().reaches(p)) continue;
            c.transport.post(p, arrived_at(c.window(), c.shape(), c.me(), which),
                             word_signal(c.round.tag, load_relaxed(c.range(p, which))));
        }
    }
}

// Called by a send warp. Copies scales that the caller passed (any number of bytes) to every rank that wants the token.
template <class Call>
MOECOMM_FN void send_scales(const Call& c, const Token<Call>& token, const Places<Call>& to) {
    const u8* scales = reinterpret_cast<const u8*>(c.a.in_scales) + token.index * c.a.in_scales_stride;
#pragma unroll
    for (i32 i = 0; i < Call::cfg.peers_per_lane(); ++i)
        for (u32 wanted = __ballot_sync(kAllLanes, to.scales[i] != nullptr); wanted != 0; wanted &= wanted - 1)
            copy_small(reinterpret_cast<u8*>(__shfl_sync(kAllLanes, reinterpret_cast<u64>(to.scales[i]), __ffs(wanted) - 1)), scales,
                       Call::cfg.scale_bytes);
}

// Called by a send warp. Returns the addresses at which the token's row and scales are written: `early`, in send slots for other domains,
// else at ranks of this domain, and in send slots unless those rows have left early.
template <bool early, class Call>
MOECOMM_FN Places<Call> places_of(const Call& c, const Token<Call>& token) {
    constexpr DispatchConfig cfg = Call::cfg;
    Places<Call> to{};
    u64 scaleout = 0;  // one bit for each domain
    const bool far = early == c.leaves_early();
    for_ranks(c, token, [&](i32 rank, i32 slot, i32 row, i32 lane, i32 place) {
        if constexpr (Call::cfg.domains() > 1) {
            if (c.domains().reaches(rank) ? early : !far) return;
            if (!c.domains().reaches(rank)) {  // one send slot for each domain, written by the lane of the first rank there
                const u64 bit = 1ull << rank / cfg.scaleup_ranks();
                if ((scaleout & bit) == 0 && lane_id() == lane) {
                    to.row[place] = send_slot<early>(c, rank / cfg.scaleup_ranks(), token.index) + received_row(c.shape());
                    if constexpr (Call::cfg.scale_bytes > 0)
                        to.scales[place] =
                            send_slot<early>(c, rank / cfg.scaleup_ranks(), token.index) + received_scales(c.shape(), cfg.row_bytes);
                }
                scaleout |= bit;
                return;
            }
        }
        if (lane_id() != lane) return;
        const RoundHeader& header = c.shared.headers[rank];
        to.row[place] = c.transport.template peer_ptr<u8>(rank, header.dispatch.x) + static_cast<i64>(row) * cfg.row_bytes;
        if constexpr (Call::cfg.scale_bytes > 0) {
            const i64 of_scales = Call::cfg.scale_columns ? slot : row;
            to.scales[place] = c.transport.template peer_ptr<u8>(rank, header.dispatch.scales) + of_scales * cfg.scale_bytes;
        }
    });
    return to;
}

// Called by a send warp. Sends the next row, and the scales that were passed with it, to these places.
template <class Call>
MOECOMM_FN void send_row(const Call& c, Sender<Call>& sender, const Token<Call>& token, const Places<Call>& to) {
    constexpr DispatchConfig cfg = Call::cfg;
    if constexpr (cfg.quantize) {
        sender.cast_and_store_row(to);
    } else {
        if constexpr (cfg.scale_bytes > 0) send_scales(c, token, to);
        sender.store_row(to);
    }
}

// Called by each send warp after its first load_next calls. Stops if a wait for send slots fails; the failure record is filled.
template <class Call>
MOECOMM_FN void send(const Call& c, Sender<Call>& sender) {
    const auto load = [&](i32 n) { return load_token(c, sender.token_of(n)); };
    const i32 first = Call::cfg.domains() > 1 ? sender.early : 0;
    const bool far = !c.leaves_early();
    Token<Call> next{};  // loaded while the current row travels
    if (sender.has(first)) next = load(first);
    for (i32 n = first; sender.has(n); ++n) {
        const Token<Call> token = next;
        if (sender.has(n + 1)) next = load(n + 1);
        if constexpr (Call::cfg.domains() > 1) {
            if (far && !sender.await_send_slots(token.index / c.a.chunk_tokens)) return;
        }
        send_row(c, sender, token, places_of<false>(c, token));
        if constexpr (Call::cfg.signals_early()) sender.template finish_chunks<Sender<Call>::kOpen>();
    }
    sender.template finish_chunks<0>();
}

}  // namespace moecomm
