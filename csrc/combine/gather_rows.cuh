// Adds up rows with several domains, and those that are cast: as gather.cuh, but an item is a row of pieces. What an item takes is then
// done once, not for each of its pieces, and loads are issued some at a time. With few blocks a warp spent most of its time on that: an
// `expert` combine of 4096 tokens by 32 blocks of 4 H200s, two a domain, took 1439 us, and takes 900 us (bench/results/domains-h200-4.json
// at b156cddd, and today's).
#pragma once
#include "gather.cuh"

namespace moecomm {

// Called by all lanes of a warp together. run() ends when the role has no further item or a wait of the role has failed.
//
// Role: as in gather.cuh, but open() opens the first of its pieces, whose number is pieces(); close() is called after the last. Also:
//       u32 inner_lanes()            kNests: the lanes whose sources are added to each other before they are added to those of lower lanes.
//       void keep_owners(i32 place)  kAddsDomains: stores, for the item just opened, what add_domains needs. An open item keeps its place.
//       void add_domains(i32 place, target, i32 column, float (&)[n])  kAddsDomains: adds sums of other domains to this lane's n columns.
//       kCasts                       Sums are cast: void cast(const Item&, target, sums, u32 has) stores a piece, and adds its hash; `has`:
//                                    one bit for each vector in which this lane has columns.
//       kSets                        An item has one source, whose columns are the sum.
//       kCopies                      An item has one source, whose bits are stored: by store(target, i32 column, const uint4&).
//       void add_sum_hash(const Item&, i32 vectors)  kHashesSums: adds the hash of the stored piece to that of its row.
template <class Ring, class Role>
struct GatherRows : Gather<Ring, Role> {
    using Gather = moecomm::Gather<Ring, Role>;
    using Gather::kType, Gather::kColumns, Gather::kVectors, Gather::kScaled;
    using Gather::role, Gather::ring, Gather::issued, Gather::used, Gather::opened, Gather::closed;
    using Gather::source, Gather::left, Gather::order, Gather::bytes, Gather::bytes_from;
    using Sums = float[kVectors][kColumns];
    static constexpr i32 kPieceColumns = Ring::kBytes / bytes_of(kType);
    static constexpr i32 kSlotBytes = kScaled ? scaled_column_at(Ring::kBytes) : Ring::kBytes;  // of a piece and its scales
    // All pieces of a row are as long as a slot, and each lane has as many vectors of it.
    static constexpr bool kEven = Role::kRowBytes % Ring::kBytes == 0 && Ring::kBytes % (16 * kWarp) == 0;
    static constexpr i32 kRefill = Ring::kSlots / 2;  // loads are issued when not more of the ring's slots are in use
    // At least two pieces are then in the ring whenever two are to be added; 4-byte columns would spill.
    static constexpr bool kPairs = kRefill > 0 && bytes_of(kType) == 2;

    // The item whose loads are being issued: pieces after this one, and its first column; of each piece, its sources and this lane's
    // position among them.
    i32 pieces_left = 0, column = 0, sources = 0, position = -1;

    MOECOMM_FN GatherRows(Ring& of_warp, Role& of_role) : Gather{of_warp, of_role} {}

    MOECOMM_FN bool open_row() {
        if (!Gather::open_item()) return false;
        pieces_left = left > 0 ? role.pieces() - 1 : 0;
        column = 0, sources = left, position = order;
        return true;
    }
    MOECOMM_FN bool next_piece() {
        if (pieces_left == 0) return false;
        --pieces_left;
        column += kPieceColumns;
        left = sources, order = position;
        bytes = kEven ? Ring::kBytes : bytes_from(column);
        if (order >= 0) source += kSlotBytes;
        return true;
    }
    // Issues bulk loads until the ring is full or no item can be opened.
    MOECOMM_FN void fill() {
        for (;;) {
            if (left == 0) {
                if (!next_piece() && !open_row()) return;
                continue;
            }
            if (!Gather::issue()) return;
        }
    }

    // True if this lane has a v-th vector in a piece of so many.
    MOECOMM_FN static bool has(i32 v, i32 vectors) { return kEven || v * kWarp + lane_id() < vectors; }
    // Waits for the n-th of the pieces in the ring; returns its slot.
    MOECOMM_FN i32 await_piece(i32 n) const {
        const i32 slot = (used + n) % Ring::kSlots;
        copy_wait(&ring.full[slot], (used + n) / Ring::kSlots & 1);
        return slot;
    }
    MOECOMM_FN void free_slots(i32 count) {
        __syncwarp();
        used += count;
    }

    // Waits for the oldest `count` pieces in the ring and adds them, one after the other. What lies in a slot beyond a shorter piece is
    // added as well, and not stored, because no two loads would be in flight together if each had a branch of its own.
    template <i32 count>
    MOECOMM_FN void add(Sums& sum, const Item& item, i32 vectors) {
        const uint4* held[count];
        float factor[count];
#pragma unroll
        for (i32 n = 0; n < count; ++n) {
            const i32 slot = await_piece(n);
            if constexpr (Role::kHashes) Gather::add_hash(item, slot, vectors, false);
            held[n] = reinterpret_cast<const uint4*>(ring.data[slot]) + (kScaled ? 0 : lane_id());
            if constexpr (Role::kFactors) factor[n] = ring.weights[slot][0];
        }
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v) {
            if ((v + 1) * kWarp * 16 > Ring::kBytes && !has(v, vectors)) continue;
#pragma unroll
            for (i32 n = 0; n < count; ++n) {
                if constexpr (kScaled) {
                    Gather::add_scaled(sum[v], reinterpret_cast<const u8*>(held[n]), v, vectors);
                    continue;
                }
                float columns[kColumns];
                widen<kType>(held[n][v * kWarp], columns);
#pragma unroll
                for (i32 i = 0; i < kColumns; ++i) {  // multiplied, then added, each rounded: not a fused multiply-add
                    if constexpr (Role::kFactors) columns[i] = __fmul_rn(factor[n], columns[i]);
                    sum[v][i] = Role::kSets ? columns[i] : __fadd_rn(sum[v][i], columns[i]);
                }
            }
        }
        free_slots(count);
    }
    // Adds the next sources of a piece, two at once if there are: half as many turns of the loop, and the waits of both overlap.
    MOECOMM_FN void add_next(Sums& sum, Sums& outer, const Item& item, i32& added, i32 vectors) {
        if constexpr (Role::kNests) {
            if (added > 0 && added == item.inner.at) set_aside(sum, outer);
            add<1>(sum, item, vectors);
            ++added;
            if (item.inner.at > 0 && added == item.inner.end) add_outer(sum, outer);
        } else if (kPairs && added + 1 < item.sources) {
            add<2>(sum, item, vectors);
            added += 2;
        } else {
            add<1>(sum, item, vectors);
            ++added;
        }
    }
    MOECOMM_FN static void clear(Sums& sum) {
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v)
#pragma unroll
            for (i32 i = 0; i < kColumns; ++i) sum[v][i] = 0.0f;
    }
    MOECOMM_FN static void set_aside(Sums& sum, Sums& outer) {
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v)
#pragma unroll
            for (i32 i = 0; i < kColumns; ++i) outer[v][i] = sum[v][i], sum[v][i] = 0.0f;
    }
    MOECOMM_FN static void add_outer(Sums& sum, const Sums& outer) {
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v)
#pragma unroll
            for (i32 i = 0; i < kColumns; ++i) sum[v][i] = __fadd_rn(outer[v][i], sum[v][i]);
    }

    // kCopies: waits for the oldest piece in the ring and stores it.
    template <class Target>
    MOECOMM_FN void copy(const Item& item, const Target& target, i32 vectors) {
        const i32 slot = await_piece(0);
        const auto* held = reinterpret_cast<const uint4*>(ring.data[slot]);
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v) {
            const i32 vector = v * kWarp + lane_id();
            if (has(v, vectors)) role.store(target, item.column + vector * kColumns, held[vector]);
        }
        if constexpr (Role::kHashesSums) role.add_sum_hash(item, vectors);
        free_slots(1);
    }
    // Stores the sum of a piece. Sums of other domains are added to all columns before the first is stored, so that all loads are in flight
    // together.
    template <class Target>
    MOECOMM_FN void store(const Item& item, const Target& target, Sums& sum, i32 vectors) {
        if constexpr (Role::kCasts) {
            u32 here = 0;
#pragma unroll
            for (i32 v = 0; v < kVectors; ++v) here |= static_cast<u32>(has(v, vectors)) << v;
            role.cast(item, target, sum, here);
        } else if constexpr (Role::kAddsDomains) {
#pragma unroll
            for (i32 v = 0; v < kVectors; ++v) {
                const i32 vector = v * kWarp + lane_id();
                if constexpr (kScaled) {  // all lanes call it, to cast sums of direct rows
                    role.add_domains(closed % kItemsOpen, target, has(v, vectors) ? item.column + vector * kColumns : -1, sum[v]);
                    continue;
                }
                if (has(v, vectors)) role.add_domains(closed % kItemsOpen, target, item.column + vector * kColumns, sum[v]);
            }
        }
        if constexpr (!Role::kCasts) {
#pragma unroll
            for (i32 v = 0; v < kVectors; ++v) {
                const i32 vector = v * kWarp + lane_id();
                if (has(v, vectors)) role.store(target, item.column + vector * kColumns, sum[v]);
            }
        }
        if constexpr (Role::kHashesSums && !Role::kCasts) role.add_sum_hash(item, vectors);
    }

    // One loop over the source pieces of all items, so that fill() stands in the kernel once for each role.
    MOECOMM_FN void run() {
        Item item;
        decltype(role.target(item)) target;
        Sums sum = {}, outer;
        i32 pieces = 0, added = 0;  // of the oldest open item: pieces that are not stored, and sources of the next one that are added
        for (;;) {
            if (static_cast<i32>(issued - used) <= kRefill) fill();
            if (pieces == 0) {
                if (closed == opened) return;
                item = ring.items[closed % kItemsOpen];
                target = role.target(item);
                pieces = role.pieces();
            }
            const i32 vectors = (kEven ? Ring::kBytes : bytes_from(item.column)) / 16;
            if constexpr (Role::kCopies) {
                copy(item, target, vectors);
            } else {
                if (added < item.sources) add_next(sum, outer, item, added, vectors);
                if (added < item.sources) continue;
                if (target) store(item, target, sum, vectors);
                added = 0;
                clear(sum);
            }
            item.column += kPieceColumns;
            if (--pieces > 0) continue;
            role.close(item);
            __syncwarp();  // all lanes have read the item
            ++closed;
        }
    }
};

}  // namespace moecomm
