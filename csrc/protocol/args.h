// The argument struct of each operation. The host fills it; the kernels and the host executor take the same one.
#pragma once
#include "layout.h"

namespace moecomm {

enum class Layout : i32 { flat = 0, expert = 1, batched = 2 };
enum class Type : i32 { bf16 = 0, fp16 = 1, fp32 = 2, e4m3 = 3, int8 = 4 };

constexpr i32 kQuantGroup = 128;  // columns that share a scale

// A row that combine stages in a type of one byte has a float32 scale for each group of columns. Behind each kScaledColumns of its values
// lie their scales, 16 bytes of them, so that one bulk copy brings both; behind the last values, which may be fewer, as well. Scales of
// groups that the row lacks may be anything on GPUs, and are 0 on CPU ranks.
constexpr i32 kScaleBytes = 16, kScaledColumns = kScaleBytes / 4 * kQuantGroup;
MOECOMM_BOTH constexpr bool has_scales(Type type) { return type == Type::e4m3 || type == Type::int8; }
MOECOMM_BOTH constexpr i64 staged_bytes(Type type, i64 hidden) {
    if (has_scales(type)) return hidden + ceil_div<i64>(hidden, kScaledColumns) * kScaleBytes;
    return hidden * (type == Type::fp32 ? 4 : 2);
}
// Offset of a column of such a row, and of the scale of its group.
MOECOMM_BOTH constexpr i32 scaled_column_at(i32 column) { return column + column / kScaledColumns * kScaleBytes; }
MOECOMM_BOTH constexpr i32 scale_at(i32 column, i32 hidden) {
    const i32 first = column / kScaledColumns * kScaledColumns, end = hidden - first < kScaledColumns ? hidden : first + kScaledColumns;
    return first / kScaledColumns * kScaleBytes + end + column % kScaledColumns / kQuantGroup * 4;
}

// This rank and how to reach its peers. Filled once, when the Buffer opens; only `timeout_ns` may change.
struct Context {
    u64 peers[kMaxRanks];  // base address of every rank's window in this rank's address space; 0 where loads and stores do not reach
    u64 all_peers;         // host, more than kMaxRanks ranks: address of u64[ranks], which stands in for `peers`; else 0
    u64 record;            // FailureRecord*, host-visible
    u64 abort_host;        // u32*, host-writable
    u64 timeout_ns;
    u64 link;  // reaches ranks of other domains: host::Link*, or the transport's own handle (kernels); 0 with one domain
    Shape shape;
    WindowLayout window;
    i32 rank;
    i32 placed;  // not 0: ids of a dispatch are those of experts that callers name, and a table in the window has their slots: placement.h
};

#if !MOECOMM_DEVICE
// The base address of a rank's window.
inline u64 window_of(const Context& ctx, i32 rank) {
    return ctx.all_peers == 0 ? ctx.peers[rank] : reinterpret_cast<const u64*>(ctx.all_peers)[rank];
}
#endif

// Tokens of a source rank and the chunk size it sent them in.
struct SourceTokens {
    i32 num_tokens, chunk_tokens;
};

// Tables of one dispatch: where its tokens went, and where the rows here came from. Dispatch writes them; combine and dispatch(handle=)
// read them. The addresses are plain addresses in this rank's memory; `rows`, `row_weights` and `src` are in the window, because peers
// write them.
struct Route {
    u64 token_rows;   // i32[num_tokens][topk]: row at the owner of the k-th expert (flat: the flat row); -1 for a -1 entry
    u64 token_owner;  // i32[num_tokens][topk]: rank of the k-th expert; -1 for a -1 entry. Repeats and combine have no ids to derive it
                      // from
    u64 token_slot;   // i32[num_tokens][ranks]: flat row at that rank; -1 where the token has no expert
    u64 sent;         // SourceTokens[ranks], by source rank; no tokens after an invalid round. Then u32: round_of, 4 bytes of padding, u64:
                      // seal_of, i32[2][ranks]: traffic_of
    u64 ranges;       // u32[ranks][max_tokens]: flat rows here, by source rank and chunk of its tokens: the low word of the chunk_signal
    u64 rows;         // i32[flat rows][topk]: rows here of flat row f, -1 where the k-th expert is elsewhere (expert, batched)
    u64 row_weights;  // f32[rows]: the routing weight of each row (expert, batched)
    u64 src;          // i32[rows][2]: source rank, token; padding rows -1, -1
    u64 forwarded;    // i32[ranks][max_tokens][forwarded_words()]: tokens this rank forwards, by source rank (domains.h); 0 with one
                      // domain
    u64 key;          // hash of the window, the layout, max_rows and num_tokens; dispatches with the same key may have written such tables
    i32 max_rows;     // rows the tables have room for
    i32 first_token;  // tokens of the same call that went in earlier rounds: replicas are taken in turn over all of them (placement.h)
};

// Round of the dispatch that wrote the route, valid or not. All ranks of a combine or a repeat must hold routes of the same round. The word
// is stored with the route, because no host knows it: graphs replay, and handles are copied.
MOECOMM_BOTH u32& round_of(const Route& route, i32 ranks) { return *reinterpret_cast<u32*>(route.sent + ranks * sizeof(SourceTokens)); }

// Seal of the tables, after them. The host executor stores a checksum of all tables (host/seal.h); kernels store kernel_seal.
MOECOMM_BOTH u64& seal_of(const Route& route, i32 ranks) {
    return *reinterpret_cast<u64*>(route.sent + ranks * sizeof(SourceTokens) + sizeof(u64));
}
// Kernels do not scan the tables, which would be a pass of its own. A route that bears this seal was written by a dispatch of this window,
// for the same number of tokens and rows, and all its indices are inside the tables they index. As long as nobody edits single entries of a
// handle, no index becomes an address out of bounds. A rank whose route lacks the seal treats the route as empty before it computes any
// address from it, and reports that in its round header.
MOECOMM_BOTH constexpr u64 kernel_seal(const Route& route) { return ~route.key; }
MOECOMM_BOTH bool is_sealed_by_kernel(const Route& route, i32 ranks) { return seal_of(route, ranks) == kernel_seal(route); }
// The rows of the dispatch that wrote the route: from each rank, then to each rank: i32[2][ranks], after the seal. A repeat counts them
// again (counters.h).
MOECOMM_BOTH i32* traffic_of(const Route& route, i32 ranks) { return reinterpret_cast<i32*>(&seal_of(route, ranks) + 1); }
MOECOMM_BOTH constexpr u64 route_tail(i32 ranks) { return 2 * sizeof(u64) + 2 * ranks * sizeof(i32); }  // bytes after SourceTokens[ranks]

// Half of a split dispatch: `begin` sends and does not wait for rows; `end` waits for the rows of the last dispatch that was begun.
enum class Part : i32 { whole = 0, begin = 1, end = 2 };
enum class ScaleFormat : i32 { fp32 = 0, ue8m0 = 1 };  // ue8m0: one byte, the exponent of a power of two

struct DispatchArgs {
    Context ctx;
    Route route;
    // in
    u64 x;             // [num_tokens][hidden] of in_type, rows x_stride bytes apart, 16-byte aligned
    u64 in_scales;     // bytes[num_tokens][scale_bytes], rows in_scales_stride apart; 0 if the caller gives no scales. Where rows are
                       // cast: f32[1], the global scale; 0: in_scales_stride has its bits
    u64 topk_idx;      // i32 or i64 [num_tokens][topk], contiguous; 0 when `repeat`
    u64 topk_weights;  // f32[num_tokens][topk], contiguous; 0: every weight is 1
    i64 x_stride, in_scales_stride;
    i32 num_tokens;
    i32 idx_bytes;  // 4 or 8
    i32 hidden;
    i32 in_type;       // Type of x
    i32 row_bytes;     // bytes of a row as it travels and arrives (hidden * size of in_type; when quantize, those of the format)
    i32 scale_bytes;   // bytes of a row of scales, 0 without
    i32 quantize;      // cast rows on the way. 1: to e4m3 with scales of 128 columns; kernels: or to another format, by its number in
                       // moecomm/rounds/signature.py
    i32 scale_format;  // ScaleFormat of the scales that `quantize` makes, if it is 1
    i32 layout;        // Layout
    i32 alignment;     // expert: groups start at multiples of this
    i32 max_rows;      // rows of `out_x`
    i32 chunk_tokens;  // a power of two up to kMaxChunk
    i32 repeat;        // 1: `route` is that of an earlier dispatch; nothing is counted, and src, weights and indices are not written
    // Kernels, one domain. 1: a RowDescriptor (row_descriptor.h) travels in place of a row and its metadata. The rows themselves are in
    // this rank's window: `x` is an offset, and is read only after the earlier kernels of the stream have ended. Of the route, only
    // token_owner is written.
    i32 descriptors;
    u64 call;           // RoundHeader::call
    i32 check_weights;  // 1: NaN in topk_weights is bad input
    i32 workers;        // host: threads of this rank; GPU: blocks of the launch
    i32 part;           // Part
    i32 clear_rows;     // flat: unused rows before this one get ids -1 and weights 0; 0: unused rows are left as they are
    // out, all offsets in this rank's window; 0: not wanted
    u64 out_x;
    u64 out_scales;    // bytes[rows][scale_bytes]; with `scale_columns`: a receive buffer [flat rows][scale_bytes]
    u64 out_src;       // Route::src as an offset
    u64 out_topk_idx;  // flat: idx_bytes integers [rows][topk], local expert or -1
    u64 out_weights;   // flat: f32[rows][topk], 0 for id -1; expert, batched: f32[rows], 0 in padding
    u64 out_rows;      // Route::rows as an offset
    // out, plain addresses
    u64 tokens_per_expert;  // i32[experts of this rank]; a repeat reads what the earlier dispatch wrote
    u64 rows_per_expert;    // i64[experts of this rank]: tokens_per_expert with the padding rows of `alignment`
    u64 num_rows;           // i32[1]: flat: flat rows; expert: end of the last group; batched: sum of tokens_per_expert
    // Column-major scales, for grouped GEMMs that load scales by TMA: u32[groups][scale_bytes / 4][scale_stride], one place in each column
    // for each output row. One group holds all rows (flat, expert), or there is one group for each expert (batched). 0: row-major scales.
    u64 scale_columns;
    i64 scale_stride;
    u64 result_rows;  // descriptors: room in this rank's window for the experts' result rows, [num_tokens][topk] rows of
                      // in_type: an offset
    u64 compared;  // kernels: f32[1], the global scale by which rows are cast, or have been: see compare_scale. 0: none, or `call` has it
};

// What ranks compare of a dispatch whose rows are cast by a global scale with these bits: RoundHeader::call.
MOECOMM_BOTH constexpr u64 compare_scale(u64 call, u32 bits) { return call ^ static_cast<u64>(bits) << 32; }

struct CombineArgs {
    Context ctx;
    Route route;
    // in
    u64 y;             // [rows][hidden] of `type`, rows y_stride bytes apart, 16-byte aligned
    u64 bias;          // [num_tokens][hidden] of `bias_type`, rows bias_stride bytes apart (0: one row for all); 0: none
    u64 weight_grads;  // f32[rows] (expert, batched) or f32[rows][topk] (flat): gradients that travel to the source rank with the rows; 0:
                       // none
    i64 y_stride, bias_stride;
    i32 num_tokens;
    i32 hidden;
    i32 type;       // Type of y and out
    i32 bias_type;  // `type` or Type::fp32
    i32 wire;      // Type of a reduced row as it travels: fp32 is exact; e4m3, int8: with scales; flat rows travel as they are, or in these
    i32 layout;    // Layout of the dispatch
    i32 weighted;  // expert, batched: 1: multiply each row by its routing weight
    i32 unsummed;  // expert, batched, one domain: 1: source ranks read the rows of y, which is in the window, and add them in the order of
                   // k
    u64 call;
    i32 workers;
    i32 chunk_tokens;  // of this rank's tokens, as in the dispatch
    i32 sum_grads;   // flat: 1: out_weight_grads sums over all ranks with a row of the token; 0: it takes the value of each expert's owner
    i32 bias_first;  // one domain, with a bias: 1: the sum of a token starts from it; 0: it is added to the sum
    // f32[num_tokens][topk], contiguous: replaces the weights that the dispatch carried; 0: the dispatched weights apply
    u64 topk_weights;
    // Scratch. Kernels, one domain: address, in this rank's window, of one reduced row for each flat row here, each followed by its
    // gradients. 0: rows go through `staging`, as they do when source ranks give topk_weights.
    u64 reduced_rows;
    // Kernels, in verified rounds: hashes (row_hash.cuh) of the rows that this rank stages, u64[ranks][max_tokens] by source rank and
    // token, and of the rows that it adds up, or a forwarder has added up, u64[num_tokens][CombineCall::kHashWords] by rank; with
    // several domains, then by domain of the sums that it adds, and of these as their forwarders tell it. Zero before the launch.
    // staged_hashes: 0 if the round is not verified.
    u64 staged_hashes, added_hashes;
    // out, plain addresses
    u64 out;               // [num_tokens][hidden] of `type`, rows out_stride bytes apart
    u64 out_weight_grads;  // f32[num_tokens][topk]
    i64 out_stride;
};

static_assert(sizeof(DispatchArgs) < 2048 && sizeof(CombineArgs) < 2048, "a kernel takes 4 KB of arguments");

}  // namespace moecomm
