// Step 4, second half: rows from x through shared memory to every rank that wants them, then the flag of each chunk.
#pragma once
#include "quantize.cuh"
#include "token.cuh"

namespace moecomm {

// The tokens of one send warp: in each chunk of the block every send_warps-th.
template <class Call>
struct TokenCursor {
    const Call& c;
    i32 chunk, token;

    MOECOMM_FN explicit TokenCursor(const Call& call) : c(call), chunk(blockIdx.x), token(chunk * call.a.chunk_tokens + warp_id()) {
        skip_ends();
    }
    MOECOMM_FN bool valid() const { return chunk < c.chunks(); }
    MOECOMM_FN void next() {
        token += Call::cfg.send_warps;
        skip_ends();
    }

  private:
    MOECOMM_FN void skip_ends() {
        while (valid() && token >= c.chunk_end(chunk)) {
            chunk += gridDim.x;
            token = chunk * c.a.chunk_tokens + warp_id();
        }
    }
};

// A warp's ring of pieces: loads run kAhead pieces before stores.  Every lane commits a group of stores a piece, empty or not, so that
// groups and pieces count alike in all lanes.
template <class Call>
struct Sender {
    static constexpr DispatchConfig cfg = Call::cfg;
    static constexpr i32 kSlots = cfg.ring_slots;
    static constexpr i32 kAhead = kSlots / 2;
    static constexpr i32 kRowBytes = cfg.hidden * bytes_of(cfg.type);
    static constexpr i32 kSentBytes = cfg.quantize ? cfg.piece_columns : cfg.piece_bytes();

    const Call& c;
    u8* const ring;
    u64* const full;
    TokenCursor<Call> loading;
    i32 loading_piece = 0;
    i32 loaded = 0, stored = 0;                     // pieces
    i32 open_chunk = -1, open_nth = 0, open_since;  // all stored but not flagged: the chunk, its turn in the block, `stored` then

    MOECOMM_FN explicit Sender(const Call& call)
        : c(call), ring(call.shared.ring + warp_id() * kSlots * cfg.piece_bytes()), full(call.shared.full[warp_id()]), loading(call) {}

    MOECOMM_FN u8* slot(i32 piece) const { return ring + piece % kSlots * cfg.piece_bytes(); }

    // Reuses the slot whose stores are kSlots - kAhead - 1 groups back.
    MOECOMM_FN void load_next() {
        if (!loading.valid()) return;
        bulk_wait_read<kSlots - kAhead - 1>();
        __syncwarp();
        if (lane_id() == 0) {
            const i32 at = loading_piece * cfg.piece_bytes();
            const u8* row = reinterpret_cast<const u8*>(c.a.x) + loading.token * c.a.x_stride;
            bulk_load(slot(loaded), row + at, min(cfg.piece_bytes(), kRowBytes - at), full + loaded % kSlots);
        }
        ++loaded;
        if (++loading_piece == cfg.pieces()) {
            loading_piece = 0;
            loading.next();
        }
    }

    // `to`: the token's row at this lane's peers, null where it is not wanted.
    MOECOMM_FN void store_piece(i32 piece, u8* const (&to)[cfg.peers_per_lane()]) {
        u8* held = slot(stored);
        copy_wait(full + stored % kSlots, stored / kSlots & 1);
        if constexpr (cfg.quantize) {
            const i32 first = piece * cfg.piece_columns;
            quantize_piece<cfg.type>(held, min(cfg.piece_columns, cfg.hidden - first), c.shared.scales[warp_id()] + first / kQuantGroup);
            fence_async_shared();
            __syncwarp();
        }
        const i32 at = piece * kSentBytes;
#pragma unroll
        for (i32 i = 0; i < cfg.peers_per_lane(); ++i)
            if (to[i] != nullptr) bulk_store(to[i] + at, held, min(kSentBytes, cfg.row_bytes - at));
        __syncwarp();
        bulk_commit();
        ++stored;
        if (open_chunk >= 0 && stored - open_since == kSlots) close_chunk<kSlots>();
    }

    // Our part of the open chunk is all at its place; the last `later` groups belong to the next.  The last warp to say so raises the
    // flags.
    template <i32 later>
    MOECOMM_FN void close_chunk() {
        bulk_wait<later>();
        const i32 chunk = open_chunk;
        open_chunk = -1;
        if (!complete_turn(c.shared.sent, c.round, open_nth)) return;
        for (i32 turn = lane_id(); turn < cfg.ranks; turn += kWarp) {
            const i32 p = rotated<cfg.ranks>(c.me(), turn);
            const u32 range = static_cast<u32>(load_fresh(c.chunk_count(cfg.experts + p, chunk)));
            c.transport.signal(p, arrived_at(c.window(), c.me(), chunk), tag_signal(c.round.tag) | range);
        }
    }

    MOECOMM_FN void open(i32 chunk, i32 nth) {
        if (open_chunk >= 0) close_chunk<0>();
        open_chunk = chunk;
        open_nth = nth;
        open_since = stored;
    }
};

// The row and all that stands beside it.
template <class Call>
MOECOMM_FN void send_token(const Call& c, Sender<Call>& sender, const Token<Call>& token) {
    constexpr DispatchConfig cfg = Call::cfg;
    u8* to[cfg.peers_per_lane()] = {};
    for_ranks(c, token, [&](i32 rank, i32 slot, i32 row, i32 lane, i32 place) {
        const Notice& notice = c.shared.notices[rank];
        if (lane_id() == lane) to[place] = c.transport.template peer_ptr<u8>(rank, notice.x) + static_cast<i64>(row) * cfg.row_bytes;
        describe(c, token, rank, slot);
        if constexpr (Call::cfg.scale_bytes > 0 && !Call::cfg.quantize) {
            u8* scales = c.transport.template peer_ptr<u8>(rank, notice.scales) + static_cast<i64>(row) * cfg.scale_bytes;
            copy_small<Call::cfg.scale_bytes>(scales, reinterpret_cast<const u8*>(c.a.in_scales) + token.index * c.a.in_scales_stride);
        }
    });
    for (i32 piece = 0; piece < cfg.pieces(); ++piece) {
        sender.load_next();
        sender.store_piece(piece, to);
    }
    if constexpr (cfg.quantize) {
        for_ranks(c, token, [&](i32 rank, i32, i32 row, i32, i32) {
            u8* scales = c.transport.template peer_ptr<u8>(rank, c.shared.notices[rank].scales) + static_cast<i64>(row) * cfg.scale_bytes;
            copy_small<Call::cfg.scale_bytes>(scales, reinterpret_cast<const u8*>(c.shared.scales[warp_id()]));
        });
        __syncwarp();
    }
}

// By each send warp.
template <class Call>
MOECOMM_FN void send(const Call& c) {
    Sender<Call> sender(c);
    TokenCursor<Call> ahead(c);  // what the next token's lanes need is loaded while this one travels
    Token<Call> next{};
    if (ahead.valid()) next = load_token(c, ahead.token);
    for (i32 i = 0; i < Sender<Call>::kAhead; ++i) sender.load_next();
    for (i32 chunk = blockIdx.x, nth = 0; chunk < c.chunks(); chunk += gridDim.x, ++nth) {
        for (i32 index = chunk * c.a.chunk_tokens + warp_id(); index < c.chunk_end(chunk); index += Call::cfg.send_warps) {
            const Token<Call> token = next;
            ahead.next();
            if (ahead.valid()) next = load_token(c, ahead.token);
            send_token(c, sender, token);
        }
        sender.open(chunk, nth);
    }
    if (sender.open_chunk >= 0) sender.template close_chunk<0>();
}

}  // namespace moecomm
