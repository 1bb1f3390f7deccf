// The end of a fused layer at the source rank: weights and adds up the received rows of each token.  The order is that of the ranks and,
// inside a rank, of k, with a separate sum for each rank: the bits of a combine whose wire dtype is fp32.  Or it is that of k: the bits of
// one whose rows travel unsummed.
//
// A warp computes a piece of a token's row at a time, out of the same piece of the received rows.  Meanwhile the inputs of later pieces
// load into its slots.  The slots take nearly all of the shared memory, which is what it takes to read at the bandwidth of memory.
#pragma once
#include "../device/bulk.cuh"
#include "../device/cast.cuh"
#include "../device/lanes.cuh"
#include "../gemm/tensor.cuh"
#include "layer.cuh"

namespace moecomm {

struct ReduceConfig {
    Type type;  // of rows, bias and out
    i32 hidden, topk;
    i32 warps, slots;  // warps of a block, slots of a warp
    i32 piece_bytes;   // of a row; a multiple of 16 bytes a lane
    bool by_k;         // added in the order of k, and in one sum

    MOECOMM_BOTH constexpr i32 threads() const { return warps * kWarp; }
    MOECOMM_BOTH constexpr i32 row_bytes() const { return hidden * 2; }
    MOECOMM_BOTH constexpr i32 pieces() const { return ceil_div(row_bytes(), piece_bytes); }
};

// The inputs of a piece.
template <ReduceConfig h>
struct ReduceSlot {
    struct Entry {
        i32 k, owner;
        float weight;
        i32 pad;
    };
    alignas(128) u8 rows[h.topk + 1][h.piece_bytes];  // by k; the last is the bias
    Entry entries[h.topk];                            // in the order in which they are added
    i32 count;                                        // of entries
    u64 full;
};

template <ReduceConfig h>
struct ReduceShared {
    ReduceSlot<h> slots[h.warps][h.slots];
};

// The work of a warp: every `step`-th item from `next` on; an item is a piece of a token.  All methods are called by the whole warp.
template <ReduceConfig h>
struct ReduceWarp {
    static constexpr i32 kColumns = 8, kVectors = h.piece_bytes / (16 * kWarp);  // of 16 bytes, a lane
    static_assert(h.topk <= kWarp && h.hidden % kColumns == 0 && h.piece_bytes % (16 * kWarp) == 0, "an entry a lane, whole vectors");

    const LayerArgs& a;
    ReduceSlot<h> (&slots)[h.slots];
    const i32 step, items;
    i32 next;        // item to load next
    i32 owner = -1;  // of this lane's entry of that item's token
    float weight = 1.0f;

    MOECOMM_FN static i32 bytes_from(i32 at) { return min(h.piece_bytes, h.row_bytes() - at); }

    // Loads this lane's entry of the next item early, so that it is in registers when a slot is free.  Called once before run().
    MOECOMM_FN void look_ahead() {
        owner = -1;
        if (next >= items || lane_id() >= h.topk) return;
        const i32 entry = next / h.pieces() * h.topk + lane_id();
        owner = reinterpret_cast<const i32*>(a.owners)[entry];
        if (a.weights != 0) weight = reinterpret_cast<const float*>(a.weights)[entry];
    }

    // Starts the loads of the next item into a free slot; `full` completes with them.
    MOECOMM_FN void load(ReduceSlot<h>& slot) {
        if (next >= items) return;
        const i32 token = next / h.pieces(), at = next % h.pieces() * h.piece_bytes, lane = lane_id(), bytes = bytes_from(at);
        i32 before = 0;
#pragma unroll
        for (i32 k = 0; k < h.topk; ++k) {
            const i32 other = __shfl_sync(kAllLanes, owner, k);
            if (other >= 0 && (h.by_k ? k < lane : other < owner || (other == owner && k < lane))) ++before;
        }
        const u32 named = __ballot_sync(kAllLanes, owner >= 0);
        if (owner >= 0) {
            slot.entries[before] = {lane, owner, weight, 0};
            const u64 row = a.ctx.peers[a.ctx.rank] + a.received + (static_cast<u64>(token) * h.topk + lane) * h.row_bytes();
            bulk_load(slot.rows[lane], reinterpret_cast<const u8*>(row) + at, bytes, &slot.full);
        } else {
            arrive(&slot.full);
        }
        if (lane == 0) {
            slot.count = __popc(named);
            if (a.bias != 0) {
                bulk_load(slot.rows[h.topk], reinterpret_cast<const u8*>(a.bias) + token * a.bias_stride + at, bytes, &slot.full);
            } else {
                arrive(&slot.full);
            }
        }
        next += step;
        look_ahead();
    }

    MOECOMM_FN static void columns_of(const u8* row, i32 v, float (&columns)[kColumns]) {
        widen<h.type>(reinterpret_cast<const uint4*>(row)[v * kWarp + lane_id()], columns);
    }
    MOECOMM_FN void add_up(const ReduceSlot<h>& slot, i32 item) const {
        float sum[kVectors][kColumns] = {}, part[kVectors][kColumns] = {};
        const auto end_part = [&] {
#pragma unroll
            for (i32 i = 0; i < kVectors * kColumns; ++i) {
                (&sum[0][0])[i] = __fadd_rn((&sum[0][0])[i], (&part[0][0])[i]);
                (&part[0][0])[i] = 0.0f;
            }
        };
        i32 of = -1;  // owner of the current part
        for (i32 n = 0; n < slot.count; ++n) {
            const auto entry = slot.entries[n];
            if (!h.by_k && entry.owner != of && of >= 0) end_part();
            of = entry.owner;
#pragma unroll
            for (i32 v = 0; v < kVectors; ++v) {
                float columns[kColumns];
                columns_of(slot.rows[entry.k], v, columns);
#pragma unroll
                for (i32 i = 0; i < kColumns; ++i) part[v][i] = __fadd_rn(part[v][i], __fmul_rn(entry.weight, columns[i]));
            }
        }
        if (of >= 0) end_part();
        const i32 token = item / h.pieces(), at = item % h.pieces() * h.piece_bytes;
        u8* const out = reinterpret_cast<u8*>(a.out) + token * a.out_stride + at;
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v) {
            const i32 vector = v * kWarp + lane_id();
            if (vector * 16 >= bytes_from(at)) continue;
            if (a.bias != 0) {
                float bias[kColumns];
                columns_of(slot.rows[h.topk], v, bias);
#pragma unroll
                for (i32 i = 0; i < kColumns; ++i) sum[v][i] = __fadd_rn(sum[v][i], bias[i]);
            }
            store_columns<h.type>(out + vector * 16, sum[v]);
        }
    }

    MOECOMM_FN void run() {
        fence_async();  // received rows were acquired by ordinary loads; bulk loads read them
        i32 item = next;
        for (i32 i = 0; i < h.slots; ++i) load(slots[i]);
        for (i32 nth = 0; item < items; item += step, ++nth) {
            ReduceSlot<h>& slot = slots[nth % h.slots];
            copy_wait(&slot.full, nth / h.slots & 1);
            __syncwarp();  // the entries are visible to all lanes
            add_up(slot, item);
            __syncwarp();  // all lanes have read the slot
            load(slot);
        }
    }
};

// Waits until all ranks, this one included, have sent their rows of this rank's tokens, and acquires them.  Called by the first warp of
// each block, a lane a peer.  Returns false in all lanes, with the failure record filled, on a timeout or abort, or if this rank's own
// expert layer has set `failed` (it then signals no rank).
MOECOMM_FN bool await_received(const LayerArgs& a, const Round& r) {
    bool missing = false;
    for (i32 p = lane_id(); p < a.ctx.shape.ranks && !missing; p += kWarp) {
        const u64* flag = own<const u64>(a.ctx, received_at(a.ctx, p));
        u32 tag = 0, failed = 0;
        const auto received = [&] {
            tag = signal_tag(load_acquire(flag));
            failed = load_relaxed(reinterpret_cast<const u32*>(a.failed));
            return has_reached(tag, r.tag, r.tag) || failed != 0;  // a later tag says so as well
        };
        bool here = received();
        if (!here) {
            const u64 begun = blockIdx.x == 0 ? now_ns() : 0;
            here = wait_for(r, Phase::reduced, p, r.tag, received, [&] { return static_cast<i64>(tag); });
            if (blockIdx.x == 0 && p != a.ctx.rank) add_counter(a.ctx, Counter::wait_combine, p, now_ns() - begun);
        }
        missing = !here || failed != 0;
        if (failed != 0) report_failure(r, Waited::timeout, Phase::grid, a.ctx.rank, 0, 0, a.ctx.timeout_ns);
    }
    return !__any_sync(kAllLanes, missing);
}

// The body of the kernel: all threads of any number of blocks.  An invalid round (tag 0) waits for nothing.
template <ReduceConfig h>
MOECOMM_FN void reduce_received(const LayerArgs& a) {
    extern __shared__ __align__(128) u8 memory[];
    auto& shared = *reinterpret_cast<ReduceShared<h>*>(memory);
    static_assert(sizeof(ReduceSlot<h>) <= reduce_slot_bytes(h.topk, h.piece_bytes), "what is launched");
    for (i32 i = threadIdx.x; i < h.warps * h.slots; i += h.threads()) barrier_init(&(&shared.slots[0][0])[i].full, kWarp + 1);
    barrier_init_done();
    const i32 first = blockIdx.x * h.warps + warp_id();
    ReduceWarp<h> warp{a, shared.slots[warp_id()], static_cast<i32>(gridDim.x) * h.warps, a.num_tokens * h.pieces(), first};
    warp.look_ahead();
    const Round round{a.ctx, Op::combine, layer_round(a)};
    bool ok = true;
    {
        MOECOMM_LAYER_SPAN(await_results, a.ctx, threadIdx.x == 0);
        if (round.tag != 0 && warp_id() == 0) ok = await_received(a, round);
    }
    if (!__syncthreads_and(ok)) return;
    launch_dependents();
    MOECOMM_LAYER_SPAN(reduce, a.ctx, threadIdx.x == 0);
    warp.run();
}

// The kernel, with any number of blocks.  It need not wait for the expert layer's launch to end: that launch has itself waited for all
// earlier kernels, and signals its results, also to this rank.  Waiting at the end keeps the next kernel from starting before the launch
// has ended.
template <ReduceConfig h>
MOECOMM_FN void reduce_layer(const LayerArgs& a) {
    reduce_received<h>(a);
    await_earlier_kernels();
}

}  // namespace moecomm
