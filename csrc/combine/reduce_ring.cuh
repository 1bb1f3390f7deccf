// Step 2 with several domains, and of rows that are cast: as reduce.cuh, but pieces of rows pass through a ring of bulk copies. Loads into
// registers keep only 4 KB of a warp in flight, and other roles leave too few warps for that: a row of 14 KiB took a warp 6.6 us, and
// reduce was the slowest role.
#pragma once
#include "cast_rows.cuh"
#include "gather_rows.cuh"
#include "reduce_rows.cuh"
#include "scaleout_direct.cuh"

namespace moecomm {

// The role of a reduce warp. An item is a reduced row, its sources are the row's entries: lane k serves the k-th. A flat row is copied or
// cast. The entries of a row are loaded two rows ahead, and what depends on them one row ahead, because each of these loads waits for
// memory. All lanes call all methods together.
template <class Call>
struct ReduceRing : RowsToReduce<Call> {
    using Rows = RowsToReduce<Call>;
    using Rows::c, Rows::work_list, Rows::now, Rows::next, Rows::row, Rows::failed;
    using Rows::find, Rows::look_up, Rows::begin_row, Rows::pass;
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr Type kType = cfg.type;
    static constexpr i32 kRowBytes = cfg.row_bytes();
    static constexpr bool kCopies = cfg.layout == Layout::flat && !cfg.casts(), kCasts = cfg.casts(), kFactors = Rows::kWeighted;
    static constexpr bool kSets = cfg.layout == Layout::flat && cfg.domains() == 1;  // a flat row keeps the sign of its zeros
    static constexpr bool kSingles = false, kAddsDomains = false, kHashes = false, kNests = false, kHashesSums = cfg.verifies;
    static constexpr i32 kPieces = ceil_div(kRowBytes, cfg.reduce_bytes);

    float factor = 0.0f;  // see gather_rows.cuh

    MOECOMM_FN explicit ReduceRing(const Call& call) : Rows(call) { pass(now.step - 1); }

    // See gather.cuh. Sets `failed` if a wait failed.
    MOECOMM_FN Next open(const u8*& source, Item& out, bool may_wait) {
        if (failed || now.step == work_list.steps) return Next::none;
        if (!begin_row(may_wait)) return may_wait ? Next::none : Next::later;
        if (now.entry >= 0) source = reinterpret_cast<const u8*>(c.a.y) + now.entry * c.a.y_stride;
        factor = now.weight;
        i32 hashed = 0;
        if constexpr (cfg.verifies) hashed = work_list.source_rank(now.step) * c.shape().max_tokens + Rows::row_index();
        const i32 place = static_cast<i32>(static_cast<u64>(row - c.transport.template local<u8>(0)) / 16);
        out = {0, 0, place, hashed, next.step > now.step ? next.step - 1 : -1};
        now = next;
        look_up(now);
        next = find();
        return Next::item;
    }
    MOECOMM_FN static i32 pieces() { return kPieces; }

    MOECOMM_FN u8* target(const Item& item) const {
        return c.transport.template local<u8>(static_cast<u64>(static_cast<u32>(item.token)) * 16);
    }
    template <i32 n>
    MOECOMM_FN void store(u8* to, i32 column, const float (&sum)[n]) const {
        store_columns<cfg.staged()>(to + column * bytes_of(cfg.staged()), sum);
    }
    MOECOMM_FN void store(u8* to, i32 column, const uint4& words) const {
        *reinterpret_cast<uint4*>(to + column * bytes_of(kType)) = words;
    }

    template <i32 vectors, i32 n>
    MOECOMM_FN void cast(const Item& item, u8* to, float (&sum)[vectors][n], u32 has) const {
        const u64 found = store_cast<cfg>(to, item.column + lane_id() * n, sum, has);
        if constexpr (cfg.verifies) add_hash_of_lanes(reinterpret_cast<u64*>(c.a.staged_hashes) + item.ring_column, found);
    }

    MOECOMM_FN void add_sum_hash(const Item& item, i32 vectors) const {
        constexpr i32 bytes = columns_in_16(kType) * bytes_of(cfg.staged());
        u64 found = 0;
        for (i32 vector = lane_id(); vector < vectors; vector += kWarp)
            found += hash_stored(target(item), item.column * bytes_of(cfg.staged()) + vector * bytes, bytes);
        add_hash_of_lanes(reinterpret_cast<u64*>(c.a.staged_hashes) + item.ring_column, found);
    }

    // Arrives at the steps of the work items whose last row of this warp is stored.
    MOECOMM_FN void close(const Item& item) { pass(item.step); }
};

// Called by each reduce warp. Returns false if a wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN bool reduce_through_ring(const Call& c) {
    if constexpr (Call::cfg.domains() > 1) {
        if (!await_headers_seen(c)) return false;
    }
    fence_async();  // bulk loads of y come after the kernel that wrote it
    ReduceRing<Call> role(c);
    if constexpr (Call::cfg.domains() > 1) {
        GatherRows<typename ScaleoutShared<Call::cfg>::ReduceRowRing, ReduceRing<Call>>(c.scaleout().reduce[warp_id()], role).run();
    } else {
        GatherRows<typename CombineShared<Call::cfg>::ReduceRowRing, ReduceRing<Call>>(c.shared.reduce[warp_id()], role).run();
    }
    return !role.failed;
}

}  // namespace moecomm
