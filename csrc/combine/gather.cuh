// Adds up rows: what reduce and pull have in common.  A warp makes one row after the other out of up to 32 source rows each, piece by
// piece, in fp32 and in the order of the lanes that name the sources.  Pieces of sources flow through the warp's ring in that order,
// those of the next rows behind them.
#pragma once
#include "call.cuh"

namespace moecomm {

// A lane's source row; null: none.
struct Source {
    const u8* row;
    float weight;
};

// Role: bool open(Source&, Item&)   the next row, by all lanes; false when there is no other, or a wait has failed
//       void store(const Item&, i32 column, const float (&)[n])   by a lane: n columns of the sum
//       void close(const Item&)     by all lanes, after its last piece
//       kType, kRowBytes            of a source row; kWeighted: times its weight, rounded, before it is added
template <class Ring, class Role>
struct Gather {
    static constexpr Type kType = Role::kType;
    static constexpr i32 kColumns = columns_in_16(kType);
    static constexpr i32 kPieces = ceil_div(Role::kRowBytes, Ring::kBytes);
    static constexpr i32 kVectors = ceil_div(Ring::kBytes / 16, kWarp);  // of 16 bytes, of a lane

    Ring& ring;
    Role& role;
    u32 issued = 0, used = 0;    // pieces of sources
    i32 opened = 0, closed = 0;  // rows
    bool more = true;
    // The row whose sources are being issued.
    Source source{nullptr, 0.0f};
    i32 sources = 0, order = 0;         // how many, and ours among them
    i32 piece = kPieces, in_piece = 0;  // next to issue: of the row, and of the sources of that piece

    MOECOMM_FN static i32 bytes_of_piece(i32 n) { return min(Ring::kBytes, Role::kRowBytes - n * Ring::kBytes); }

    MOECOMM_FN bool open_row() {
        if (!more || opened - closed == kItemsOpen) return false;
        source = {nullptr, 0.0f};
        Item item;
        more = role.open(source, item);
        if (!more) return false;
        const u32 named = __ballot_sync(kAllLanes, source.row != nullptr);
        sources = item.sources = __popc(named);
        order = __popc(named & lanes_below());
        if (lane_id() == 0) ring.items[opened % kItemsOpen] = item;
        __syncwarp();
        ++opened;
        piece = sources == 0 ? kPieces : 0;
        in_piece = 0;
        return true;
    }

    // Issues loads until the ring is full or nothing is left.
    MOECOMM_FN void fill() {
        for (;;) {
            if (piece == kPieces) {
                if (!open_row()) return;
                continue;
            }
            const i32 fit = min(Ring::kSlots - static_cast<i32>(issued - used), sources - in_piece);
            if (fit == 0) return;
            const i32 mine = order - in_piece;
            if (source.row != nullptr && mine >= 0 && mine < fit) {
                const i32 slot = (issued + mine) % Ring::kSlots;
                ring.weight[slot] = source.weight;
                bulk_load(ring.data[slot], source.row + piece * Ring::kBytes, bytes_of_piece(piece), &ring.full[slot]);
            }
            issued += fit;
            in_piece += fit;
            if (in_piece == sources) {
                in_piece = 0;
                ++piece;
            }
        }
    }

    // Adds the oldest piece in the ring.  Multiply, then add, each rounded: not one fused operation.
    MOECOMM_FN void add(float (&sum)[kVectors][kColumns], i32 vectors) {
        const i32 slot = used % Ring::kSlots;
        copy_wait(&ring.full[slot], used / Ring::kSlots & 1);
        const float weight = ring.weight[slot];
        const auto* held = reinterpret_cast<const uint4*>(ring.data[slot]);
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v) {
            if (v * kWarp + lane_id() >= vectors) continue;
            float columns[kColumns];
            widen<kType>(held[v * kWarp + lane_id()], columns);
#pragma unroll
            for (i32 i = 0; i < kColumns; ++i)
                sum[v][i] = __fadd_rn(sum[v][i], Role::kWeighted ? __fmul_rn(weight, columns[i]) : columns[i]);
        }
        __syncwarp();  // the slot is free
        ++used;
    }

    MOECOMM_FN void run() {
        float sum[kVectors][kColumns] = {};
        i32 at = 0, added = 0;  // piece, and sources of it that are in the sum
        for (;;) {
            fill();
            if (closed == opened) return;
            const Item item = ring.items[closed % kItemsOpen];
            const i32 vectors = bytes_of_piece(at) / 16;
            if (added < item.sources) {
                add(sum, vectors);
                ++added;
            }
            if (added < item.sources) continue;
#pragma unroll
            for (i32 v = 0; v < kVectors; ++v) {
                const i32 vector = v * kWarp + lane_id();
                if (vector < vectors) role.store(item, (at * (Ring::kBytes / 16) + vector) * kColumns, sum[v]);
#pragma unroll
                for (i32 i = 0; i < kColumns; ++i) sum[v][i] = 0.0f;
            }
            added = 0;
            if (++at < kPieces) continue;
            at = 0;
            role.close(item);
            __syncwarp();  // all lanes have read the item
            ++closed;
        }
    }
};

}  // namespace moecomm
