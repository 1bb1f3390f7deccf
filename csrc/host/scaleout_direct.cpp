#include "scaleout_direct.h"

#include <algorithm>

#include "deliver.h"

namespace moecomm::host {

void DirectSends::end_part(const Round& r, i32 rank, bool something) {
    if (something) __atomic_store_n(&any_[rank], 1, __ATOMIC_RELAXED);
    if (__atomic_sub_fetch(&left_[rank], 1, __ATOMIC_ACQ_REL) != 0 || __atomic_load_n(&any_[rank], __ATOMIC_RELAXED) == 0) return;
    r.link().signal(rank, direct_signal(r.ctx.shape, r.tag, r.me), tag_signal(r.tag));
}

DirectArrivals::DirectArrivals(Dispatch& d, i32 worker, i32 stride) : d_(d), worker_(worker), stride_(stride) {
    for (i32 source = 0; source < d_.r.ranks; ++source)
        if (!d_.r.reaches(source) && d_.direct_from(source) && d_.sent(source).num_tokens > 0) waiting_.push_back(source);
}

const u64* DirectArrivals::signal(i32 source) const { return d_.r.signal(direct_signal(d_.a.ctx.shape, d_.r.tag, source)); }

bool DirectArrivals::arrived(i32 source) const { return load_acquire(signal(source)) == tag_signal(d_.r.tag); }

bool DirectArrivals::any_arrived() const {
    return std::any_of(waiting_.begin(), waiting_.end(), [this](i32 source) { return arrived(source); });
}

Missing DirectArrivals::missing() const { return {waiting_.front(), signal(waiting_.front()), d_.r.tag}; }

void DirectArrivals::take_arrived() {
    const auto take_all = [this](i32 source) {
        if (!arrived(source)) return false;
        const SourceTokens& sent = d_.sent(source);
        for (i32 chunk = worker_; chunk < ceil_div(sent.num_tokens, sent.chunk_tokens); chunk += stride_) take(source, chunk);
        return true;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), take_all), waiting_.end());
}

void DirectArrivals::take(i32 source, i32 chunk) const {
    const DispatchArgs& a = d_.a;
    const Shape& shape = a.ctx.shape;
    const i32 first = chunk * d_.sent(source).chunk_tokens;
    const i32 end = std::min(first + d_.sent(source).chunk_tokens, d_.sent(source).num_tokens);
    Delivery here(d_, source, chunk, true);
    for (i32 number = first; number < end; ++number) {
        const u8* send_slot = at<const u8>(a.ctx, d_.r.me, direct_at(a.ctx.window, shape, d_.r.tag, source, number));
        const ReceivedHead& head = *reinterpret_cast<const ReceivedHead*>(send_slot);
        if (head.tag != d_.r.tag || head.token != number) continue;
        const auto* entries = reinterpret_cast<const Entry*>(send_slot + sizeof(ReceivedHead));
        here.deliver({source, number, entries, reinterpret_cast<const i32*>(entries + d_.topk)},
                     {send_slot + received_row(shape), send_slot + received_scales(shape, a.row_bytes)});
    }
    here.raise_flags();
}

}  // namespace moecomm::host
