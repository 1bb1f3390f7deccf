// Unpacking: puts each row that arrived in packets (packets.cuh) at its final place, with its metadata.
#pragma once
#include "packets.cuh"

namespace moecomm {

// Called by all lanes of a warp. Returns the n-th of a source's tokens that arrive here; -1 if fewer arrive than the source counted, which
// happens only if ids change meanwhile (row_inside).
template <class Call>
MOECOMM_FN i32 nth_coming(const Call& c, i32 source, i32 n) {
#pragma unroll 1
    for (i32 word = 0; word < kWantedWords; ++word) {
        const u32 arriving = c.shared.arriving[source][word];
        if (n >= __popc(arriving)) {
            n -= __popc(arriving);
            continue;
        }
        const bool ours = (arriving >> lane_id() & 1) != 0 && __popc(arriving & lanes_below()) == n;
        return word * kWarp + __ffs(__ballot_sync(kAllLanes, ours)) - 1;
    }
    return -1;
}

// A packet that arrived: its source, token and piece, the place of its row, and its words. All lanes of a warp call all methods together.
template <class Call>
struct Unpacker {
    static constexpr DispatchConfig cfg = Call::cfg;
    using SentPackets = Packets<Call>;

    // Lines of this packet, and those of the first one that have the row's entries.
    static constexpr i32 kFirstEntries = SentPackets::kSharesEntries ? SentPackets::content_lines(0) : 0;
    using Lines = PolledLines<kFirstEntries, SentPackets::kSharesEntries ? kFirstEntries + SentPackets::kEntryLines : 0>;

    const Call& c;
    const i32 source, token, slot, piece;
    PacketWords words;

    // Lines that are polled in the packet itself.
    MOECOMM_FN i32 lines() const { return SentPackets::kSharesEntries ? SentPackets::content_lines(piece) : SentPackets::lines(piece); }

    // Calls body(word, its 64 bits) for those words of the packet in [first, end) that this lane holds, two at a time.
    template <class Body>
    MOECOMM_FN void for_words(i32 first, i32 end, Body body) const {
#pragma unroll
        for (i32 step = 0; step < kPacketSteps; ++step) {
            const i32 word = packet_word(step);
            if (word >= first && word < end) body(word - first, words.step[step].x);
            if (!ends_line() && word + 1 >= first && word + 1 < end) body(word + 1 - first, words.step[step].y);
        }
    }

    // Returns the k-th entry to lane k.
    MOECOMM_FN u64 entry() const {
        constexpr i32 last = SentPackets::kOfRow - 1, in_last = SentPackets::entry_word(last), in_others = SentPackets::entry_word(0);
        if constexpr (cfg.layout != Layout::flat && in_last != in_others) {
            if (piece == last) return entry_from<in_last>();
        }
        return entry_from<in_others>();
    }
    template <i32 first>
    MOECOMM_FN u64 entry_from() const {
        u64 mine = static_cast<u64>(kNoEntry) << 32;
#pragma unroll
        for (i32 k = 0; k < cfg.topk; ++k) {
            const i32 word = first + k;
            const ulonglong2& held = words.step[step_of(word)];
            const u64 value = __shfl_sync(kAllLanes, word % kLineWords % 2 == 0 ? held.x : held.y, lane_of(word));
            if (lane_id() == k) mine = value;
        }
        return mine;
    }

    // Stores this piece in every row that the token has here; the first piece also brings metadata. Cannot fail.
    MOECOMM_FN void put() const {
        if (cfg.layout == Layout::flat && piece != 0) {  // a flat row needs no entry
            put_row(slot);
            return;
        }
        const u64 packed = entry();
        const u32 upper = static_cast<u32>(packed >> 32);
        const i32 local = static_cast<i32>(upper >> 16) - c.first_expert();
        const bool here = upper != kNoEntry && local >= 0 && local < c.experts_here();
        i32 row = -1;
        if (cfg.layout == Layout::flat && lane_id() == 0) row = slot;
        if (cfg.layout != Layout::flat && here) {
            const i32 start = c.shared.filled[local] - c.shared.total[c.first_expert() + local];
            const i32 first = start + c.shared.into[source * cfg.ranges().most() + local];
            row = min(first + static_cast<i32>(upper & 0xffffu), c.a.max_rows - 1);  // see row_inside
        }
        if (piece == 0 && lane_id() < cfg.topk) write_metadata(row, here ? local : -1, here ? static_cast<u32>(packed) : 0);
        for (u32 left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1)
            put_row(__shfl_sync(kAllLanes, row, __ffs(left) - 1));
    }

    MOECOMM_FN void put_row(i64 row) const {
        u8* columns = c.transport.template local<u8>(c.a.out_x) + row * cfg.row_bytes + piece * cfg.packet_row_bytes;
        const i32 bytes = min(cfg.packet_row_bytes, cfg.row_bytes - piece * cfg.packet_row_bytes);
        for_words(0, bytes / 8, [&](i32 word, u64 bits) { reinterpret_cast<u64*>(columns)[word] = bits; });
        if constexpr (cfg.scale_bytes > 0) {
            const i32 at = piece * cfg.packet_scale_bytes, left = min(cfg.packet_scale_bytes, cfg.scale_bytes - at);
            const i32 first = SentPackets::scale_word(piece);
            for_words(first, first + ceil_div(max(left, 0), 8), [&](i32 word, u64 bits) { put_scales(row, at + word * 8, bits); });
        }
    }
    // Stores eight bytes of a row of scales; at the end of some rows, only the first four are valid.
    MOECOMM_FN void put_scales(i64 row, i32 at, u64 bits) const {
        const bool both = cfg.scale_bytes % 8 == 0 || at + 4 < cfg.scale_bytes;
        if constexpr (cfg.scale_columns) {
            const i64 group = cfg.layout == Layout::batched ? batched_group(c.a.max_rows, c.experts_here()) : 0;
            auto* there = reinterpret_cast<u32*>(c.a.scale_columns);
            there += group == 0 ? row : row / group * (cfg.scale_bytes / 4) * c.a.scale_stride + row % group;
            there[at / 4 * c.a.scale_stride] = static_cast<u32>(bits);
            if (both) there[(at / 4 + 1) * c.a.scale_stride] = static_cast<u32>(bits >> 32);
        } else {
            u8* const there = c.transport.template local<u8>(c.a.out_scales) + row * cfg.scale_bytes + at;
            if constexpr (cfg.scale_bytes % 8 == 0) {
                *reinterpret_cast<u64*>(there) = bits;
            } else {
                reinterpret_cast<u32*>(there)[0] = static_cast<u32>(bits);
                if (both) reinterpret_cast<u32*>(there)[1] = static_cast<u32>(bits >> 32);
            }
        }
    }

    // Writes the source token, the experts and the weights of a row. Lane k < topk handles entry k.
    MOECOMM_FN void write_metadata(i32 row, i32 local, u32 weight) const {
        const i32 k = lane_id();
        const i64 at = static_cast<i64>(slot) * cfg.topk + k;
        const int2 from = make_int2(source, token);
        auto* src = c.transport.template local<int2>(c.a.out_src);
        auto* weights = c.transport.template local<u32>(c.a.out_weights);
        if constexpr (cfg.layout == Layout::flat) {
            if (c.a.out_weights != 0) weights[at] = weight;
            if (c.a.out_topk_idx != 0) {
                if constexpr (cfg.idx_bytes == 8) c.transport.template local<i64>(c.a.out_topk_idx)[at] = local;
                if constexpr (cfg.idx_bytes == 4) c.transport.template local<i32>(c.a.out_topk_idx)[at] = local;
            }
            if (k == 0 && c.a.out_src != 0) src[slot] = from;
        } else {
            c.transport.template local<i32>(c.a.out_rows)[at] = row;
            if (row < 0) return;
            if (c.a.out_weights != 0) weights[row] = weight;
            if (c.a.out_src != 0) src[row] = from;
        }
    }
};

// Called by the blocks that unpack. Keeps in the route which flat rows each chunk has here, for each source that sends packets; for other
// sources these ranges arrive with the signals. Cannot fail.
template <class Call>
MOECOMM_FN void keep_ranges(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 thread = c.nth_unpacker() * cfg.threads() + threadIdx.x, threads = c.unpackers() * cfg.threads();
    for (i32 s = 0; s < cfg.ranks; ++s) {
        const Source& from = c.shared.sources[s];
        if (!from.packets) continue;
        auto* ranges = reinterpret_cast<u32*>(c.a.route.ranges) + static_cast<i64>(s) * c.shape().max_tokens;
        for (i32 chunk = thread; chunk < count_chunks(from.num_tokens, from.chunk_tokens); chunk += threads) {
            const i32 word = chunk * from.chunk_tokens / 32, bit = chunk * from.chunk_tokens % 32;  // a chunk never spans two words
            i32 first = c.shared.slots_before[s];
            for (i32 i = 0; i < word; ++i) first += __popc(c.shared.arriving[s][i]);
            const u32 arriving = c.shared.arriving[s][word];
            first += __popc(arriving & ((1u << bit) - 1));
            const u32 mask = from.chunk_tokens == 32 ? 0xffffffffu : (1u << from.chunk_tokens) - 1;
            ranges[chunk] = signal_word(chunk_signal(0, first, __popc(arriving >> bit & mask)));
        }
    }
}

// Called by all warps after the round was found valid. Waits for packets by polling their lines and unpacks them. The team takes the first
// items, because the send warps may still be sending. Returns early if a packet does not arrive; the failure record is filled.
template <class Call>
MOECOMM_FN void unpack(const Call& c) {
    MOECOMM_SPAN(unpack, c.round, threadIdx.x == 0);
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 of_row = Packets<Call>::kOfRow;
    bool some = false;
    for (i32 s = lane_id(); s < cfg.ranks; s += kWarp) some = some || c.shared.sources[s].packets;
    if (c.nth_unpacker() < 0 || !__any_sync(kAllLanes, some)) return;
    const i32 end = c.shared.slots_before[cfg.ranks] * of_row, nth = c.team_warp() >= 0 ? c.team_warp() : c.kTeamWarps + warp_id();
    for (i32 item = c.nth_unpacker() + c.unpackers() * nth; item < end; item += c.unpackers() * cfg.warps()) {
        const i32 slot = item / of_row;
        i32 source = 0;
        while (slot >= c.shared.slots_before[source + 1]) ++source;
        if (!c.shared.sources[source].packets) continue;
        const i32 token = nth_coming(c, source, slot - c.shared.slots_before[source]);
        if (token < 0) continue;
        Unpacker<Call> unpacker{c, source, token, slot, item % of_row, {}};
        constexpr i32 packet_bytes = cfg.packet_lines * kLineBytes;
        const u64 row = packets_at(c.window(), c.shape(), c.round.tag, source) + static_cast<u64>(token * of_row) * packet_bytes;
        const i32 before = unpacker.piece * packet_bytes;
        const typename Unpacker<Call>::Lines lines{c.transport.template local<u8>(row + before), unpacker.lines(), before};
        const auto is_last = [&] { return slot == c.shared.slots_before[source + 1] - 1 && unpacker.piece == of_row - 1; };
        if (!await_lines(c.round, Phase::payload, source, lines, unpacker.words, is_last)) return;
        unpacker.put();
    }
    keep_ranges(c);
}

// unpack() for kernels in which few rows arrive in packets. It is not inlined, so that its registers do not burden the code before it.
template <class Call>
__device__ __noinline__ void unpack_apart(Call c) {
    unpack(c);
}

}  // namespace moecomm
