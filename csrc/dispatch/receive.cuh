// Step 5: wait for every chunk of every rank. Where a token has several rows here, replicate the one that arrived; where scales are wanted
// by column, place them.
#pragma once
#include "call.cuh"

namespace moecomm {

// Returns the number of items (source, chunk) to go through in order of arrival: the first chunk of every block of every rank, then the
// second, and so on. Some items have no chunk.
template <class Call>
MOECOMM_FN i32 incoming_items(const Call& c) {
    i32 most = 0;
    for (i32 s = 0; s < Call::cfg.ranks; ++s) {
        const Source& from = c.shared.sources[s];
        most = max(most, from.turns().count());
    }
    return most * Call::cfg.ranks;
}

// Called by all lanes of a warp. Returns whether any rank's rows arrive in chunks.
template <class Call>
MOECOMM_FN bool some_chunks(const Call& c) {
    bool some = false;
    for (i32 s = lane_id(); s < Call::cfg.ranks; s += kWarp) some = some || !c.shared.sources[s].packets;
    return __any_sync(kAllLanes, some);
}

// Called by one thread. Waits (acquire) for the signal of an item's chunk and keeps its range in the route. `range` is 0 if the item has no
// chunk. Returns false if the chunk did not arrive; the failure record is filled.
template <class Call>
MOECOMM_FN bool await_chunk(const Call& c, i32 item, u64& range) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 source = rotated<cfg.ranks>(c.me(), item % cfg.ranks), nth = item / cfg.ranks;
    const Source& from = c.shared.sources[source];
    const i32 chunk = from.turns().chunk_at(nth);
    range = 0;
    if (chunk < 0) return true;
    const u64 flag = arrived_at(c.window(), c.shape(), source, chunk);
    const auto is_last = [&] { return chunk == from.chunks() - 1; };
    if (!wait_flag(c.round, Phase::payload, source, flag, range, Counter::wait_dispatch, is_last)) return false;
    auto* ranges = reinterpret_cast<u32*>(c.a.route.ranges) + static_cast<i64>(source) * c.shape().max_tokens;
    if constexpr (!cfg.repeat) ranges[chunk] = signal_word(range);
    return true;
}

// Replicates rows of a chunk to the other rows of their tokens on this rank, through the warp's ring. Loads run ahead of stores, as in
// Sender. All lanes of a receive warp call all methods together.
template <class Call>
struct Replicator {
    static constexpr DispatchConfig cfg = Call::cfg;
    static constexpr i32 kSlots = cfg.replicate_slots, kAhead = kSlots / 2, kBytes = cfg.replicate_bytes;
    static constexpr i32 kPieces = ceil_div(cfg.row_bytes, kBytes);

    const Call& c;
    ReplicateRing<cfg>& ring;
    i32 loaded = 0, stored = 0;  // pieces, of all chunks

    // Position in a chunk: a token and a piece of its row. `row`: this lane's row of the token; `present`: the lanes that have a row.
    struct Cursor {
        i32 token = -1, piece = kPieces, row = -1;
        u32 present = 0;
    };

    MOECOMM_FN i64 row_of(i32 row, i32 lane) const { return __shfl_sync(kAllLanes, row, lane); }

    // Advances to the next piece of a token with more than one row; returns false at the end.
    MOECOMM_FN bool next(Cursor& at, i32 count) const {
        if (++at.piece < kPieces) return true;
        for (++at.token; at.token < count; ++at.token) {
            at.row = lane_id() < cfg.topk ? ring.rows[at.token * cfg.topk + lane_id()] : -1;
            at.present = __ballot_sync(kAllLanes, at.row >= 0);
            at.piece = 0;
            if ((at.present & (at.present - 1)) != 0) return true;
        }
        return false;
    }
    MOECOMM_FN static i32 bytes_of_piece(i32 piece) { return min(kBytes, cfg.row_bytes - piece * kBytes); }
    MOECOMM_FN u8* place(i64 row, i32 piece) const {
        return c.transport.template local<u8>(c.a.out_x) + row * cfg.row_bytes + piece * kBytes;
    }

    MOECOMM_FN void load(const Cursor& at) {
        bulk_wait_read<kSlots - kAhead - 1>();
        __syncwarp();
        const u8* from = place(row_of(at.row, __ffs(at.present) - 1), at.piece);
        if (lane_id() == 0) bulk_load(ring.data[loaded % kSlots], from, bytes_of_piece(at.piece), &ring.full[loaded % kSlots]);
        ++loaded;
    }
    MOECOMM_FN void store(const Cursor& at) {
        const i32 slot = stored % kSlots;
        copy_wait(&ring.full[slot], stored / kSlots & 1);
        const bool other = at.row >= 0 && (at.present & lanes_below()) != 0;
        if (other) bulk_store(place(at.row, at.piece), ring.data[slot], bytes_of_piece(at.piece));
        __syncwarp();
        bulk_commit();
        ++stored;
    }

    // Replicates the flat rows [first, first + count). Lane 0 has acquired their signal, and a barrier of the warp has followed.
    MOECOMM_FN void replicate(i32 first, i32 count) {
        const auto* rows = reinterpret_cast<const i32*>(c.a.route.rows) + static_cast<i64>(first) * cfg.topk;
        for (i32 i = lane_id(); i < count * cfg.topk; i += kWarp) ring.rows[i] = load_fresh(rows + i);
        fence_async();  // reads of the rows come after the signal
        __syncwarp();
        Cursor loading, storing;
        bool more = true;
        for (i32 i = 0; i < kAhead && more; ++i) {
            more = next(loading, count);
            if (more) load(loading);
        }
        while (next(storing, count)) {
            more = more && next(loading, count);
            if (more) load(loading);
            store(storing);
        }
        if constexpr (kLoadsScalesAhead && !cfg.scale_columns) {
            replicate_long_scales(count);
        } else if constexpr (cfg.scale_bytes > 0 && !cfg.scale_columns) {
            replicate_scales(count);
        }
        __syncwarp();  // all lanes have read ring.rows
    }

    MOECOMM_FN void replicate_scales(i32 count) const {
        u8* scales = c.transport.template local<u8>(c.a.out_scales);
        Cursor at;
        while (next(at, count)) {
            at.piece = kPieces;
            const u8* from = scales + row_of(at.row, __ffs(at.present) - 1) * cfg.scale_bytes;
            for (u32 left = at.present & (at.present - 1); left != 0; left &= left - 1)
                copy_small(scales + row_of(at.row, __ffs(left) - 1) * cfg.scale_bytes, from, cfg.scale_bytes);
        }
    }
    // Each load is waited for. Of longer rows, such as those of NVFP4, the next token's are loaded before this one's are stored.
    static constexpr bool kLoadsScalesAhead =
        !cfg.casts_to_fp8() && cfg.scale_bytes > 256 && cfg.scale_bytes <= 1024 && cfg.scale_bytes % 4 == 0;
    MOECOMM_FN void replicate_long_scales(i32 count) const {
        u8* scales = c.transport.template local<u8>(c.a.out_scales);
        const auto of = [&](const Cursor& at, u32 present) { return scales + row_of(at.row, __ffs(present) - 1) * cfg.scale_bytes; };
        constexpr i32 words = cfg.scale_bytes / 4, each = ceil_div(words, kWarp);
        Cursor at;
        u32 held[each], ahead[each];
        const auto load = [&](u32(&to)[each]) {
            const auto* from = reinterpret_cast<const volatile u32*>(of(at, at.present));
#pragma unroll
            for (i32 i = 0; i < each; ++i)
                if (i * kWarp + lane_id() < words) to[i] = from[i * kWarp + lane_id()];
            at.piece = kPieces;
        };
        bool more = next(at, count);
        if (more) load(held);
        while (more) {
            const Cursor here = at;
            more = next(at, count);
            if (more) load(ahead);
            for (u32 left = here.present & (here.present - 1); left != 0; left &= left - 1) {
                auto* to = reinterpret_cast<u32*>(of(here, left));
#pragma unroll
                for (i32 i = 0; i < each; ++i)
                    if (i * kWarp + lane_id() < words) to[i * kWarp + lane_id()] = held[i];
            }
#pragma unroll
            for (i32 i = 0; i < each; ++i) held[i] = ahead[i];
        }
    }
};

// Called by all lanes of a receive warp, after the signal. Copies the scales of the flat rows [first, first + count) from the receive
// buffer to each column, for each of a token's rows here.
template <class Call>
MOECOMM_FN void place_scales(const Call& c, i32 first, i32 count) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 words = cfg.scale_bytes / 4;
    const auto* rows = reinterpret_cast<const i32*>(c.a.route.rows);
    auto* columns = reinterpret_cast<i32*>(c.a.scale_columns);
    const i64 group = cfg.layout == Layout::batched ? batched_group(c.a.max_rows, c.experts_here()) : 0;
    for (i32 slot = first; slot < first + count; ++slot) {
        i32 row = lane_id() == 0 ? slot : -1;
        if constexpr (cfg.layout != Layout::flat)
            row = lane_id() < cfg.topk ? load_fresh(rows + static_cast<i64>(slot) * cfg.topk + lane_id()) : -1;
        const auto* received = c.transport.template local<const i32>(c.a.out_scales + static_cast<i64>(slot) * cfg.scale_bytes);
        for (u32 left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1) {
            const i64 to = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
            i32* there = group == 0 ? columns + to : columns + to / group * words * c.a.scale_stride + to % group;
            for (i32 i = lane_id(); i < words; i += kWarp) there[i * c.a.scale_stride] = load_fresh(received + i);
        }
    }
}

// Called by each receive warp, while the send warps of the block send. The receive warps of the grid divide the chunks; neighboring items
// go to different blocks. Returns false in all lanes if a chunk did not arrive; the failure record is filled.
template <class Call>
MOECOMM_FN bool receive(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 warp = warp_id() - cfg.send_warps, items = incoming_items(c);
    Replicator<Call> replicator{c, c.shared.replicate[cfg.replicates() ? warp : 0]};
    bool missing = false;
    for (i32 item = blockIdx.x + gridDim.x * warp; item < items; item += gridDim.x * cfg.receive_warps) {
        u64 range = 0;
        missing = __any_sync(kAllLanes, lane_id() == 0 && !await_chunk(c, item, range));
        if (missing) break;  // this barrier lets the other lanes read what the signal covers
        range = __shfl_sync(kAllLanes, range, 0);
        const i32 first = signal_first(range), count = signal_count(range);
        if constexpr (cfg.replicates()) replicator.replicate(first, count);
        if constexpr (cfg.scale_columns) place_scales(c, first, count);
    }
    bulk_wait<0>();
    return !missing;
}

// Called by all threads, where rows arrive at their final place. Waits for all chunks. Returns false in a thread whose chunk did not
// arrive; the failure record is filled.
template <class Call>
MOECOMM_FN bool await_all(const Call& c) {
    const i32 items = incoming_items(c), threads = gridDim.x * Call::cfg.threads();
    for (i32 item = blockIdx.x + gridDim.x * threadIdx.x; item < items; item += threads) {
        u64 range;
        if (!await_chunk(c, item, range)) return false;
    }
    return true;
}

}  // namespace moecomm
