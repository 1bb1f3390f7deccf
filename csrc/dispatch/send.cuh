// Step 4, second half: rows from x through shared memory to every rank that wants them, then the flag of each chunk.
#pragma once
#include "../device/quantize.cuh"
#include "metadata.cuh"
#include "scaleout/put.cuh"
#include "token.cuh"

namespace moecomm {

// The token's row and scales at this lane's peers; null where it is not wanted.
template <class Call>
struct Places {
    u8* row[Call::cfg.peers_per_lane()];
    u8* scales[Call::cfg.peers_per_lane()];
};

// A send warp moves every send_warps-th row of this block, piece by piece, through a ring: loads run ahead of stores.
//
// A bulk store into a peer's memory costs a multiprocessor about the same time whether it is of 1792 or of 3584 bytes, which is what bounds
// few blocks.  So pieces are large; and a row that has been cast, piece by piece, is stored as a whole.
//
// Every lane commits a group of stores a piece (cast: a row), empty or not, so that groups and pieces count alike in all lanes.
template <class Call>
struct Sender {
    static constexpr DispatchConfig cfg = Call::cfg;
    static constexpr i32 kSlots = cfg.ring_slots, kAhead = cfg.slots_ahead();
    static constexpr i32 kRowBytes = cfg.hidden * bytes_of(cfg.type);
    static constexpr i32 kPieces = cfg.pieces();                // of a row
    static constexpr i32 kGroups = cfg.quantize ? 1 : kPieces;  // of a row
    // Rows of a warp whose stores are under way when it looks whether a chunk is through.  A row of every warp fills the links for long:
    // with more of them open receivers, who may have to copy what comes, hear of chunks late and of the last ones all at once.
    static constexpr i32 kOpen = 1;

    const Call& c;
    i32 loaded = 0, used = 0;   // pieces of this warp
    i32 done = 0, flagged = 0;  // rows of this warp; chunks it is through with

    MOECOMM_FN explicit Sender(const Call& call) : c(call) {}

    // The n-th token of this warp, and how many of its tokens come before token `end` of the block.
    MOECOMM_FN i32 token_of(i32 n) const { return c.share.first + warp_id() + n * cfg.send_warps; }
    MOECOMM_FN static i32 tokens_before(i32 end) { return end > warp_id() ? ceil_div(end - warp_id(), cfg.send_warps) : 0; }
    MOECOMM_FN bool has(i32 n) const { return token_of(n) < c.share.end; }

    MOECOMM_FN u8* held(i32 piece) const { return c.shared.ring[piece % kSlots][warp_id()]; }
    MOECOMM_FN u64* full(i32 piece) const { return &c.shared.full[piece % kSlots][warp_id()]; }

    // The place was read by stores that are kSlots - kAhead - 1 groups back; or by the cast, which is through with it.
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
    // A block must not end while a load writes to its memory.
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
    // The next piece of the row that is next.
    MOECOMM_FN void cast_piece() {
        await_piece();
        const i32 at = used % kPieces * cfg.piece_columns;
        quantize_piece<cfg, cfg.piece_columns>(at, cast() + at, held(used), scales() + at / kQuantGroup * cfg.scale_size());
        __syncwarp();  // the place is free
        ++used;
    }
    // Some pieces of the first row, while it is not known yet where it goes.
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
        store(to, 0, cast(), cfg.hidden);
        store_scales(to, scales());
        commit();
        ++done;
    }
    // By ordinary stores, with zeros up to the end of the row: a bulk store of so few bytes holds a multiprocessor up as one of a quarter
    // of a row does.
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

    // Several domains: chunks whose letters have places.
    i32 placed = 0;
    MOECOMM_FN bool await_send_slots(i32 chunk) {
        if (chunk - c.share.first_chunk < placed) return true;
        placed = chunk - c.share.first_chunk + 1;
        if (chunk < ring_chunks(c.shape(), c.a.chunk_tokens)) return true;
        finish_chunks<0, false>();  // those before it in its places must go first
        if (moecomm::await_send_slots(c, chunk)) return true;
        bulk_wait<0>();  // a block must not end while a store reads its memory
        return false;
    }

    // Says so of the chunks whose rows of this warp are at their places when all but the last `open` are; without open ones, of all.
    template <i32 open, bool all = open == 0>
    MOECOMM_FN void finish_chunks() {
        while (flagged < c.turns()) {
            const i32 end = min((flagged + 1) * c.a.chunk_tokens, c.share.end - c.share.first);
            if (!all && tokens_before(end) + open > done) return;
            bulk_wait<open * kGroups>();
            __syncwarp();  // what follows is the release of all lanes' stores
            if (lane_id() == 0) c.shared.sent.arrive(c.round, flagged);
            ++flagged;
        }
    }
};

// By the describe warp: what stands beside the rows, for each chunk of the block.
template <class Call>
MOECOMM_FN void write_metadata(const Call& c) {
    for (i32 chunk = c.share.first_chunk; chunk < c.share.end_chunk; ++chunk) {
        if constexpr (!Call::cfg.repeat) write_chunk_metadata(c, chunk);
        if constexpr (Call::cfg.domains() > 1) {
            if (!await_send_slots(c, chunk)) return;
            write_heads(c, chunk);
        }
        const i32 nth = chunk - c.share.first_chunk;
        if (lane_id() == 0 && (Call::cfg.signals_early() || chunk + 1 == c.share.end_chunk))
            c.shared.sent.arrive(c.round, c.rotation_step_of(nth));
    }
}

// By the flag warp: the flags of each chunk of the block, once all others are through with it.  The fence waits until what they have
// written has reached the peers, which takes its time while the links are busy; a send warp that waited would not send.  One fence does for
// all chunks that are through by then.
template <class Call>
MOECOMM_FN void raise_flags(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    for (i32 chunk = c.share.first_chunk, next; chunk < c.share.end_chunk; chunk = next) {
        if (__any_sync(kAllLanes, !c.shared.sent.await(c.round, c.rotation_step_of(chunk - c.share.first_chunk)))) return;
        for (next = chunk + 1; next < c.share.end_chunk; ++next)
            if (!__all_sync(kAllLanes, c.shared.sent.await_no_longer(c.rotation_step_of(next - c.share.first_chunk)))) break;
        c.transport.fence();
        for (i32 i = lane_id(); i < (next - chunk) * cfg.ranks; i += kWarp) {
            const i32 p = rotated<cfg.ranks>(c.me(), i % cfg.ranks), which = chunk + i / cfg.ranks;
            if (!c.domains().reaches(p)) continue;
            c.transport.post(p, arrived_at(c.window(), c.shape(), c.me(), which),
                             word_signal(c.round.tag, load_relaxed(c.range(p, which))));
        }
    }
}

// Scales that were given: any number of bytes.
template <class Call>
MOECOMM_FN void send_scales(const Call& c, const Token<Call>& token, const Places<Call>& to) {
    const u8* scales = reinterpret_cast<const u8*>(c.a.in_scales) + token.index * c.a.in_scales_stride;
#pragma unroll
    for (i32 i = 0; i < Call::cfg.peers_per_lane(); ++i)
        for (u32 wanted = __ballot_sync(kAllLanes, to.scales[i] != nullptr); wanted != 0; wanted &= wanted - 1)
            copy_small(reinterpret_cast<u8*>(__shfl_sync(kAllLanes, reinterpret_cast<u64>(to.scales[i]), __ffs(wanted) - 1)), scales,
                       Call::cfg.scale_bytes);
}

template <class Call>
MOECOMM_FN Places<Call> places_of(const Call& c, const Token<Call>& token) {
    constexpr DispatchConfig cfg = Call::cfg;
    Places<Call> to{};
    u64 scaleout = 0;  // domains, a bit each
    for_ranks(c, token, [&](i32 rank, i32 slot, i32 row, i32 lane, i32 place) {
        if constexpr (Call::cfg.domains() > 1) {
            if (!c.domains().reaches(rank)) {  // a letter for the domain, by the lane of the first rank there
                const u64 bit = 1ull << rank / cfg.scaleup_ranks();
                if ((scaleout & bit) == 0 && lane_id() == lane) {
                    to.row[place] = send_slot(c, rank / cfg.scaleup_ranks(), token.index) + landed_row(c.shape());
                    if constexpr (Call::cfg.scale_bytes > 0)
                        to.scales[place] = send_slot(c, rank / cfg.scaleup_ranks(), token.index) + landed_scales(c.shape(), cfg.row_bytes);
                }
                scaleout |= bit;
                return;
            }
        }
        if (lane_id() != lane) return;
        const RoundHeader& header = c.shared.headers[rank];
        to.row[place] = c.transport.template peer_ptr<u8>(rank, header.x) + static_cast<i64>(row) * cfg.row_bytes;
        if constexpr (Call::cfg.scale_bytes > 0) {
            const i64 of_scales = Call::cfg.scale_columns ? slot : row;
            to.scales[place] = c.transport.template peer_ptr<u8>(rank, header.scales) + of_scales * cfg.scale_bytes;
        }
    });
    return to;
}

// The next row, and the scales that were given with it.
template <class Call>
MOECOMM_FN void send_row(const Call& c, Sender<Call>& sender, const Token<Call>& token) {
    constexpr DispatchConfig cfg = Call::cfg;
    const Places<Call> to = places_of(c, token);
    if constexpr (cfg.quantize) {
        sender.cast_and_store_row(to);
    } else {
        if constexpr (cfg.scale_bytes > 0) send_scales(c, token, to);
        sender.store_row(to);
    }
}

// By each send warp, which has begun to load.
template <class Call>
MOECOMM_FN void send(const Call& c, Sender<Call>& sender) {
    const auto load = [&](i32 n) { return load_token(c, sender.token_of(n)); };
    Token<Call> next{};  // what the lanes need for the next row is loaded while this one travels
    if (sender.has(0)) next = load(0);
    for (i32 n = 0; sender.has(n); ++n) {
        const Token<Call> token = next;
        if (sender.has(n + 1)) next = load(n + 1);
        if constexpr (Call::cfg.domains() > 1) {
            if (!sender.await_send_slots(token.index / c.a.chunk_tokens)) return;
        }
        send_row(c, sender, token);
        if constexpr (Call::cfg.signals_early()) sender.template finish_chunks<Sender<Call>::kOpen>();
    }
    sender.template finish_chunks<0>();
}

}  // namespace moecomm
