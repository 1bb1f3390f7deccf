#include "scaleout_forward.h"

#include <algorithm>

namespace moecomm::host {

// The second half of a split dispatch resumes after the chunks that the first has forwarded.
Forward::Forward(Dispatch& d, i32 worker, i32 stride) : d_(d), stride_(stride) {
    for (i32 column = 0; d.r.domains() > 1 && column < d.r.columns(); ++column) {
        if (const i32 source = d.r.source_of(column); source >= 0) columns_.push_back({column, source, worker});
    }
    for (Column& column : columns_) skip_forwarded(column);
}

void Forward::skip_forwarded(Column& column) {
    const auto forwarded = [&] {
        return has_tag(at<const u64>(d_.a.ctx, d_.r.me, arrived_at(d_.a.ctx.window, d_.a.ctx.shape, column.source, column.next)), d_.r.tag);
    };
    while (column.next < chunks(column) && forwarded()) column.next += stride_;
}

bool Forward::has_arrived(const Column& column) const {
    if (column.next >= chunks(column)) return false;
    return load_acquire(signal(column)) == word_signal(d_.r.tag, static_cast<u32>(column.next));
}

bool Forward::any_arrived() const {
    return std::any_of(columns_.begin(), columns_.end(), [this](const Column& column) { return has_arrived(column); });
}

void Forward::forward_arrived() {
    for (Column& column : columns_)
        for (; has_arrived(column); skip_forwarded(column)) forward_chunk(column);
}

const Forward::Column* Forward::first_open(i32 rings) const {
    const auto open = [&](const Column& column) { return column.next + rings * ring(column) < chunks(column); };
    const auto found = std::find_if(columns_.begin(), columns_.end(), open);
    return found == columns_.end() ? nullptr : &*found;
}

Missing Forward::missing() const {
    const Column& column = *first_open(0);
    return {column.source, signal(column), d_.r.tag};
}

void Forward::forward_chunk(const Column& column) const {
    const DispatchArgs& a = d_.a;
    const Shape& shape = a.ctx.shape;
    const i32 chunk = column.next, first = chunk * sent(column).chunk_tokens;
    const i32 end = std::min(first + sent(column).chunk_tokens, sent(column).num_tokens);
    Delivery delivery(d_, column.source, chunk);
    for (i32 number = first; number < end; ++number) {
        const u8* here = at<const u8>(a.ctx, d_.r.me, receive_at(a.ctx.window, shape, column.number, number));
        const ReceivedHead& head = *reinterpret_cast<const ReceivedHead*>(here);
        const bool comes = head.tag == d_.r.tag && head.token == number;
        const Entry* entries = reinterpret_cast<const Entry*>(here + sizeof(ReceivedHead));
        const Token token{column.source, number, entries, reinterpret_cast<const i32*>(entries + d_.topk)};
        if (!d_.repeat) record_route(column.source, number, comes ? &token : nullptr);
        if (comes) delivery.deliver(token, {here + received_row(shape), here + received_scales(shape, a.row_bytes)});
    }
    delivery.raise_flags();
    if (chunk + ring(column) >= chunks(column)) return;
    const u64 credit = receive_credit(shape, d_.r.domain(), chunk, sent(column).chunk_tokens);
    d_.r.link().signal(column.source, credit, word_signal(d_.r.tag, static_cast<u32>(chunk)));
}

// Keep the token's route for combine; -1 everywhere for a token that has no row in this domain.
void Forward::record_route(i32 source, i32 token, const Token* arrived) const {
    const Shape& shape = d_.a.ctx.shape;
    i32* kept = memory<i32>(d_.a.route.forwarded) + (static_cast<i64>(source) * shape.max_tokens + token) * forwarded_words(shape);
    if (arrived == nullptr) return static_cast<void>(std::fill_n(kept, forwarded_words(shape), -1));
    for (i32 k = 0; k < d_.topk; ++k) {
        kept[k] = arrived->entries[k].row;
        kept[d_.topk + k] = arrived->entries[k].owner;
    }
    std::copy_n(arrived->slots, d_.r.scaleup_ranks, kept + 2 * d_.topk);
}

}  // namespace moecomm::host
