// Adds up rows: what pull and return have in common.  A warp makes one piece of a row after the other out of the same piece of up to 32
// source rows, in fp32 and in the order of the lanes that name them.  Pieces flow through the warp's ring in that order, those of the next
// items behind them.
#pragma once
#include "call.cuh"

namespace moecomm {

// Role: Next open(const u8*& source, Item&, bool may_wait)   the next item, by all lanes, and this lane's piece, null: none; no item when
//                                    there is no other, or a wait has failed.  What a role waits for may depend on items of ours that are
//                                    open, so it waits only when none is
//       auto target(const Item&)    where the sum goes: looked up once for all of its columns; false: nowhere
//       void store(target, i32 column, float (&)[n])   by a lane: n columns of the sum
//       void close(const Item&)     by all lanes, after it is stored
//       kType, kRowBytes            of a source row
template <class Ring, class Role>
struct Gather {
    static constexpr Type kType = Role::kType;
    static constexpr i32 kColumns = columns_in_16(kType);
    static constexpr i32 kVectors = ceil_div(Ring::kBytes / 16, kWarp);  // of 16 bytes, of a lane

    Ring& ring;
    Role& role;
    u32 issued = 0, used = 0;    // pieces of sources
    i32 opened = 0, closed = 0;  // items
    bool more = true;
    // The item whose sources are being issued.
    const u8* source = nullptr;
    i32 left = 0, order = 0, bytes = 0;  // sources not issued yet; ours among those that are left, from 0

    MOECOMM_FN static i32 bytes_from(i32 column) { return min(Ring::kBytes, Role::kRowBytes - column * bytes_of(kType)); }

    MOECOMM_FN bool open_item() {
        if (!more || opened - closed == kItemsOpen) return false;
        source = nullptr;
        Item item;
        const Next next = role.open(source, item, opened == closed);
        more = next != Next::none;
        if (next != Next::item) return false;
        const u32 named = __ballot_sync(kAllLanes, source != nullptr);
        left = item.sources = __popc(named);
        order = source != nullptr ? __popc(named & lanes_below()) : -1;
        bytes = bytes_from(item.column);
        if (lane_id() == 0) ring.items[opened % kItemsOpen] = item;
        __syncwarp();
        ++opened;
        return true;
    }

    // Issues loads until the ring is full or nothing is left.
    MOECOMM_FN void fill() {
        for (;;) {
            if (left == 0) {
                if (!open_item()) return;
                continue;
            }
            const i32 fit = min(Ring::kSlots - static_cast<i32>(issued - used), left);
            if (fit == 0) return;
            if (order >= 0 && order < fit) {
                const i32 slot = (issued + order) % Ring::kSlots;
                bulk_load(ring.data[slot], source, bytes, &ring.full[slot]);
            }
            issued += fit;
            order -= fit;  // negative: ours is on its way, or there is none
            left -= fit;
        }
    }

    // Adds the oldest piece in the ring.
    MOECOMM_FN void add(float (&sum)[kVectors][kColumns], i32 vectors) {
        const i32 slot = used % Ring::kSlots;
        copy_wait(&ring.full[slot], used / Ring::kSlots & 1);
        const auto* held = reinterpret_cast<const uint4*>(ring.data[slot]);
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v) {
            if (v * kWarp + lane_id() >= vectors) continue;
            float columns[kColumns];
            widen<kType>(held[v * kWarp + lane_id()], columns);
#pragma unroll
            for (i32 i = 0; i < kColumns; ++i) sum[v][i] = __fadd_rn(sum[v][i], columns[i]);
        }
        __syncwarp();  // the slot is free
        ++used;
    }

    MOECOMM_FN void run() {
        for (;;) {
            fill();
            if (closed == opened) return;
            const Item item = ring.items[closed % kItemsOpen];
            const i32 vectors = bytes_from(item.column) / 16;
            float sum[kVectors][kColumns] = {};
            for (i32 added = 0; added < item.sources; ++added) {
                if (added > 0) fill();
                add(sum, vectors);
            }
            if (const auto target = role.target(item)) {
#pragma unroll
                for (i32 v = 0; v < kVectors; ++v) {
                    const i32 vector = v * kWarp + lane_id();
                    if (vector < vectors) role.store(target, item.column + vector * kColumns, sum[v]);
                }
            }
            role.close(item);
            __syncwarp();  // all lanes have read the item
            ++closed;
        }
    }
};

}  // namespace moecomm
