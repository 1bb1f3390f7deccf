// Step 1: count this rank's entries by expert and its tokens by rank: in all, and before the tokens of this block.
#pragma once
#include "call.cuh"

namespace moecomm {

// Encodes the first bad entry as one word, for atomicMax: bad ids rank before bad weights, and earlier positions before later ones; 0 means
// none.
constexpr u32 kBadId = 0xffffffffu, kBadWeight = 0x7fffffffu;
MOECOMM_BOTH constexpr bool is_bad_id(u32 bad) { return bad > kBadWeight; }
MOECOMM_BOTH constexpr u32 bad_position(u32 bad) { return (is_bad_id(bad) ? kBadId : kBadWeight) - bad; }

// Up to this many entries every block counts all of them by itself, which takes less time than exchanging counts between blocks.
constexpr i32 kCountAllEntries = kMostPacketEntries;

// Called by all threads of the block before counting; a __syncthreads must follow. Cannot fail.
template <class Shared, class Call>
MOECOMM_FN void clear_counters(Shared& shared, const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
#pragma unroll 1
    for (i32 i = threadIdx.x; i < cfg.columns(); i += cfg.threads()) shared.before[i] = shared.own_counts[i] = 0;
#pragma unroll 1
    for (i32 i = threadIdx.x; i < cfg.count_warps * cfg.columns(); i += cfg.threads()) c.counters(i / cfg.columns())[i % cfg.columns()] = 0;
#pragma unroll 1
    for (i32 i = threadIdx.x; cfg.packets && i < cfg.ranks * kWantedWords; i += cfg.threads()) (&shared.wanted[0][0])[i] = 0;
}

// Called by all lanes of a warp. Calls body(token, column) for each expert, and once a token for each rank, among the tokens [first, end):
// for every `stride`-th part of them. Records a bad id or weight in shared.bad and never follows it.
template <class Call, class Body>
MOECOMM_FN void for_columns(const Call& c, i32 first, i32 end, i32 part, i32 stride, Body body) {
    constexpr DispatchConfig cfg = Call::cfg;
    for_entries(c, first, end, part, stride, cfg.tokens_per_step(), [&](i32, i32 token, i32 k, i64 id) {
        const i64 entry = static_cast<i64>(token) * cfg.topk + k;
        if (!valid_id(id, cfg.experts)) {
            atomicMax(&c.shared.bad, kBadId - static_cast<u32>(entry));
            id = -1;
        }
        if (token >= 0 && c.a.check_weights != 0) {
            const float w = c.weight_at(entry);
            if (w != w) atomicMax(&c.shared.bad, kBadWeight - static_cast<u32>(entry));
        }
        const i32 owner = id >= 0 ? cfg.ranges().owner(static_cast<i32>(id)) : -1;
        const bool first_there =
            (lanes_of_rank<cfg.ranks>(owner) & lanes_of_token<cfg.topk>() & lanes_below()) == 0;  // the token's first entry for that rank
        if (id < 0) return;
        body(token, static_cast<i32>(id));
        if (first_there) body(token, cfg.experts + owner);
    });
}

// Called by every thread of the block; a __syncthreads must follow. If `counts_all`, counts all tokens, and separately those before the
// block's share. Otherwise the warps that count (count_warps) count the block's share. Cannot fail; bad input goes to shared.bad.
template <class Call>
MOECOMM_FN void count(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 warp = warp_id();
    if (c.counts_all) {
        for_columns(c, 0, c.a.num_tokens, warp, cfg.warps(), [&](i32 token, i32 column) {
            atomicAdd(&c.shared.own_counts[column], 1);
            if (token < c.share.first) atomicAdd(&c.shared.before[column], 1);
            if (cfg.packets && column >= cfg.experts) atomicOr(&c.shared.wanted[column - cfg.experts][token / 32], 1u << token % 32);
        });
    } else if (warp < cfg.count_warps) {
        i32* counts = c.counters(warp);
        for_columns(c, c.counted_from(warp), c.counted_from(warp + 1), 0, 1, [&](i32, i32 column) { atomicAdd(&counts[column], 1); });
    }
}

// Called by one thread for a column. Replaces each warp's count by the sum of the warps before it, and returns the sum of all warps.
template <class Call>
MOECOMM_FN i32 sum_warps(const Call& c, i32 column) {
    i32 sum = 0;
#pragma unroll 4
    for (i32 warp = 0; warp < Call::cfg.count_warps; ++warp) {
        i32& counter = c.counters(warp)[column];
        const i32 here = counter;
        counter = sum;
        sum += here;
    }
    return sum;
}

// Called by a warp for one column. Adds up the counts of all blocks, posts to each block the sum of the blocks before it, and to every rank
// of the domain the total. The words are tagged, so nothing is ordered. Returns false if a block did not post in time; the failure record
// is filled.
template <class Call>
MOECOMM_FN bool sum_column(const Call& c, i32 column) {
    constexpr DispatchConfig cfg = Call::cfg;
    const bool counts = column < cfg.columns();  // the last column holds the first bad entry
    const auto place = [&](i32 block) { return counting_at(c.window(), block) + column * sizeof(u64); };
    const u64 to_summed = c.window().summed - c.window().counting;
    const i32 blocks = gridDim.x;
    u32 sum = 0, worst = 0;
    for (i32 first = 0; first < blocks; first += kWarp) {
        const i32 block = first + lane_id();
        u64 seen = 0;
        const bool in_time = block >= blocks || wait_word(c.round, Phase::grid, c.me(), place(block), c.round.tag, seen);
        if (!__all_sync(kAllLanes, in_time)) return false;
        worst = max(worst, __reduce_max_sync(kAllLanes, signal_word(seen)));
        const u32 up_to = sum_up_to_lane(signal_word(seen));
        if (counts && block < blocks)
            c.transport.post(c.me(), place(block) + to_summed, word_signal(c.round.tag, sum + up_to - signal_word(seen)));
        sum += __shfl_sync(kAllLanes, up_to, kWarp - 1);
    }
    for (i32 block = lane_id(); !counts && block < blocks; block += kWarp)
        c.transport.post(c.me(), place(block) + to_summed, word_signal(c.round.tag, worst));
    const u64 there = tagged_words_at(c.window(), cfg.ranks, c.round.tag, c.me()) + (kHeaderWords + column) * sizeof(u64);
    for (i32 step = lane_id(); counts && step < cfg.ranks; step += kWarp) {
        const i32 peer = rotated<cfg.ranks>(c.me(), step);
        if (c.domains().reaches(peer)) c.transport.post(peer, there, word_signal(c.round.tag, sum));
    }
    return true;
}

// Called by every thread of every block where each block has counted its share. Blocks exchange counts through this rank's window. The
// warps of the grid divide the columns among themselves, so that no block has to read the counts of all others. Calls meanwhile() between
// posting and waiting. Returns false to all threads of the block if a wait failed; the failure record is filled.
template <class Call, class Meanwhile>
MOECOMM_FN bool sum_blocks(const Call& c, Meanwhile meanwhile) {
    constexpr DispatchConfig cfg = Call::cfg;
    const u64 mine = counting_at(c.window(), blockIdx.x), summed = mine + c.window().summed - c.window().counting;
    for (i32 column = threadIdx.x; column <= cfg.columns(); column += cfg.threads()) {
        const u32 word = column < cfg.columns() ? static_cast<u32>(sum_warps(c, column)) : c.shared.bad;
        c.transport.post(c.me(), mine + column * sizeof(u64), word_signal(c.round.tag, word));
    }
    bool in_time = true;
    for (i32 column = blockIdx.x + gridDim.x * warp_id(); in_time && column <= cfg.columns(); column += gridDim.x * cfg.warps())
        in_time = sum_column(c, column);
    __syncwarp();
    meanwhile();
    for (i32 column = threadIdx.x; in_time && column <= cfg.columns(); column += cfg.threads()) {
        u64 word = 0;
        in_time = wait_word(c.round, Phase::grid, c.me(), summed + column * sizeof(u64), c.round.tag, word);
        if (column == cfg.columns()) {
            c.shared.bad = signal_word(word);
        } else {
            c.shared.before[column] = static_cast<i32>(signal_word(word));
        }
    }
    return !__syncthreads_or(!in_time);
}

}  // namespace moecomm
