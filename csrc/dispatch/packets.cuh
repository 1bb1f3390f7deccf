// Few tokens: rows travel in packets (csrc/protocol/packets.h), right after counting. The destination of a packet depends only on the
// round's parity, the source rank and the token, so nothing has to be awaited; headers and counts travel concurrently. unpack.cuh is the
// other end.
#pragma once
#include "../device/packet.cuh"
#include "../device/quantize.cuh"
#include "call.cuh"

namespace moecomm {

// A send warp: sends every send_warps-th packet of this block. The pieces of rows of its first packets are loaded while entries are
// counted. All lanes call all methods together.
template <class Call>
struct Packets {
    static constexpr DispatchConfig cfg = Call::cfg;
    static constexpr i32 kSlots = cfg.ring_slots, kOfRow = cfg.packets_of_row() > 0 ? cfg.packets_of_row() : 1;
    static constexpr i32 kColumns =
        cfg.quantize ? cfg.packet_columns() : cfg.packet_row_bytes / bytes_of(cfg.type);  // of a row in a packet
    static constexpr i32 kLastBytes = cfg.row_bytes - (kOfRow - 1) * cfg.packet_row_bytes;
    static constexpr i32 kLastScales = cfg.scale_bytes - (kOfRow - 1) * cfg.packet_scale_bytes;

    // Content of a packet: a piece of the row, its scales, and in the first packet the entries. The last piece may be shorter.
    MOECOMM_BOTH static constexpr i32 scale_word(i32 piece) { return (piece == kOfRow - 1 ? kLastBytes : cfg.packet_row_bytes) / 8; }
    MOECOMM_BOTH static constexpr i32 scale_bytes(i32 piece) {
        return piece == kOfRow - 1 ? align_up(kLastScales > 0 ? kLastScales : 0, 8) : cfg.packet_scale_bytes;
    }
    MOECOMM_BOTH static constexpr i32 words(i32 piece) { return scale_word(piece) + scale_bytes(piece) / 8; }
    MOECOMM_BOTH static constexpr i32 content_lines(i32 piece) { return ceil_div(words(piece), kLineWords); }
    static_assert(cfg.packet_lines == 0 || kLastScales <= cfg.packet_scale_bytes, "a packet holds the scales of its piece");
    // A flat row needs its entries once, in the first packet. Other rows need them with each piece. If they fill lines of their own, these
    // lines are in the first packet alone, and the receiver polls them together with each piece; else they are in all packets.
    static constexpr i32 kEntryLines = ceil_div(cfg.topk, kLineWords);
    static constexpr bool kSharesEntries = cfg.layout != Layout::flat && kOfRow > 1 && content_lines(0) + kEntryLines <= cfg.packet_lines;
    MOECOMM_FN static bool has_entries(i32 piece) { return piece == 0 || !(cfg.layout == Layout::flat || kSharesEntries); }
    MOECOMM_BOTH static constexpr i32 entry_word(i32 piece) { return kSharesEntries ? content_lines(0) * kLineWords : words(piece); }
    MOECOMM_FN static i32 lines(i32 piece) {
        return has_entries(piece) ? ceil_div(entry_word(piece) + cfg.topk, kLineWords) : content_lines(piece);
    }

    const Call& c;
    const i32 packets;         // packets of this block
    i32 loaded = 0, sent = 0;  // packets of this warp
    i32 expert;                // expert of this lane's entry of the next token, -1 if none
    float weight;
    const GlobalScale given;  // rows are cast to a format that takes one

    MOECOMM_FN explicit Packets(const Call& call)
        : c(call), packets((call.share.end - call.share.first) * kOfRow), given(call.global_scale()) {
        look_ahead();
    }

    MOECOMM_FN static i32 nth(i32 n) { return warp_id() + n * cfg.send_warps; }
    MOECOMM_FN bool has(i32 n) const { return warp_id() < cfg.send_warps && nth(n) < packets; }
    MOECOMM_FN i32 token_of(i32 n) const { return c.share.first + nth(n) / kOfRow; }
    MOECOMM_FN static i32 column_of(i32 n) { return nth(n) % kOfRow * kColumns; }
    MOECOMM_FN static i32 columns_from(i32 column) { return min(kColumns, cfg.hidden - column); }
    MOECOMM_FN PacketRing<cfg>& ring() const { return c.shared.packets[warp_id()]; }
    MOECOMM_FN u8* content() const { return reinterpret_cast<u8*>(ring().content[sent % kSlots]); }

    // Starts the bulk load of this warp's next piece, if there is one.
    MOECOMM_FN void load_next() {
        if (!has(loaded)) return;
        if (lane_id() == 0) {
            const i32 slot = loaded % kSlots, column = column_of(loaded);
            const u8* row = reinterpret_cast<const u8*>(c.a.x) + token_of(loaded) * c.a.x_stride;
            u8* to = cfg.quantize ? ring().raw[slot] : reinterpret_cast<u8*>(ring().content[slot]);
            bulk_load(to, row + column * bytes_of(cfg.type), columns_from(column) * bytes_of(cfg.type), &ring().full[slot]);
        }
        ++loaded;
    }
    // Waits for loads in flight: a block must not end while a load writes to its shared memory.
    MOECOMM_FN void drop_loads() {
        for (; sent < loaded; ++sent) copy_wait(&ring().full[sent % kSlots], sent / kSlots & 1);
    }

    // Loads the experts and weights of the next token, an entry in each lane.
    MOECOMM_FN void look_ahead() {
        expert = -1;
        if (!has(sent) || lane_id() >= cfg.topk) return;
        const i64 entry = static_cast<i64>(token_of(sent)) * cfg.topk + lane_id(), id = c.expert_at(entry);
        if (id >= 0 && valid_id(id, cfg.experts)) expert = static_cast<i32>(id);
        weight = c.weight_at(entry);
    }
    // Returns the place of this lane's entry among this rank's entries of the same expert.
    MOECOMM_FN i32 place_of(i32 token) const {
        // Earlier entries of this token, plus entries before this block; the loop adds those of the block's earlier tokens.
        i32 place = (expert >= 0 ? c.shared.before[expert] : 0) + __popc(__match_any_sync(kAllLanes, expert) & lanes_below());
#pragma unroll 1
        for (i32 earlier = c.share.first; earlier < token; ++earlier) {
            const i64 id = lane_id() < cfg.topk ? c.expert_at(static_cast<i64>(earlier) * cfg.topk + lane_id()) : -1;
#pragma unroll
            for (i32 k = 0; k < cfg.topk; ++k)
                if (static_cast<i32>(__shfl_sync(kAllLanes, static_cast<i32>(id), k)) == expert) ++place;
        }
        return place;
    }

    // Writes the scales of the columns behind them, with zeros up to the end of the row; casts first if rows are cast.
    MOECOMM_FN void fill_content(i32 token, i32 column) const {
        const i32 piece = column / kColumns;
        u8* scales = content() + scale_word(piece) * 8;
        if constexpr (cfg.quantize) {
            for (i32 i = lane_id(); i < scale_bytes(piece) / 4; i += kWarp) reinterpret_cast<u32*>(scales)[i] = 0;
            __syncwarp();
            quantize_piece<cfg, kColumns>(column, content(), ring().raw[sent % kSlots], scales, given);
        } else if constexpr (cfg.scale_bytes > 0) {
            const i32 at = piece * cfg.packet_scale_bytes;
            const u8* given = reinterpret_cast<const u8*>(c.a.in_scales) + token * c.a.in_scales_stride + at;
            copy_small(scales, given, max(0, min(cfg.packet_scale_bytes, cfg.scale_bytes - at)));
        }
    }

    MOECOMM_FN void send_next() {
        const i32 token = token_of(sent), column = column_of(sent), piece = column / kColumns;
        if (has_entries(piece)) {
            const i32 place = cfg.layout != Layout::flat ? place_of(token) : 0;
            if (lane_id() < cfg.topk)
                reinterpret_cast<u64*>(content())[entry_word(piece) + lane_id()] =
                    expert >= 0 ? packed_entry(expert, place, __float_as_uint(weight)) : static_cast<u64>(kNoEntry) << 32;
        }
        copy_wait(&ring().full[sent % kSlots], sent / kSlots & 1);
        fill_content(token, column);
        __syncwarp();
        const u64 offset = packets_at(c.window(), c.shape(), c.round.tag, c.me()) +
                           static_cast<u64>(token * kOfRow + piece) * cfg.packet_lines * kLineBytes;
        store(offset, lines(piece), expert >= 0 ? cfg.ranges().owner(expert) : -1);
        __syncwarp();  // the slot is free
        ++sent;
        look_ahead();
    }

    // Stores a packet of `lines` lines at every rank that owns an expert of the token. `owner` is the owner of this lane's entry. Each line
    // ends in the round's tag, and a warp stores a line at once, so no fence or signal follows.
    MOECOMM_FN void store(u64 offset, i32 lines, i32 owner) const {
        const auto* words = reinterpret_cast<const u64*>(content());
        ulonglong2 held[kPacketSteps];
#pragma unroll
        for (i32 step = 0; step < kPacketSteps; ++step) {
            const i32 word = packet_word(step);
            const bool inside = packet_line(step) < lines;
            held[step] = make_ulonglong2(inside ? words[word] : 0, inside && !ends_line() ? words[word + 1] : 0);
        }
        for (i32 step = 0; step < cfg.ranks; ++step) {
            const i32 rank = rotated<cfg.ranks>(c.me(), step);
            if (!__any_sync(kAllLanes, owner == rank)) continue;
            u8* packet = c.transport.template peer_ptr<u8>(rank, offset);
#pragma unroll
            for (i32 step = 0; step < kPacketSteps; ++step) store_step(packet, lines, step, held[step], c.round.tag);
        }
    }

    // Sends all remaining packets. Cannot fail.
    MOECOMM_FN void send_all() {
        while (has(sent)) {
            load_next();
            send_next();
        }
    }
};

}  // namespace moecomm
