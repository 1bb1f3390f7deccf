// The step ahead of a dispatch in a Buffer whose placement balances replicas, in a kernel of its own: ranks exchange how many entries each
// has for each expert, and choose the slots of their entries. moecomm/base/replicas.py is the specification;
// host/choose.cpp does the same on CPU ranks. With kReplicated they choose experts to copy to empty slots, too.
//
// Each block counts a part of the entries. It then knows the counts of all blocks and all ranks, and divides all entries by itself.
#pragma once
#include "../device/launch.cuh"
#include "../device/tagged_words.cuh"
#include "../protocol/placement.h"
#include "../transport/transport.cuh"

namespace moecomm {

constexpr i32 kChooseWarps = 16, kChooseThreads = kChooseWarps * kWarp;

// `experts`: named_experts(Shape); `slots`: Shape::slots.
template <i32 ranks, i32 slots, i32 experts>
struct ChooseShared {
    u32 words[placement_words(experts, slots)];  // of the placement: its entries and lists
    i32 counts[kChooseWarps][experts];           // of each warp; then those of this rank's entries before the warp's next one
    i32 totals[experts];                         // entries of all ranks
    i32 first[experts];                          // entries of earlier ranks; then those that do not stay on their rank
    i32 kept[experts];                           // entries that stay on this rank
    i32 own[experts];                            // the slot here where they stay
    i32 several[experts], num_several;           // experts with several candidates
    i32 found[slots];                            // by place in the lists: the share of a candidate; then the end of what is left of it
    i32 loads[ranks];
    RoundHeader mine;  // as far as call_differs() reads it
    Begin begin;
};

// For copies.
template <i32 ranks, i32 slots, i32 experts>
struct CopyShared {
    i32 empty[slots];             // ascending
    i32 source[experts];          // its first candidate that is no copy
    i32 next[ranks], end[ranks];  // of each rank, the empty slots that are left, by their places in `empty`
    i32 holds[ranks];             // the rank holds an expert
};

template <i32 ranks, i32 slots, i32 experts, i32 topk, i32 idx_bytes>
struct Chooser {
    static constexpr ExpertRanges ranges{slots, ranks};
    const DispatchArgs& a;
    ChooseShared<ranks, slots, experts>& shared;
    Round round;

    struct Candidates {
        i32 count, at;  // `at`: the slot of the only one; of several, the place of their list in `words`
    };
    MOECOMM_FN Candidates candidates(i32 expert) const {
        return {static_cast<i32>(shared.words[expert] % kMostReplicas), static_cast<i32>(shared.words[expert] / kMostReplicas)};
    }
    MOECOMM_FN i32 owner(i32 place) const { return ranges.owner(static_cast<i32>(shared.words[place])); }
    MOECOMM_FN i32& found(i32 place) const { return shared.found[place - experts]; }
    MOECOMM_FN i64 id_at(i32 entry) const {
        if constexpr (idx_bytes == 8) return reinterpret_cast<const i64*>(a.topk_idx)[entry];
        return reinterpret_cast<const i32*>(a.topk_idx)[entry];
    }
    MOECOMM_FN bool is_named(i64 id) const { return id >= 0 && id < experts; }
    // The first entry of a warp of all blocks.
    MOECOMM_FN i32 first_of(i32 warp) const {
        const i64 entries = static_cast<i64>(a.num_tokens) * topk;
        return static_cast<i32>(entries * (blockIdx.x * kChooseWarps + warp) / (gridDim.x * kChooseWarps));
    }
    MOECOMM_FN u64 word_at(i32 from, i32 expert) const {
        return choice_words_at(a.ctx.window, a.ctx.shape, round.tag, from) + expert * sizeof(u64);
    }

    MOECOMM_FN void count() const {
        const i32 end = first_of(warp_id() + 1);
#pragma unroll 4
        for (i32 entry = first_of(warp_id()) + lane_id(); entry < end; entry += kWarp)
            if (const i64 id = id_at(entry); is_named(id)) atomicAdd(&shared.counts[warp_id()][id], 1);
    }

    // By one thread for an expert. Sends this rank's count to all ranks, the blocks to some each, and takes the counts of all blocks and
    // ranks. False if a wait has failed, or a peer makes another call.
    MOECOMM_FN bool exchange(i32 expert, u64 masked) const {
        i32 here = 0;
        for (i32 warp = 0; warp < kChooseWarps; ++warp) {
            i32& counter = shared.counts[warp][expert];
            const i32 count = counter;
            counter = here;
            here += count;
        }
        const auto counting = [&](i32 block) { return choice_counting_at(a.ctx.window, a.ctx.shape, block) + expert * sizeof(u64); };
        const i32 blocks = gridDim.x, block = blockIdx.x;
        if (blocks > 1) {
            i32 all = 0, before = 0;
            store_relaxed(own<u64>(a.ctx, counting(block)), word_signal(round.tag, static_cast<u32>(here)));
            const bool in_time = await_words<4>(
                round, Phase::grid, blocks, counting, [&](i32) { return a.ctx.rank; }, [](i32) { return false; },
                [&](i32 nth, u32 count) {
                    if (nth < block) before += static_cast<i32>(count);
                    all += static_cast<i32>(count);
                });
            if (!in_time) return false;
            for (i32 warp = 0; warp < kChooseWarps; ++warp) shared.counts[warp][expert] += before;
            here = all;
        }
        for (i32 step = block; step < ranks; step += blocks) {
            const i32 peer = rotated<ranks>(a.ctx.rank, step);
            if (is_in(masked, peer)) continue;
            Lsa{a.ctx}.post(peer, word_at(a.ctx.rank, expert), word_signal(round.tag, static_cast<u32>(here)));
        }
        i32 polls = 0, total = 0, earlier = 0;
        bool differs = false;
        const auto from = [&](i32 nth) { return is_in(masked, nth) ? a.ctx.rank : nth; };  // of a masked rank nothing comes
        const bool in_time = await_words<8>(
            round, Phase::header, ranks, [&](i32 nth) { return word_at(from(nth), expert); }, from,
            [&](i32 nth) {
                differs = ++polls % 16 == 0 && call_differs(round, from(nth), shared.mine);
                return differs;
            },
            [&](i32 nth, u32 count) {
                if (is_in(masked, nth)) return;
                total += static_cast<i32>(count);
                if (nth < a.ctx.rank) earlier += static_cast<i32>(count);
            });
        shared.totals[expert] = total, shared.first[expert] = earlier;
        return in_time && !differs;
    }

    // By one thread for an expert, between barriers: the loads that even shares make.
    MOECOMM_FN void share_evenly(i32 expert) const {
        const Candidates c = candidates(expert);
        const i32 total = shared.totals[expert];
        if (c.count == 1) atomicAdd(&shared.loads[ranges.owner(c.at)], total);
        for (i32 i = 0; c.count > 1 && i < c.count; ++i) {
            found(c.at + i) = total / c.count + (i < total % c.count);
            atomicAdd(&shared.loads[owner(c.at + i)], found(c.at + i));
        }
    }

    // By one warp.
    MOECOMM_FN void list_several() const {
        i32 n = 0;
        for (i32 first = 0; first < experts; first += kWarp) {
            const i32 expert = first + lane_id();
            const bool several = expert < experts && candidates(expert).count > 1;
            const u32 lanes = __ballot_sync(kAllLanes, several);
            if (several) shared.several[n + __popc(lanes & lanes_below())] = expert;
            n += __popc(lanes);
        }
        if (lane_id() == 0) shared.num_several = n;
        __syncwarp();
    }

    // By one warp; a lane has one of each kWarp candidates.
    MOECOMM_FN void pour(i32 expert) const {
        constexpr i32 looks = ceil_div(ranks, kWarp);
        const Candidates c = candidates(expert);
        i32 load[looks], rank[looks];
        bool filled[looks];
#pragma unroll
        for (i32 look = 0; look < looks; ++look) {
            const i32 i = look * kWarp + lane_id();
            filled[look] = i < c.count;
            rank[look] = filled[look] ? owner(c.at + i) : 0;
            load[look] = filled[look] ? shared.loads[rank[look]] - found(c.at + i) : 0;
        }
        u32 level = 0, over = 0, n = 0;
        for (bool goes_on = true; goes_on;) {
            u32 sum = static_cast<u32>(shared.totals[expert]);
            n = 0;
#pragma unroll
            for (i32 look = 0; look < looks; ++look) {
                sum += __reduce_add_sync(kAllLanes, static_cast<u32>(filled[look] ? load[look] : 0));
                n += __popc(__ballot_sync(kAllLanes, filled[look]));
            }
            level = sum / n, over = sum % n;
            goes_on = false;
#pragma unroll
            for (i32 look = 0; look < looks; ++look) {
                const bool above = filled[look] && load[look] > static_cast<i32>(level);
                goes_on = __any_sync(kAllLanes, above) || goes_on;
                filled[look] = filled[look] && !above;
            }
        }
        u32 nth = 0;
#pragma unroll
        for (i32 look = 0; look < looks; ++look) {
            const u32 lanes = __ballot_sync(kAllLanes, filled[look]);
            const u32 here = nth + __popc(lanes & lanes_below());
            const i32 i = look * kWarp + lane_id(), share = filled[look] ? static_cast<i32>(level + (here < over)) - load[look] : 0;
            nth += __popc(lanes);
            if (i >= c.count) continue;
            found(c.at + i) = share;
            shared.loads[rank[look]] = load[look] + share;
        }
        __syncwarp();
    }

    // By all threads: the shares of all candidates, and the loads that they make.
    MOECOMM_FN void share() const {
        for (i32 expert = threadIdx.x; expert < experts; expert += kChooseThreads) share_evenly(expert);
        __syncthreads();
        if (warp_id() == 0) {
            list_several();
            for (i32 pass = 0; pass < kSharePasses; ++pass)
                for (i32 i = 0; i < shared.num_several; ++i) pour(shared.several[i]);
        }
        __syncthreads();
    }

    // The share of an expert on a rank; -1: no candidate is there.
    MOECOMM_FN i32 share_on(i32 expert, i32 rank) const {
        const Candidates c = candidates(expert);
        if (c.count == 1) return ranges.owner(c.at) == rank ? shared.totals[expert] : -1;
        for (i32 i = 0; i < c.count; ++i)
            if (owner(c.at + i) == rank) return found(c.at + i);
        return -1;
    }

    // By one warp: the first of the indices up to n for which value(index) is largest; -1 where none is above -1.
    template <class Value>
    MOECOMM_FN static i32 first_of_largest(i32 n, Value value) {
        i32 best = -1;
        u32 most = 0;
        for (i32 first = 0; first < n; first += kWarp) {
            const i32 index = first + lane_id();
            const u32 here = index < n ? static_cast<u32>(value(index) + 1) : 0;
            const u32 top = __reduce_max_sync(kAllLanes, here);
            if (top <= most) continue;
            most = top;
            best = first + __ffs(__ballot_sync(kAllLanes, here == top)) - 1;
        }
        return best;
    }

    // By one warp: make a slot a candidate of an expert without entries. `tail`: where the last list ends, in `words`.
    MOECOMM_FN void add_candidate(i32 expert, i32 slot, i32& tail) const {
        const Candidates c = candidates(expert);
        __syncwarp();
        if (c.count == 1) {
            if (lane_id() == 0) {
                const bool later = slot > c.at;
                shared.words[tail] = later ? c.at : slot, shared.words[tail + 1] = later ? slot : c.at;
                found(tail) = later ? shared.totals[expert] : 0, found(tail + 1) = later ? 0 : shared.totals[expert];
                shared.words[expert] = tail * kMostReplicas + 2;
            }
            tail += 2;
        } else {
            i32 place = c.at;
            while (place < c.at + c.count && static_cast<i32>(shared.words[place]) < slot) ++place;
            for (i32 end = tail; end > place; end -= kWarp) {  // one further for all behind it, the last ones first
                const i32 from = end - 1 - lane_id();
                const bool moves = from >= place;
                const u32 word = moves ? shared.words[from] : 0;
                const i32 share = moves ? found(from) : 0;
                __syncwarp();
                if (moves) shared.words[from + 1] = word, found(from + 1) = share;
                __syncwarp();
            }
            if (lane_id() == 0) shared.words[place] = slot, found(place) = 0;
            for (i32 other = lane_id(); other < experts; other += kWarp) {
                const Candidates theirs = candidates(other);
                if (other == expert) shared.words[other] += 1;
                if (theirs.count > 1 && theirs.at > c.at) shared.words[other] += kMostReplicas;
            }
            tail += 1;
        }
        __syncwarp();
    }

    // By all threads, after share(), whose loads it takes for its own: experts that are copied to empty slots, and in the window the slots
    // of which these are copies. Then share() again.
    MOECOMM_FN void choose_copies(CopyShared<ranks, slots, experts>& copies, const Placement& placement) const {
        const u32* const list = shared.words + placement.empty;
        const i32 num_empty = static_cast<i32>(list[0]);
        for (i32 i = threadIdx.x; i < num_empty; i += kChooseThreads) copies.empty[i] = static_cast<i32>(list[1 + i]);
        for (i32 rank = threadIdx.x; rank < ranks; rank += kChooseThreads) copies.holds[rank] = 0;
        __syncthreads();
        for (i32 expert = threadIdx.x; expert < experts; expert += kChooseThreads) {
            const Candidates c = candidates(expert);
            if (c.count > 0) copies.source[expert] = c.count == 1 ? c.at : static_cast<i32>(shared.words[c.at]);
            if (c.count == 1) copies.holds[ranges.owner(c.at)] = 1;
            for (i32 i = 0; c.count > 1 && i < c.count; ++i) copies.holds[owner(c.at + i)] = 1;
        }
        i32* const copied = own<i32>(a.ctx, copied_at(a.ctx.window, a.ctx.shape));
        for (i32 slot = threadIdx.x; blockIdx.x == 0 && slot < slots; slot += kChooseThreads) copied[slot] = -1;
        __syncthreads();
        for (i32 rank = threadIdx.x; rank < ranks; rank += kChooseThreads) {
            i32 first = 0, end = 0;
            for (; first < num_empty && ranges.owner(copies.empty[first]) < rank; ++first) {
            }
            for (end = first; end < num_empty && ranges.owner(copies.empty[end]) == rank; ++end) {
            }
            copies.next[rank] = first, copies.end[rank] = copies.holds[rank] != 0 ? end : first;
        }
        __syncthreads();
        if (warp_id() == 0) {
            u32 entries = 0;
            for (i32 expert = lane_id(); expert < experts; expert += kWarp) entries += static_cast<u32>(shared.totals[expert]);
            const i32 mean = static_cast<i32>(__reduce_add_sync(kAllLanes, entries) / (ranks * kCopyPart));
            const i32 least = mean > 1 ? mean : 1;
            for (i32 tail = static_cast<i32>(placement.empty);;) {
                const i32 busiest = first_of_largest(ranks, [&](i32 rank) { return shared.loads[rank]; });
                const i32 most = shared.loads[busiest];
                const i32 idlest = first_of_largest(
                    ranks, [&](i32 rank) { return copies.next[rank] < copies.end[rank] ? most - shared.loads[rank] : -1; });
                if (idlest < 0) break;
                const i32 expert =
                    first_of_largest(experts, [&](i32 one) { return share_on(one, idlest) < 0 ? share_on(one, busiest) : -1; });
                const i32 gap = (most - shared.loads[idlest]) / 2;
                if (expert < 0 || min(share_on(expert, busiest), gap) < least) break;
                const i32 slot = copies.empty[copies.next[idlest]];
                __syncwarp();
                if (lane_id() == 0) {
                    ++copies.next[idlest];
                    if (blockIdx.x == 0) copied[slot] = copies.source[expert];
                }
                add_candidate(expert, slot, tail);
                pour(expert);
            }
        }
        __syncthreads();
        for (i32 rank = threadIdx.x; rank < ranks; rank += kChooseThreads) shared.loads[rank] = 0;
        __syncthreads();
    }

    // By one thread for an expert: what stays on its rank, and where the rest of each share ends.
    MOECOMM_FN void divide(i32 expert) const {
        const Candidates c = candidates(expert);
        i32 first = shared.first[expert], kept = 0, end = 0;
        for (i32 i = 0; c.count > 1 && i < c.count; ++i) {
            const i32 place = c.at + i, rank = owner(place);
            const i32 stays = min(found(place), static_cast<i32>(signal_word(load_relaxed(own<const u64>(a.ctx, word_at(rank, expert))))));
            if (rank < a.ctx.rank) first -= stays;
            if (rank == a.ctx.rank) kept = stays, shared.own[expert] = static_cast<i32>(shared.words[place]);
            end += found(place) - stays;
            found(place) = end;
        }
        shared.first[expert] = first, shared.kept[expert] = kept;
    }

    // The slot of the nth entry of this rank for an expert. In range even if ids have changed since they were counted.
    MOECOMM_FN i32 slot_of_nth(i32 expert, const Candidates& c, i32 nth) const {
        if (nth < shared.kept[expert]) return shared.own[expert];
        const i32 rest = nth - shared.kept[expert] + shared.first[expert];
        i32 i = 0;
        while (i < c.count - 1 && rest >= found(c.at + i)) ++i;
        return static_cast<i32>(shared.words[c.at + i]);
    }

    // By all warps: no slots for their entries, so that the dispatch does not judge those of an earlier round.
    MOECOMM_FN void choose_none() const {
        i32* const chosen = own<i32>(a.ctx, chosen_at(a.ctx.window));
        const i32 end = first_of(warp_id() + 1);
        for (i32 entry = first_of(warp_id()) + lane_id(); entry < end; entry += kWarp) chosen[entry] = -1;
    }

    // By all warps: the slots of their entries, in order.
    MOECOMM_FN void choose() const {
        i32* const chosen = own<i32>(a.ctx, chosen_at(a.ctx.window));
        const i32 end = first_of(warp_id() + 1);
        for (i32 first = first_of(warp_id()); first < end; first += kWarp) {
            const i32 entry = first + lane_id();
            const i64 id = entry < end ? id_at(entry) : -1;
            const i32 expert = is_named(id) ? static_cast<i32>(id) : -1;
            const Candidates c = expert >= 0 ? candidates(expert) : Candidates{0, 0};
            const u32 same = __match_any_sync(kAllLanes, expert);
            i32 slot = id == -1 || expert >= 0 ? -1 : slots;
            if (c.count == 1) slot = c.at;
            if (c.count > 1) slot = slot_of_nth(expert, c, shared.counts[warp_id()][expert] + __popc(same & lanes_below()));
            __syncwarp();
            if (expert >= 0 && (same & lanes_below()) == 0) shared.counts[warp_id()][expert] += __popc(same);
            __syncwarp();
            if (entry < end) chosen[entry] = slot;
        }
    }
};

// The kernel's body, for a launch of choosing_blocks() blocks of kChooseThreads threads with ChooseShared as dynamic shared memory. It
// belongs to the round that the next dispatch begins. If a wait fails, the failure record is filled; if a peer makes another call, the
// entries get no slots, and the dispatch finds out.
template <i32 ranks, i32 slots, i32 experts, i32 topk, i32 idx_bytes, i32 shared_bytes, bool replicates = false>
MOECOMM_FN void choose_replicas(const DispatchArgs& a) {
    using Shared = ChooseShared<ranks, slots, experts>;
    static_assert(sizeof(Shared) + replicates * sizeof(CopyShared<ranks, slots, experts>) <= shared_bytes, "lsa_kernels.py disagrees");
    extern __shared__ __align__(128) u8 memory[];
    auto& shared = *reinterpret_cast<Shared*>(memory);
    await_earlier_kernels();
    launch_dependents();
    const Placement& placement = *own<const Placement>(a.ctx, placement_at(a.ctx.window));
    const u32* const words = reinterpret_cast<const u32*>(&placement + 1);
    for (i32 i = threadIdx.x; i < placement_words(experts, slots); i += kChooseThreads) shared.words[i] = words[i];
    for (i32 i = threadIdx.x; i < kChooseWarps * experts; i += kChooseThreads) shared.counts[0][i] = 0;
    for (i32 i = threadIdx.x; i < ranks; i += kChooseThreads) shared.loads[i] = 0;
    if (threadIdx.x == 0) {
        read_round(a.ctx, shared.begin);
        shared.mine.op = static_cast<u32>(Op::dispatch);
        shared.mine.rejected = load_relaxed(&own_state(a.ctx)->rejected);
        shared.mine.call = a.compared == 0 ? a.call : compare_scale(a.call, *reinterpret_cast<const u32*>(a.compared));
    }
    __syncthreads();
    const Chooser<ranks, slots, experts, topk, idx_bytes> chooser{a, shared, {a.ctx, Op::dispatch, shared.begin.tag}};
    if (!not_aborted(chooser.round, shared.begin, Phase::header)) return;
    chooser.count();
    __syncthreads();
    if constexpr (replicates) fence_system();  // weights that this rank has written go ahead of its counts
    const u64 masked = own_mask(a.ctx).ranks[0];
    bool known = true;
    for (i32 expert = threadIdx.x; expert < experts && known; expert += kChooseThreads) known = chooser.exchange(expert, masked);
    if (__syncthreads_or(!known)) return chooser.choose_none();
    chooser.share();
    if constexpr (replicates) {
        fence_system();
        chooser.choose_copies(*reinterpret_cast<CopyShared<ranks, slots, experts>*>(&shared + 1), placement);
        chooser.share();
    }
    for (i32 expert = threadIdx.x; expert < experts; expert += kChooseThreads) chooser.divide(expert);
    __syncthreads();
    chooser.choose();
}

}  // namespace moecomm
