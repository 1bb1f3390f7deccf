#include "pull.h"

namespace moecomm::host {

Pull::Pull(Combine& c, const Tokens& tokens, i32 worker, i32 stride, float* scratch)
    : c_(c),
      tokens_(tokens),
      gather_(c_, tokens_),
      scratch_(scratch),
      all_(ceil_div(tokens.count, tokens.chunk_tokens)),
      ring_(ring_chunks(c.shape, tokens.chunk_tokens)),
      last_(c.r.scaleup_ranks, -1) {
    for (i32 chunk = worker; chunk < all_; chunk += stride) {
        chunks_.push_back({chunk, owners(chunk), false});
        for (RankSet left = chunks_.back().awaited; left.first() >= 0; left.remove(left.first())) last_[left.first()] = chunk;
    }
}

// The ranks of this domain that have rows of the chunk's tokens.
RankSet Pull::owners(i32 chunk) const {
    RankSet ranks;
    for (i32 token = first_token(chunk); token < end_token(chunk); ++token)
        for (i32 p = 0; p < c_.r.scaleup_ranks; ++p)
            if (tokens_.slots_of(token)[p] >= 0) ranks.add(p);
    return ranks;
}

// The chunks of one ring place are pulled in order, including chunks that no rank stages and that are always ready.  Otherwise an older
// credit could overwrite a later one, and its waiter would wait forever.
bool Pull::has_step(i32 chunk) const {
    if (chunk < ring_) return true;
    return load_acquire(at<const u64>(c_.a.ctx, c_.r.me, credit_of(chunk))) == word_signal(c_.r.tag, static_cast<u32>(chunk - ring_));
}

bool Pull::ready(Chunk& chunk) {
    for (i32 index = chunk.awaited.first(); index >= 0; index = chunk.awaited.first()) {
        const i32 p = c_.r.first + index;
        if (c_.r.header(p).combine.rows == 0 && !has_tag(flag(p, chunk.number), c_.r.tag)) return false;
        chunk.awaited.remove(index);
    }
    return has_step(chunk.number) && scaleout_ready(chunk.number);
}

bool Pull::any_ready() {
    for (size_t i = first_; i < horizon(); ++i)
        if (!chunks_[i].pulled && ready(chunks_[i])) return true;
    return false;
}

void Pull::look_at_last(PeerWaits& waits) const {
    for (i32 p = c_.r.first; p < c_.r.first + c_.r.scaleup_ranks; ++p)
        if (const i32 last = last_[p - c_.r.first]; last >= 0)
            waits.look(p, c_.r.header(p).combine.rows != 0 || has_tag(flag(p, last), c_.r.tag));
}

Missing Pull::missing() const {
    const Chunk& chunk = chunks_[first_];
    const i32 index = chunk.awaited.first();
    if (index < 0 && !has_step(chunk.number)) return {c_.r.me, at<const u64>(c_.a.ctx, c_.r.me, credit_of(chunk.number)), c_.r.tag};
    if (index < 0) return scaleout_missing(chunk.number);
    const i32 p = c_.r.first + index;
    return {p, flag(p, chunk.number), c_.r.tag};
}

void Pull::pull_in_order() {
    for (; first_ < chunks_.size() && (chunks_[first_].pulled || ready(chunks_[first_])); ++first_)
        if (!chunks_[first_].pulled) pull(chunks_[first_]);
}

bool Pull::pull_ready() {
    bool any = false;
    for (size_t i = first_; i < horizon(); ++i) {
        if (chunks_[i].pulled || !ready(chunks_[i])) continue;
        pull(chunks_[i]);
        any = true;
    }
    while (first_ < chunks_.size() && chunks_[first_].pulled) ++first_;
    return any;
}

void Pull::pull(Chunk& chunk) {
    for (i32 token = first_token(chunk.number); token < end_token(chunk.number); ++token) pull_token(token);
    chunk.pulled = true;
    pass_on(chunk.number);
    if (followed(chunk.number)) grant_credit(chunk.number);
}

// Signal every rank of this domain, with release, that the chunk's place in the staging ring is free.
void Pull::grant_credit(i32 chunk) const {
    for (i32 step = 0; step < c_.r.scaleup_ranks; ++step)
        store_release(at<u64>(c_.a.ctx, c_.r.neighbor(step), credit_of(chunk)), word_signal(c_.r.tag, static_cast<u32>(chunk)));
}

}  // namespace moecomm::host
