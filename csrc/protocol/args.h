// One plain struct an operation: what the host hands to an executor, the same for the kernels and for the host executor.
#pragma once
#include "layout.h"

namespace moecomm {

enum class Layout : i32 { flat = 0, expert = 1, batched = 2 };
enum class Type : i32 { bf16 = 0, fp16 = 1, fp32 = 2, e4m3 = 3 };

constexpr i32 kQuantGroup = 128;  // columns that share a scale

// Who we are and how to reach everybody; filled once when the Buffer opens, only `timeout_ns` may change.
struct Context {
    u64 peers[kMaxRanks];  // base address of every rank's window as we see it; 0 where loads and stores do not reach
    u64 record;            // FailureRecord*, host-visible
    u64 abort_host;        // u32*, host-writable
    u64 timeout_ns;
    u64 link;  // how ranks of other domains are reached: host::Link*, or what the transport of a kernel wants; 0 with one domain
    Shape shape;
    WindowLayout window;
    i32 rank;
    i32 pad;
};

// Who sends what: a source's tokens and the chunks it sent them in.
struct Sent {
    i32 num_tokens, chunk_tokens;
};

// Where the tokens of one dispatch went and came from: written by dispatch, read by combine and by dispatch(handle=).
// Plain addresses in this rank's own memory; `rows`, `row_weights` and `src` lie in the window, because peers write them.
struct Route {
    u64 token_rows;   // i32[num_tokens][topk]: row at the owner of the k-th expert (flat: the flat row); -1 for a -1 entry
    u64 token_owner;  // i32[num_tokens][topk]: rank of the k-th expert; -1 for a -1 entry. Repeats and combine have no ids to tell it from
    u64 token_slot;   // i32[num_tokens][ranks]: flat row at that rank; -1 where the token has no expert
    u64 sent;         // Sent[ranks]: of each source; no tokens after a void round.  Behind them, u32: round_of, 4 bytes, u64: seal_of
    u64 ranges;       // u32[ranks][max_tokens]: by source and chunk of its tokens, the low word of its chunk_signal: its flat rows here
    u64 rows;         // i32[flat rows][topk]: rows here of flat row f, -1 where the k-th expert is elsewhere (expert, batched)
    u64 row_weights;  // f32[rows]: the routing weight of each row (expert, batched)
    u64 src;          // i32[rows][2]: source rank, token; padding rows -1, -1
    u64 forwarded;    // i32[domains][max_tokens][forwarded_words()]: what we relay of each other domain (domains.h); 0 with one domain
    u64 key;          // a hash of the window, the layout, max_rows and our tokens: which dispatches may have written tables like these
    i32 max_rows;     // rows that these tables are for
    i32 pad;
};

// The round of the dispatch that wrote the route, void or not: all ranks of a combine or a repeat must have that of the same one.  It lies
// with the route, because no host knows it: graphs replay, and handles are copied.
MOECOMM_BOTH u32& round_of(const Route& route, i32 ranks) { return *reinterpret_cast<u32*>(route.sent + ranks * sizeof(Sent)); }

// Behind the tables: what only a dispatch with this key leaves there.  Of the host executor a sum over all of them (host/seal.h); of
// kernels kernel_seal.
MOECOMM_BOTH u64& seal_of(const Route& route, i32 ranks) {
    return *reinterpret_cast<u64*>(route.sent + ranks * sizeof(Sent) + sizeof(u64));
}
// Kernels do not look through the tables, which would be a pass of its own.  A route with this word was written by a dispatch of this
// window, for as many tokens and rows, whose numbers all lie in the tables they count in: so long as nobody changes single numbers of a
// handle, none of them becomes an address out of bounds.  Without it, a rank takes the route for one of a void round, in which nothing
// came, before it addresses anything by its numbers, and says so in its notice.
MOECOMM_BOTH constexpr u64 kernel_seal(const Route& route) { return ~route.key; }
MOECOMM_BOTH bool is_sealed_by_kernel(const Route& route, i32 ranks) { return seal_of(route, ranks) == kernel_seal(route); }
constexpr u64 kRouteTail = 2 * sizeof(u64);  // bytes behind Sent[ranks]

// Which half of a dispatch: `begin` sends and does not wait for rows, `end` waits for the rows of the dispatch that was begun last.
enum class Part : i32 { whole = 0, begin = 1, end = 2 };
enum class ScaleFormat : i32 { fp32 = 0, ue8m0 = 1 };  // ue8m0: a byte, the exponent of a power of two

struct DispatchArgs {
    Context ctx;
    Route route;
    // in
    u64 x;             // [num_tokens][hidden] of in_type, rows x_stride bytes apart, 16-byte aligned
    u64 in_scales;     // bytes[num_tokens][scale_bytes], rows in_scales_stride apart; 0 without scales given
    u64 topk_idx;      // i32 or i64 [num_tokens][topk], contiguous; 0 when `repeat`
    u64 topk_weights;  // f32[num_tokens][topk], contiguous; 0: every weight is 1
    i64 x_stride, in_scales_stride;
    i32 num_tokens;
    i32 idx_bytes;  // 4 or 8
    i32 hidden;
    i32 in_type;       // Type of x
    i32 row_bytes;     // bytes of a row as it travels and arrives (hidden * size of in_type; hidden when quantize)
    i32 scale_bytes;   // bytes of a row of scales, 0 without
    i32 quantize;      // 1: cast rows to e4m3 with scales of 128 columns on the way
    i32 scale_format;  // ScaleFormat of those
    i32 layout;        // Layout
    i32 alignment;     // expert: groups start at multiples of this
    i32 max_rows;      // rows of `out_x`
    i32 chunk_tokens;  // a power of two up to kMaxChunk
    i32 repeat;        // 1: `route` is that of an earlier dispatch; no counting, no src, weights or indices
    // Kernels, one domain.  1: a RowDescriptor (slip.h) travels in the place of a row, and of all that stands beside it; the rows
    // themselves lie in our window, `x` is an offset there, and is read once the kernels before this one have ended.  Of the route,
    // token_owner is written.
    i32 descriptors;
    u64 call;           // RoundHeader::call
    i32 check_weights;  // 1: NaN in topk_weights is bad input
    i32 workers;        // host: threads of this rank; GPU: blocks of the launch
    i32 part;           // Part
    i32 clear_rows;     // flat: rows that nobody sends, up to this one, get ids -1 and weights 0; 0: they are left as they are
    // out, all in our window: offsets, 0 where not wanted
    u64 out_x;
    u64 out_scales;    // bytes[rows][scale_bytes]; with `scale_columns`: where they land, [flat rows][scale_bytes]
    u64 out_src;       // Route::src as an offset
    u64 out_topk_idx;  // flat: idx_bytes integers [rows][topk], local expert or -1
    u64 out_weights;   // flat: f32[rows][topk], 0 beside -1; expert, batched: f32[rows], 0 in padding
    u64 out_rows;      // Route::rows as an offset
    // out, plain addresses
    u64 tokens_per_expert;  // i32[experts / ranks]
    u64 rows_per_expert;    // i64[experts / ranks]: the same with the rows that `alignment` adds
    u64 num_rows;           // i32[1]: flat: flat rows; expert: end of the last group; batched: sum of tokens_per_expert
    // Column-major scales, for grouped GEMMs that load them by TMA: u32[groups][scale_bytes / 4][scale_stride], a row of the output a
    // place in each column; one group of all rows (flat, expert) or one an expert (batched).  0: scales are rows.
    u64 scale_columns;
    i64 scale_stride;
    u64 receive_buffer;  // slips: room in our window for a row of in_type that an expert makes, [num_tokens][topk]: an offset
};

struct CombineArgs {
    Context ctx;
    Route route;
    // in
    u64 y;             // [rows][hidden] of `type`, rows y_stride bytes apart, 16-byte aligned
    u64 bias;          // [num_tokens][hidden] of `bias_type`, rows bias_stride bytes apart (0: one row for all); 0: none
    u64 weight_grads;  // f32[rows] (expert, batched) or f32[rows][topk] (flat): sent home beside the rows; 0: not wanted
    i64 y_stride, bias_stride;
    i32 num_tokens;
    i32 hidden;
    i32 type;       // Type of y and out
    i32 bias_type;  // that, or Type::fp32
    i32 wire;       // Type of a reduced row as it travels: fp32 is exact; flat rows always travel as they are
    i32 layout;     // Layout of the dispatch
    i32 weighted;   // expert, batched: 1: multiply each row by its routing weight
    u64 call;
    i32 workers;
    i32 chunk_tokens;  // of our tokens, as in the dispatch
    i32 sum_grads;     // flat: 1: out_weight_grads is the sum over all ranks with a row of the token; 0: that of the owner of each expert
    // out, plain addresses
    u64 out;               // [num_tokens][hidden] of `type`, rows out_stride bytes apart
    u64 out_weight_grads;  // f32[num_tokens][topk]
    i64 out_stride;
    u64 topk_weights;  // in: f32[num_tokens][topk], contiguous: in the place of those that the dispatch carried; 0: those
    u64 reduced_rows;  // kernels, one domain: in our window, room for a reduced row of each flat row here, gradients behind it; 0: they
                       // go through `staging`, also where homes give topk_weights
};

static_assert(sizeof(DispatchArgs) < 2048 && sizeof(CombineArgs) < 2048, "a kernel takes 4 KB of arguments");

}  // namespace moecomm
