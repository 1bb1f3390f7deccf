// Adds up rows, for pull. A warp computes pieces of rows (items), one after another. An item is the sum of the same piece of up to 32
// source rows, in float32 and in the order of the lanes that name them. Source pieces pass through the warp's ring in that order, followed
// by the pieces of the next items. With several domains all roles add up rows, and those that cast in one: gather_rows.cuh, which derives
// from this.
#pragma once
#include "call.cuh"
#include "row_hash.cuh"

namespace moecomm {

// Called by all lanes of a warp together. run() ends when the role has no further item or a wait of the role has failed.
//
// Role: Next open(const u8*& source, Item&, bool may_wait)   Opens the next item; called by all lanes. `source`: this lane's piece, null if
//                                    it has none. Next::none: no further item, or a wait failed. A role blocks only when may_wait, that is
//                                    when this warp holds no open item; this rules out circular waits.
//       auto target(const Item&)    Destination of the sum, looked up once for all columns; false: nothing to store.
//       void store(target, i32 column, float (&)[n])   Stores this lane's n columns of the sum; not all lanes call it.
//       void close(const Item&)     Called by all lanes after the sum is stored.
//       kType, kRowBytes            Type and bytes of a source row, without scales.
//       kSingles, kSingleType       Some sources may be single rows of another type: half as many bytes.
//       const u8* weight            kSingles: after open(), where the weight of this lane's single row lies; null if it is a sum.
//       u64* hash                   kHashes: after open(), to which the hash of this lane's row is added.
//       float factor                kFactors: after open(), what this lane's source is multiplied by before it is added.
//       void start(target, i32 column, float (&)[n])   kStarts: sets this lane's n columns of the sum before the first source is added.
template <class Ring, class Role>
struct Gather {
    static constexpr Type kType = Role::kType;
    static constexpr bool kScaled = has_scales(kType);
    static constexpr i32 kColumns = columns_in_16(kType);
    static constexpr i32 kVectors = ceil_div(Ring::kBytes / 16, kWarp);  // vectors of 16 bytes for each lane
    // kScaled: all pieces of a row are as long as a slot, and complete. Without branches, the loads of a piece's vectors overlap.
    static constexpr bool kFull = Role::kRowBytes % Ring::kBytes == 0 && Ring::kBytes % kScaledColumns == 0;

    Ring& ring;
    Role& role;
    u32 issued = 0, used = 0;    // source pieces
    i32 opened = 0, closed = 0;  // items
    bool more = true;
    // The item whose loads are being issued.
    const u8 *source = nullptr, *weight = nullptr;
    u64* hash = nullptr;
    float factor = 1.0f;
    i32 left = 0, order = 0, bytes = 0;  // sources not issued yet; this lane's position among them; bytes of the piece

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
        if constexpr (Role::kNests) {
            const u32 inner = role.inner_lanes();
            const i32 before = __popc(named & ((inner & -inner) - 1)), count = __popc(named & inner);
            item.inner.at = static_cast<unsigned short>(count > 0 ? before : 0);
            item.inner.end = static_cast<unsigned short>(before + count);
        }
        if constexpr (Role::kSingles) {
            weight = role.weight;
            item.singles = __reduce_add_sync(kAllLanes, source != nullptr && weight != nullptr ? 1u << order : 0);
        }
        if constexpr (Role::kFactors) factor = role.factor;
        if constexpr (Role::kHashes) hash = role.hash;
        if (lane_id() == 0) ring.items[opened % kItemsOpen] = item;
        if constexpr (Role::kAddsDomains) role.keep_owners(opened % kItemsOpen);
        __syncwarp();
        ++opened;
        return true;
    }

    // Issues bulk loads until the ring is full or no item can be opened.
    MOECOMM_FN void fill() {
        for (;;) {
            if (left == 0) {
                if (!open_item()) return;
                continue;
            }
            if (!issue()) return;
        }
    }
    // Issues bulk loads of the sources that are left, as many as the ring has room for. Returns false if it has none.
    MOECOMM_FN bool issue() {
        const i32 fit = min(Ring::kSlots - static_cast<i32>(issued - used), left);
        if (fit == 0) return false;
        if (order >= 0 && order < fit) {
            const i32 slot = (issued + order) % Ring::kSlots;
            if constexpr (Role::kFactors) ring.weights[slot][0] = factor;  // the mbarrier orders it before add()
            if constexpr (Role::kHashes) ring.hashes[slot] = hash;         // likewise
            if constexpr (kScaled) {
                bulk_load(ring.data[slot], source, bytes + Role::cfg.scale_bytes(bytes), &ring.full[slot]);
            } else if (Role::kSingles && weight != nullptr) {
                bulk_load_both(ring.data[slot], source, bytes / 2, ring.weights[slot], weight, 16, &ring.full[slot]);
            } else {
                bulk_load(ring.data[slot], source, bytes, &ring.full[slot]);
            }
        }
        issued += fit;
        order -= fit;  // negative: this lane's load is issued, or it has none
        left -= fit;
        return true;
    }

    // Waits for the oldest piece in the ring and adds it.
    MOECOMM_FN void add(float (&sum)[kVectors][kColumns], const Item& item, i32 vectors, bool single) {
        const i32 slot = used % Ring::kSlots;
        copy_wait(&ring.full[slot], used / Ring::kSlots & 1);
        if constexpr (Role::kHashes) add_hash(item, slot, vectors, single);
        const auto* held = reinterpret_cast<const uint4*>(ring.data[slot]);
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v) {
            if constexpr (kScaled) {
                if (kFull || v * kWarp + lane_id() < vectors) add_scaled(sum[v], ring.data[slot], v, vectors);
                continue;
            }
            if (v * kWarp + lane_id() >= vectors) continue;
            float columns[kColumns];
            if (Role::kSingles && single) {
                load_single(columns, slot, v * kWarp + lane_id());
            } else {
                widen<kType>(held[v * kWarp + lane_id()], columns);
                if constexpr (Role::kFactors) scale_by(ring.weights[slot][0], columns);
            }
#pragma unroll
            for (i32 i = 0; i < kColumns; ++i) sum[v][i] = __fadd_rn(sum[v][i], columns[i]);
        }
        __syncwarp();  // the slot is free
        ++used;
    }

    // Multiplies, and rounds: not a part of a fused multiply-add.
    MOECOMM_FN static void scale_by(float factor, float (&columns)[kColumns]) {
#pragma unroll
        for (i32 i = 0; i < kColumns; ++i) columns[i] = __fmul_rn(factor, columns[i]);
    }

    // kScaled: a v-th vector of each lane has kScaledColumns of a piece of so many vectors, and their scales lie behind it. Adds this
    // lane's values times their scale, each product and sum rounded, four columns after four, which takes few registers.
    MOECOMM_FN static void add_scaled(float (&sum)[kColumns], const u8* piece, i32 v, i32 vectors) {
        const u8* const block = piece + scaled_column_at(v * kScaledColumns);
        const uint4 held = reinterpret_cast<const uint4*>(block)[lane_id()];
        const float scale = scales_behind(block, v, vectors)[lane_id() * kColumns / kQuantGroup];
        const u32 words[4] = {held.x, held.y, held.z, held.w};
#pragma unroll
        for (i32 i = 0; i < kColumns; i += kColumns / 4) {
            float columns[kColumns / 4];
            widen_word<kType>(words[i / (kColumns / 4)], columns);
#pragma unroll
            for (i32 k = 0; k < kColumns / 4; ++k) sum[i + k] = __fadd_rn(sum[i + k], __fmul_rn(columns[k], scale));
        }
    }
    // kScaled: the scales of the v-th vectors of a piece.
    MOECOMM_FN static const float* scales_behind(const u8* block, i32 v, i32 vectors) {
        const i32 columns =
            Role::kRowBytes % kScaledColumns == 0 ? kScaledColumns : min(vectors * kColumns - v * kScaledColumns, kScaledColumns);
        return reinterpret_cast<const float*>(block + columns);
    }

    // kHashes: adds the hash of a piece, and of a weight, which comes with each piece of a single row.
    MOECOMM_FN void add_hash(const Item& item, i32 slot, i32 vectors, bool single) const {
        u64 found = 0;
        if (Role::kSingles && single) {
            if constexpr (Role::kSingles) {
                for (i32 vector = lane_id(); vector < vectors; vector += kWarp) {
                    const uint2 words = reinterpret_cast<const uint2*>(ring.data[slot])[vector];
                    const i32 first = (item.column + vector * kColumns) * bytes_of(Role::kSingleType) / 4;
                    found += hash_word(words.x, first) + hash_word(words.y, first + 1);
                }
                if (lane_id() == 0) found += hash_weight<Role>(ring.weights[slot][0]);
            }
        } else if constexpr (kScaled) {
            for (i32 vector = lane_id(); vector < vectors; vector += kWarp) {
                const i32 column = vector * kColumns, place = scaled_column_at(item.column) / 4;  // of the piece
                found += hash_vector(*reinterpret_cast<const uint4*>(ring.data[slot] + scaled_column_at(column)),
                                     place + scaled_column_at(column) / 4);
                if (column % kQuantGroup != 0) continue;
                const i32 scale = scale_at(column, vectors * kColumns);
                found += hash_word(*reinterpret_cast<const u32*>(ring.data[slot] + scale), place + scale / 4);
            }
        } else {
            for (i32 vector = lane_id(); vector < vectors; vector += kWarp)
                found += hash_vector(reinterpret_cast<const uint4*>(ring.data[slot])[vector],
                                     (item.column + vector * kColumns) * bytes_of(kType) / 4);
        }
        add_hash_of_lanes(ring.hashes[slot], found);
    }

    // Loads columns of a single row, as many as a vector of a sum has, and multiplies them by its weight.
    MOECOMM_FN void load_single(float (&columns)[kColumns], i32 slot, i32 vector) const {
        if constexpr (Role::kSingles) {
            const uint2 held = reinterpret_cast<const uint2*>(ring.data[slot])[vector];
            widen_word<Role::kSingleType>(held.x, columns);
            widen_word<Role::kSingleType>(held.y, columns + kColumns / 2);
#pragma unroll
            for (i32 i = 0; i < kColumns; ++i) columns[i] = __fmul_rn(ring.weights[slot][0], columns[i]);
        }
    }

    MOECOMM_FN void start(float (&sum)[kVectors][kColumns], const Item& item, i32 vectors) const {
        const auto target = role.target(item);
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v) {
            const i32 vector = v * kWarp + lane_id();
            if (vector < vectors) role.start(target, item.column + vector * kColumns, sum[v]);
        }
    }

    // Adds up the pieces of the oldest open item, and stores the sum.
    MOECOMM_FN void add_up(const Item& item, i32 vectors) {
        float sum[kVectors][kColumns] = {};
        if constexpr (Role::kStarts) start(sum, item, vectors);
        for (i32 added = 0; added < item.sources; ++added) {
            if (added > 0) fill();
            add(sum, item, vectors, Role::kSingles && (item.singles >> added & 1) != 0);
        }
        if (const auto target = role.target(item)) {
#pragma unroll
            for (i32 v = 0; v < kVectors; ++v) {
                const i32 vector = v * kWarp + lane_id();
                if (vector < vectors) role.store(target, item.column + vector * kColumns, sum[v]);
            }
        }
    }

    MOECOMM_FN void run() {
        for (;;) {
            fill();
            if (closed == opened) return;
            const Item item = ring.items[closed % kItemsOpen];
            add_up(item, bytes_from(item.column) / 16);
            role.close(item);
            __syncwarp();  // all lanes have read the item
            ++closed;
        }
    }
};

}  // namespace moecomm
