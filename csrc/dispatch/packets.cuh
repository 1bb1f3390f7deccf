// Few tokens: rows go in packets (csrc/protocol/packets.h), at once: to where a packet goes only its token decides, so nothing is awaited,
// and what everybody counts travels beside them.  Unpacking is unpack.cuh.
#pragma once
#include "../device/packet.cuh"
#include "../device/quantize.cuh"
#include "call.cuh"

namespace moecomm {

// A send warp: every send_warps-th packet of this block.  The pieces of rows for its first packets are loaded while entries are counted.
template <class Call>
struct Packets {
    static constexpr DispatchConfig cfg = Call::cfg;
    static constexpr i32 kSlots = cfg.ring_slots, kOfRow = cfg.packets_of_row() > 0 ? cfg.packets_of_row() : 1;
    static constexpr i32 kColumns = cfg.packet_bytes / bytes_of(cfg.quantize ? Type::e4m3 : cfg.type);  // of a row, in a packet
    static constexpr i32 kScaleWord = cfg.packet_bytes / 8, kEntryWord = kScaleWord + cfg.packet_scale_bytes / 8;

    const Call& c;
    const i32 packets;         // of the block
    i32 loaded = 0, sent = 0;  // of this warp
    i32 expert;                // of this lane's entry of the token that is next, -1 if none
    float weight;

    MOECOMM_FN explicit Packets(const Call& call) : c(call), packets((call.share.end - call.share.first) * kOfRow) { look_ahead(); }

    MOECOMM_FN static i32 nth(i32 n) { return warp_id() + n * cfg.send_warps; }
    MOECOMM_FN bool has(i32 n) const { return warp_id() < cfg.send_warps && nth(n) < packets; }
    MOECOMM_FN i32 token_of(i32 n) const { return c.share.first + nth(n) / kOfRow; }
    MOECOMM_FN static i32 column_of(i32 n) { return nth(n) % kOfRow * kColumns; }
    MOECOMM_FN static i32 columns_from(i32 column) { return min(kColumns, cfg.hidden - column); }
    MOECOMM_FN PacketRing<cfg>& ring() const { return c.shared.packets[warp_id()]; }
    MOECOMM_FN u8* content() const { return reinterpret_cast<u8*>(ring().content[sent % kSlots]); }

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
    // A block must not end while a load writes to its memory.
    MOECOMM_FN void drop_loads() {
        for (; sent < loaded; ++sent) copy_wait(&ring().full[sent % kSlots], sent / kSlots & 1);
    }

    MOECOMM_FN void look_ahead() {
        expert = -1;
        if (!has(sent) || lane_id() >= cfg.topk) return;
        const i64 entry = static_cast<i64>(token_of(sent)) * cfg.topk + lane_id(), id = c.id_at(entry);
        if (id >= 0 && valid_id(id, cfg.experts)) expert = static_cast<i32>(id);
        weight = c.weight_at(entry);
    }
    // The place of the entry among ours of its expert.
    MOECOMM_FN i32 place_of(i32 token) const {
        // Ours of this token, and those of the block's tokens before it.
        i32 place = (expert >= 0 ? c.shared.before[expert] : 0) + __popc(__match_any_sync(kAllLanes, expert) & lanes_below());
#pragma unroll 1
        for (i32 earlier = c.share.first; earlier < token; ++earlier) {
            const i64 id = lane_id() < cfg.topk ? c.id_at(static_cast<i64>(earlier) * cfg.topk + lane_id()) : -1;
#pragma unroll
            for (i32 k = 0; k < cfg.topk; ++k)
                if (static_cast<i32>(__shfl_sync(kAllLanes, static_cast<i32>(id), k)) == expert) ++place;
        }
        return place;
    }

    // The scales of the columns; zeros up to the end of the row.
    MOECOMM_FN void fill_content(i32 token, i32 column) const {
        u8* scales = content() + cfg.packet_bytes;
        if constexpr (cfg.quantize) {
            for (i32 i = lane_id(); i < cfg.packet_scale_bytes / 4; i += kWarp) reinterpret_cast<u32*>(scales)[i] = 0;
            __syncwarp();
            quantize_piece<cfg, kColumns>(column, content(), ring().raw[sent % kSlots], scales);
        } else if constexpr (cfg.scale_bytes > 0) {
            const i32 at = column / kColumns * cfg.packet_scale_bytes;
            const u8* given = reinterpret_cast<const u8*>(c.a.in_scales) + token * c.a.in_scales_stride + at;
            copy_small(scales, given, max(0, min(cfg.packet_scale_bytes, cfg.scale_bytes - at)));
        }
    }

    MOECOMM_FN void send_next() {
        const i32 token = token_of(sent), column = column_of(sent), place = cfg.layout != Layout::flat ? place_of(token) : 0;
        if (lane_id() < cfg.topk)
            reinterpret_cast<u64*>(content())[kEntryWord + lane_id()] =
                expert >= 0 ? packed_entry(expert, place, __float_as_uint(weight)) : static_cast<u64>(kNoEntry) << 32;
        copy_wait(&ring().full[sent % kSlots], sent / kSlots & 1);
        fill_content(token, column);
        __syncwarp();
        const u64 offset = packets_at(c.window(), c.shape(), c.round.tag, c.me()) +
                           static_cast<u64>(token * kOfRow + column / kColumns) * cfg.packet_lines * kLineBytes;
        store(offset, expert >= 0 ? expert / cfg.experts_here() : -1);
        __syncwarp();  // the place is free
        ++sent;
        look_ahead();
    }

    // To every rank that owns an expert of the token; `owner`: of this lane's.
    MOECOMM_FN void store(u64 offset, i32 owner) const {
        const auto* words = reinterpret_cast<const u64*>(content());
        ulonglong2 lines[kPacketSteps];
#pragma unroll
        for (i32 step = 0; step < kPacketSteps; ++step) {
            const i32 word = packet_word(step);
            const bool inside = packet_line(step) < cfg.packet_lines;
            lines[step] = make_ulonglong2(inside ? words[word] : 0, inside && !ends_line() ? words[word + 1] : 0);
        }
        for (i32 turn = 0; turn < cfg.ranks; ++turn) {
            const i32 rank = rotated<cfg.ranks>(c.me(), turn);
            if (!__any_sync(kAllLanes, owner == rank)) continue;
            u8* packet = c.transport.template peer_ptr<u8>(rank, offset);
#pragma unroll
            for (i32 step = 0; step < kPacketSteps; ++step) store_step<cfg.packet_lines>(packet, step, lines[step], c.round.tag);
        }
    }

    MOECOMM_FN void send_all() {
        while (has(sent)) {
            load_next();
            send_next();
        }
    }
};

}  // namespace moecomm
