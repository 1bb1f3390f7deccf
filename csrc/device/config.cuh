// Compile-time configuration of a kernel. moecomm/gpu/jit.py writes one of these structs, with named fields, before each kernel.
#pragma once
#include "../protocol/slots.h"
#include "format.cuh"

namespace moecomm {

constexpr i32 kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;

// A chunk is a power of two: a division by a number known only at run time would take twenty instructions.
MOECOMM_FN i32 count_chunks(i32 tokens, i32 chunk_tokens) { return (tokens + chunk_tokens - 1) >> (__ffs(chunk_tokens) - 1); }

MOECOMM_BOTH constexpr i32 bytes_of(Type type) {
    switch (type) {
        case Type::fp32:
            return 4;
        case Type::e4m3:
        case Type::int8:
            return 1;
        default:
            return 2;
    }
}

struct DispatchConfig {
    i32 ranks, experts, topk, hidden;
    i32 domain_ranks;  // as in Shape
    Layout layout;
    Type type;        // of x
    i32 idx_bytes;    // of an id in topk_idx
    i32 row_bytes;    // as it travels and arrives
    i32 scale_bytes;  // of a row of scales, 0 without
    bool scale_columns;
    bool quantize;
    ScaleFormat scale_format;     // of the scales that `quantize` makes in Format::fp8
    Format format = Format::fp8;  // that `quantize` casts to
    bool repeat;
    bool descriptors;   // travel in place of rows (descriptors.cuh)
    bool placed;        // Context::placed is not 0; `experts` are then slots
    i32 named_experts;  // placed, not balanced: named_experts(Shape); else 0
    bool balanced;      // it is kBalanced
    bool compares;      // DispatchArgs::compared is not 0
    Part part;
    // Packets of a row (moecomm/base/packets.py): bytes of the row and of its scales in each packet, and lines; no lines: no rank sends
    // packets.
    bool packets;  // this rank has few tokens and sends them in packets
    i32 packet_row_bytes, packet_scale_bytes, packet_lines;
    // Warp roles and shared memory of a block.
    i32 send_warps;                // 0 in the second half of a split dispatch
    i32 receive_warps;             // 0 if arrived rows need no further work
    i32 metadata_warps;            // 1 with send warps: writes the rows' metadata; 0 if the send warps' rows need none
    i32 flag_warps;                // 1 with send warps: signals chunks for them, so that no send warp waits for the fence of a release
    i32 put_warps, forward_warps;  // several domains: put what send warps have left in send slots; deliver tokens from the receive buffer
    i32 piece_columns;             // columns of a row that are loaded at once
    i32 ring_slots;                // pieces a send warp holds
    i32 replicate_bytes, replicate_slots;  // likewise, of a receive warp that replicates rows
    i32 forward_bytes, forward_slots;      // likewise, of a forward warp
    i32 count_warps;                       // send warps whose counters for all columns fit in shared memory that is not yet in use
    i32 count_bytes;                       // bytes for the counters of all send warps if no such memory exists
    i32 shared_bytes;

    MOECOMM_BOTH constexpr i32 scaleup_ranks() const { return domain_ranks != 0 ? domain_ranks : ranks; }  // ranks of this domain
    MOECOMM_BOTH constexpr i32 domains() const { return ranks / scaleup_ranks(); }
    MOECOMM_BOTH constexpr i32 columns() const { return experts + ranks; }
    MOECOMM_BOTH constexpr ExpertRanges ranges() const { return {experts, ranks}; }
    MOECOMM_BOTH constexpr i32 warps() const {
        return send_warps + receive_warps + metadata_warps + flag_warps + put_warps + forward_warps;
    }
    MOECOMM_BOTH constexpr i32 threads() const { return warps() * kWarp; }
    MOECOMM_BOTH constexpr bool replicates() const { return receive_warps > 0 && layout != Layout::flat; }  // a token has several rows here
    // True if receivers still work on arrived rows, or several domains need the forwarders' credits: each chunk is then signaled on its
    // own. Otherwise a block signals all its chunks at once: to signal a chunk, a send warp must wait until its stores have reached the
    // peers, and each such fence stalls the block.
    MOECOMM_BOTH constexpr bool signals_early() const { return layout != Layout::flat || scale_columns || domains() > 1; }
    MOECOMM_BOTH constexpr i32 pieces() const { return ceil_div(hidden, piece_columns); }
    MOECOMM_BOTH constexpr i32 piece_bytes() const { return piece_columns * bytes_of(type); }
    MOECOMM_BOTH constexpr i32 slots_ahead() const { return quantize ? ring_slots - 1 : ring_slots / 2; }  // loads that run ahead
    MOECOMM_BOTH constexpr i32 packets_of_row() const { return packet_lines > 0 ? ceil_div(row_bytes, packet_row_bytes) : 0; }
    MOECOMM_BOTH constexpr i32 tokens_per_step() const {
        return kWarp / topk;
    }  // complete tokens that a warp handles at once, one entry a lane
    // tokens_per_step rounded down to a power of two, so that it divides chunks.
    MOECOMM_BOTH constexpr i32 even_step() const {
        i32 tokens = kWarp;
        while (tokens * topk > kWarp) tokens /= 2;
        return tokens;
    }
    MOECOMM_BOTH constexpr i32 peers_per_lane() const { return ceil_div(ranks, kWarp); }
    // Where `quantize` casts rows: the columns that share a scale (all, if there is none), the scales of a row, and the bytes of columns.
    MOECOMM_BOTH constexpr i32 group() const { return group_of(format) == 0 ? hidden : group_of(format); }
    MOECOMM_BOTH constexpr i32 row_scales() const { return ceil_div(hidden, group()); }
    MOECOMM_BOTH constexpr i32 value_bytes(i32 columns) const { return is_e2m1(format) ? columns / 2 : columns; }
    MOECOMM_BOTH constexpr i32 packet_columns() const { return packet_row_bytes / value_bytes(2) * 2; }
    // Words for the scales of a row while it is cast. Those of fp8 have a word each, also where they are bytes.
    MOECOMM_BOTH constexpr i32 scale_words() const { return casts_to_fp8() ? row_scales() : ceil_div(scale_bytes + 1, 4); }
    MOECOMM_BOTH constexpr bool casts_to_fp8() const { return quantize && format == Format::fp8; }
    MOECOMM_BOTH constexpr i32 scale_size() const {
        if (format != Format::fp8) return format == Format::int8_group ? 4 : 1;
        return scale_format == ScaleFormat::fp32 ? 4 : 1;
    }  // bytes of a scale that `quantize` makes
};

struct CombineConfig {
    i32 ranks, experts, topk, hidden;
    i32 domain_ranks;  // as in Shape
    Layout layout;
    Type type;        // of y and out
    bool wide_bias;   // the bias is float32 and y is not
    bool bias_first;  // CombineArgs::bias_first
    Type wire;        // of a reduced row
    bool weighted;
    bool own_weights;                    // the source ranks give the weights, in place of those that the dispatch carried
    bool in_place;                       // peers read this rank's rows of y in place: nothing is staged
    bool unsummed;                       // CombineArgs::unsummed; in_place as well
    bool sum_grads;                      // CombineArgs::sum_grads
    bool verifies;                       // CombineArgs::staged_hashes; on all ranks, and without packets
    bool packets;                        // this rank has few tokens and receives its reduced rows in packets
    i32 packet_row_bytes, packet_lines;  // bytes of a staged row in each packet, and lines of a packet
    // Warp roles and shared memory of a block.
    i32 reduce_warps, pull_warps;  // no reduce warps if in_place
    i32 return_forward_warps;      // several domains: reduce rows for source ranks of other domains
    i32 flag_warps;   // 1: signals reduced chunks and, with several domains, gives credits; 0: nothing is staged, or in packets
    i32 pull_bytes;   // bytes of a row that one bulk copy moves
    i32 pull_slots;   // such pieces in a warp's ring
    i32 pull_blocks;  // most blocks that pull flat rows, which all blocks copy: more get in each other's way
    i32 reduce_bytes, reduce_slots;  // likewise, of a reduce warp; several domains only
    i32 shared_bytes;

    MOECOMM_BOTH constexpr i32 scaleup_ranks() const { return domain_ranks != 0 ? domain_ranks : ranks; }  // ranks of this domain
    MOECOMM_BOTH constexpr i32 domains() const { return ranks / scaleup_ranks(); }
    MOECOMM_BOTH constexpr i32 warps() const { return reduce_warps + pull_warps + return_forward_warps + flag_warps; }
    MOECOMM_BOTH constexpr i32 threads() const { return warps() * kWarp; }
    // Rows are cast, with scales, as they are staged, flat ones too, and so are sums for other domains.
    MOECOMM_BOTH constexpr bool casts() const { return has_scales(wire); }
    MOECOMM_BOTH constexpr Type staged() const { return layout == Layout::flat && !casts() ? type : wire; }
    MOECOMM_BOTH constexpr i32 row_bytes() const { return hidden * bytes_of(type); }
    MOECOMM_BOTH constexpr i32 value_bytes() const { return hidden * bytes_of(staged()); }  // of a staged row, without scales
    MOECOMM_BOTH constexpr i32 staged_bytes() const { return static_cast<i32>(moecomm::staged_bytes(staged(), hidden)); }
    // Offset of a column in a staged row. A piece begins at a multiple of kScaledColumns where rows are cast; scale_bytes: those behind its
    // values.
    MOECOMM_BOTH constexpr i32 staged_at(i32 column) const { return casts() ? scaled_column_at(column) : column * bytes_of(staged()); }
    MOECOMM_BOTH constexpr i32 scale_bytes(i32 columns) const { return casts() ? ceil_div(columns, kScaledColumns) * kScaleBytes : 0; }
    // With float32 on the wire and one domain, the only row that a rank has of a token travels as it is, in half the bytes, with its
    // weight. The source rank multiplies, so the bits are those of a float32 sum.
    MOECOMM_BOTH constexpr bool single_rows_travel() const {
        return layout != Layout::flat && domains() == 1 && wire == Type::fp32 && type != Type::fp32;
    }
    MOECOMM_BOTH constexpr i32 packets_of_row() const { return ceil_div(value_bytes(), packet_row_bytes); }
    MOECOMM_BOTH constexpr i32 grads_bytes() const { return align_up<i32>(topk * 4, 16); }
};

}  // namespace moecomm
