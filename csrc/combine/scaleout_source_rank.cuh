// The source rank's part of a combine across domains: adds the sum of each other domain, which its forwarder put into
// WindowLayout::returned, to the sum of this domain.
#pragma once
#include "../device/quantize.cuh"
#include "call.cuh"
#include "row_hash.cuh"

namespace moecomm {

// Loads 16 bytes that peers have written in this launch; relaxed, past L1.
MOECOMM_FN ulonglong2 load_vector(const u8* from) {
    ulonglong2 words;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(words.x), "=l"(words.y) : "l"(from) : "memory");
    return words;
}

// State of one pull warp. All lanes call all methods together; a method that waits returns false in a lane whose wait failed or would
// block.
template <class Call>
struct ScaleoutSums {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr i32 kOthers = cfg.domains() - 1, kLooks = ceil_div(cfg.ranks, kWarp);
    static constexpr u64 kOfDomain = cfg.scaleup_ranks() < 64 ? (1ull << cfg.scaleup_ranks() % 64) - 1 : ~0ull;
    // Sums of other domains pass through the ring of the pull warp, like rows, in domain order: lanes serve the domains before this one,
    // the ranks of this domain, the domains after it. Two domains need no order, because x + y is y + x; the rows of this domain then come
    // first, and a direct row passes, too, if it is the only one of its domain, and thus its sum. (With more domains, kernels would spill.)
    static constexpr bool kOrdered = cfg.domains() > 2;
    static constexpr bool kInRing = kOthers > 0 && cfg.wire == cfg.staged() && cfg.scaleup_ranks() + kOthers <= kWarp;

    const Call& c;
    const i32 warp;
    const bool direct;  // owners send rows direct; no sums arrive from forwarders
    u64 here = 0;       // one bit for each direct owner whose signal this lane has acquired
    i32 seen = -1;      // the chunk for which this lane has acquired its domain's signal
    i32 ahead[kLooks];  // this lane's slots of the next token to be opened, by rank
    u64 owners = 0;     // one bit for each rank that has a row of the token being opened

    MOECOMM_FN bool comes_from(i32 domain, u64 ranks) const { return (ranks >> domain * cfg.scaleup_ranks() & kOfDomain) != 0; }

    // Loads this lane's slots of a token that will be opened, so that look_up does not wait for memory.
    MOECOMM_FN void look_ahead(i32 token) {
#pragma unroll
        for (i32 i = 0; i < kLooks; ++i) {
            const i32 rank = i * kWarp + lane_id();
            const auto* slots = reinterpret_cast<const i32*>(c.a.route.token_slot) + static_cast<i64>(token) * cfg.ranks;
            ahead[i] = token < c.a.num_tokens && rank < cfg.ranks ? slots[rank] : -1;
        }
    }
    MOECOMM_FN void look_up() {
        owners = 0;
#pragma unroll
        for (i32 i = 0; i < kLooks; ++i) owners |= static_cast<u64>(__ballot_sync(kAllLanes, ahead[i] >= 0)) << i * kWarp;
    }
    // kInRing: true if what other domains have of the token being opened passes through the ring. A direct row that is cast does not,
    // because a forwarder would cast it again.
    MOECOMM_FN bool passes_ring() const {
        if (!direct) return true;
        if constexpr (cfg.casts()) return false;
        const u64 there = owners >> c.domains().other(0) * cfg.scaleup_ranks() & kOfDomain;
        return !kOrdered && (there & (there - 1)) == 0;
    }
    // kInRing: the first lane of this domain's ranks, and the domain that this lane serves, -1 if none.
    MOECOMM_FN static i32 first_lane(const Call& c) { return kInRing && kOrdered ? c.domains().own() : 0; }
    MOECOMM_FN i32 domain_of_lane() const {
        if constexpr (!kOrdered) return lane_id() == cfg.scaleup_ranks() ? c.domains().other(0) : -1;
        const i32 after = lane_id() - first_lane(c) - cfg.scaleup_ranks() + 1;  // from 1 on: behind this domain's ranks
        const i32 domain = lane_id() < first_lane(c) ? lane_id() : after > 0 ? first_lane(c) + after : -1;
        return domain < cfg.domains() ? domain : -1;
    }
    // kInRing: the sum of this lane's domain for the token being opened, null if there is none. After await().
    MOECOMM_FN const u8* row_of_lane(i32 token) const {
        const i32 domain = domain_of_lane();
        if (domain < 0 || !passes_ring() || !comes_from(domain, owners)) return nullptr;
        if (!direct) return c.transport.template local<u8>(c.returned_sum_at(domain, token));
        const i32 first = domain * cfg.scaleup_ranks(), owner = first + __ffsll(static_cast<i64>(owners >> first)) - 1;
        return c.transport.template local<u8>(direct_row_at(c.window(), c.shape(), c.round.tag, owner, token));
    }

    // Verified rounds: the word of added_hash for what row_of_lane returns.
    MOECOMM_FN i32 hash_word_of_lane() const {
        const i32 domain = max(domain_of_lane(), 0), first = domain * cfg.scaleup_ranks();
        return direct ? first + __ffsll(static_cast<i64>(owners >> first & kOfDomain)) - 1 : cfg.ranks + domain;
    }
    // Verified rounds: copies what forwarders tell of the token being opened. Another lane acquired the signal; __syncwarp passes it on.
    MOECOMM_FN void take_told(i32 token) const {
        __syncwarp();
        if (direct) return;
        for (i32 domain = 0; domain < cfg.domains(); ++domain) {
            if (domain == c.domains().own() || !comes_from(domain, owners)) continue;
            const auto* told = c.transport.template local<const u64>(c.returned_sum_at(domain, token) + c.told_at());
            for (i32 i = lane_id(); i < Call::kToldWords; i += kWarp)
                *c.added_hash(token, i == 0 ? cfg.ranks + cfg.domains() + domain : domain * cfg.scaleup_ranks() + i - 1) =
                    load_relaxed(told + i);
        }
    }

    // Returns whether other domains' sums of the token have arrived; each lane checks some domains. A forwarder signals only the chunks of
    // which its domain has rows.
    MOECOMM_FN bool await(i32 chunk, bool may_wait) {
        look_up();
        if (direct) return await_owners(may_wait);
        if constexpr (kInRing) {
            const i32 domain = domain_of_lane();
            return domain < 0 || await_domain(domain, chunk, may_wait);
        } else {
            for (i32 n = lane_id(); n < kOthers; n += kWarp)
                if (!await_domain(c.domains().other(n), chunk, may_wait)) return false;
            return true;
        }
    }
    MOECOMM_FN bool await_domain(i32 domain, i32 chunk, bool may_wait) {
        if (!comes_from(domain, owners) || seen == chunk) return true;
        if (may_wait ? !await_signal(c, c.transport, Phase::reduced, kReturned, c.shared.forwarders.of(c.domains(), domain), domain, chunk,
                                     c.a.chunk_tokens)
                     : !is_signaled(c, c.transport, kReturned, domain, chunk, c.a.chunk_tokens))
            return false;
        if constexpr (kInRing) fence_async();  // reads of the sum come after the signal
        if (kOthers <= kWarp) seen = chunk;
        return true;
    }
    // Returns whether direct rows of the token have arrived; each lane checks some ranks of other domains.
    MOECOMM_FN bool await_owners(bool may_wait) {
        for (i32 rank = lane_id(); rank < cfg.ranks; rank += kWarp) {
            if (c.domains().reaches(rank) || ((owners & ~here) >> rank & 1) == 0) continue;
            if (may_wait ? !await_direct(c, Phase::reduced, rank) : !has_direct_arrived(c, rank)) return false;
            here |= 1ull << rank;
            if constexpr (kInRing) fence_async();  // reads of its rows come after the signal
        }
        return true;
    }
    // Stores the owners of the token being opened, whose rows add_to adds, at a place for an open item: none if they pass through the ring.
    MOECOMM_FN void keep_owners(i32 place) const {
        if (lane_id() == 0) c.scaleout().owners[warp][place] = kInRing && passes_ring() ? 0 : owners;
    }

    // Turns `sum`, of this domain and of the open item at `place`, into the sum of all domains, added in domain order. With casts all
    // lanes call it together, with column -1 where a lane has none.
    // csrc/protocol/domains.h bounds its distance from the sum that a single domain would compute.
    template <i32 n>
    MOECOMM_FN void add_to(i32 place, i32 token, i32 column, float (&sum)[n]) const {
        if (kInRing && !direct) return;
        const u64 ranks = c.scaleout().owners[warp][place];
        if (kInRing && ranks == 0) return;
        float total[n] = {};
#pragma unroll 1
        for (i32 domain = 0; domain < cfg.domains(); ++domain) {
            const bool here = domain == c.domains().own();
            if (!here && !comes_from(domain, ranks)) continue;
            float there[n] = {};
            if (!here && direct) {
                add_owners(ranks >> domain * cfg.scaleup_ranks() & kOfDomain, domain * cfg.scaleup_ranks(), token, column, there);
            } else if (!here) {
                const u64 row = c.returned_sum_at(domain, token) + (cfg.casts() ? scaled_column_at(column) : column * bytes_of(cfg.wire));
                add_words<cfg.wire>(c.transport.template local<const u32>(row), there, token, cfg.ranks + domain, column);
            }
#pragma unroll
            for (i32 i = 0; i < n; ++i) total[i] = __fadd_rn(total[i], here ? sum[i] : there[i]);
        }
#pragma unroll
        for (i32 i = 0; i < n; ++i) sum[i] = total[i];
    }
    // Adds columns of a row in this window. In vectors of 16 bytes where it has such: words alone would fetch each sector several times.
    // In verified rounds adds their hash to that word of added_hash.
    template <Type type, i32 n>
    MOECOMM_FN void add_words(const u32* from, float (&sum)[n], i32 token, i32 hash_word_of, i32 column) const {
        constexpr i32 words = n * bytes_of(type) / 4, each = n / words;
        u32 loaded[words];
        float scale = 1.0f;
        if constexpr (has_scales(type)) {
            if (column < 0) return;
            const i32 scale_place = scale_at(column, cfg.hidden) / 4;
            const u32 bits = load_relaxed(from + (scale_place - scaled_column_at(column) / 4));
            scale = __uint_as_float(bits);
            if (cfg.verifies && column % kQuantGroup == 0)
                atomicAdd(reinterpret_cast<unsigned long long*>(c.added_hash(token, hash_word_of)),
                          static_cast<unsigned long long>(hash_word(bits, scale_place)));
        }
        if constexpr (words % 4 == 0) {
#pragma unroll
            for (i32 i = 0; i < words; i += 4) {
                const ulonglong2 line = load_vector(reinterpret_cast<const u8*>(from + i));
                loaded[i] = static_cast<u32>(line.x), loaded[i + 1] = static_cast<u32>(line.x >> 32);
                loaded[i + 2] = static_cast<u32>(line.y), loaded[i + 3] = static_cast<u32>(line.y >> 32);
            }
        } else {
#pragma unroll
            for (i32 i = 0; i < words; ++i) loaded[i] = load_relaxed(from + i);
        }
        if constexpr (cfg.verifies) {
            u64 found = 0;
#pragma unroll
            for (i32 i = 0; i < words; ++i)
                found += hash_word(loaded[i], (has_scales(type) ? scaled_column_at(column) : column * bytes_of(type)) / 4 + i);
            atomicAdd(reinterpret_cast<unsigned long long*>(c.added_hash(token, hash_word_of)), static_cast<unsigned long long>(found));
        }
#pragma unroll
        for (i32 i = 0; i < words; ++i) {
            float part[each];
            widen_word<type>(loaded[i], part);
#pragma unroll
            for (i32 j = 0; j < each; ++j) {
                if constexpr (has_scales(type)) part[j] = __fmul_rn(part[j], scale);
                sum[i * each + j] = __fadd_rn(sum[i * each + j], part[j]);
            }
        }
    }
    // Casts sums to the wire and back. All lanes call it together; a lane without columns has zeros.
    template <i32 n>
    MOECOMM_FN static void cast_again(float (&sum)[n]) {
        auto& columns = reinterpret_cast<float (&)[1][n]>(sum);
        u32 words[1][n / 4], bits[1];
        quantize_registers<cfg.wire>(columns, words, bits);
#pragma unroll
        for (i32 i = 0; i < n / 4; ++i) {
            widen_word<cfg.wire>(words[0][i], sum + 4 * i);
#pragma unroll
            for (i32 k = 0; k < 4; ++k) sum[4 * i + k] = __fmul_rn(sum[4 * i + k], __uint_as_float(bits[0]));
        }
    }
    // Adds the direct rows of `owners` (one bit for each rank from `first` on) in rank order, then rounds to the wire as a forwarder would.
    template <i32 n>
    MOECOMM_FN void add_owners(u64 owners, i32 first, i32 token, i32 column, float (&sum)[n]) const {
        const u8* rows = c.transport.template local<const u8>(direct_row_at(c.window(), c.shape(), c.round.tag, first, token));
#pragma unroll 1
        for (; owners != 0; owners >>= 1, rows += c.shape().packet_bytes, ++first)
            if ((owners & 1) != 0)
                add_words<cfg.staged()>(reinterpret_cast<const u32*>(rows + cfg.staged_at(column)), sum, token, first, column);
        if constexpr (cfg.casts()) {
            cast_again(sum);
        } else {
            constexpr i32 each = 4 / bytes_of(cfg.wire);
#pragma unroll
            for (i32 i = 0; i < n / each; ++i) widen_word<cfg.wire>(narrow_word<cfg.wire>(sum + i * each), sum + i * each);
        }
    }
};

}  // namespace moecomm
