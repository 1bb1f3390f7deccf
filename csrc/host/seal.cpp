#include "seal.h"

#include <cstring>

#include "../protocol/signal.h"
#include "../protocol/stand_ins.h"
#include "window.h"

namespace moecomm::host {

namespace {

class Digest {
  public:
    explicit Digest(u64 key) : state_(key ^ 0x9e3779b97f4a7c15ull) {}

    void add(const void* words, i64 count) {
        const u8* at = static_cast<const u8*>(words);
        for (; count > 1; count -= 2, at += sizeof(u64)) mix(load<u64>(at));
        if (count > 0) mix(load<u32>(at));
    }
    u64 value() const { return state_ ^ state_ >> 32; }

  private:
    template <class Word>
    static Word load(const u8* at) {
        Word word;
        std::memcpy(&word, at, sizeof(word));
        return word;
    }
    void mix(u64 word) { state_ = ((state_ << 29 | state_ >> 35) ^ word) * 0xd6e8feb86659fd93ull; }

    u64 state_;
};

// Reads everything that a round reads of the tables, in such an order that no number is used as an index before it has been checked.
class Reader {
  public:
    explicit Reader(const Sealed& tables)
        : t_(tables), s_(tables.ctx.shape), sent_(memory<const SourceTokens>(t_.route.sent)), digest_(t_.route.key) {}

    // Return false if a number is out of range.
    bool read() {
        if (!read_sent()) return false;
        const i64 entries = static_cast<i64>(t_.num_tokens) * s_.topk;
        digest_.add(memory<const i32>(t_.route.token_rows), entries);
        digest_.add(memory<const i32>(t_.route.token_owner), entries);
        digest_.add(memory<const i32>(t_.route.token_slot), static_cast<i64>(t_.num_tokens) * s_.ranks);
        for (i32 source = 0; source < s_.ranks; ++source)
            if (!read_arrived(source)) return false;
        read_forwarded();
        return true;
    }
    u64 digest() const { return digest_.value(); }

  private:
    bool read_sent() {
        for (i32 p = 0; p < s_.ranks; ++p) {
            const i32 tokens = sent_[p].num_tokens, chunk = sent_[p].chunk_tokens;
            if (tokens < 0 || tokens > s_.max_tokens || chunk < 1 || chunk > kMaxChunk || (chunk & (chunk - 1)) != 0) return false;
        }
        digest_.add(sent_, 2ll * s_.ranks);
        return true;
    }

    bool read_arrived(i32 source) {
        const u32* ranges = memory<const u32>(t_.route.ranges) + static_cast<i64>(source) * s_.max_tokens;
        const i32 chunks = ceil_div(sent_[source].num_tokens, sent_[source].chunk_tokens);
        const i64 slots = flat() ? t_.route.max_rows : static_cast<i64>(s_.ranks) * s_.max_tokens;
        digest_.add(ranges, chunks);
        for (i32 chunk = 0; chunk < chunks; ++chunk) {
            const i64 first = signal_first(ranges[chunk]), count = signal_count(ranges[chunk]);
            if (count > sent_[source].chunk_tokens || (count > 0 && first + count > slots)) return false;
            if (flat()) {
                read_source(first, count);
                continue;
            }
            for (i64 slot = first; slot < first + count; ++slot)
                if (!read_rows(slot)) return false;
        }
        return true;
    }

    // Read the rows of a token on this rank; at least one must exist.
    bool read_rows(i64 slot) {
        const i32* rows = memory<const i32>(t_.route.rows) + slot * s_.topk;
        bool any = false;
        digest_.add(rows, s_.topk);
        for (i32 k = 0; k < s_.topk; ++k) {
            if (rows[k] >= t_.route.max_rows || rows[k] < -1) return false;
            if (rows[k] < 0) continue;
            any = true;
            read_source(rows[k], 1);
        }
        return any;
    }

    void read_source(i64 row, i64 count) { digest_.add(memory<const i32>(t_.route.src) + 2 * row, 2 * count); }

    void read_forwarded() {
        const i32 me = t_.ctx.rank, here = domain_of(s_, me);
        const Mask& mask = *at<const Mask>(t_.ctx, me, mask_at(t_.ctx.window));
        for (i32 source = 0; source < s_.ranks; ++source) {
            const i32 tokens = sent_[source].num_tokens;
            if (domain_of(s_, source) == here || goes_direct(s_, tokens)) continue;
            if (stand_in(s_, mask.ranks, forwarder_of(s_, source, here)).rank != me) continue;
            const i64 words = forwarded_words(s_);
            digest_.add(memory<const i32>(t_.route.forwarded) + source * s_.max_tokens * words, tokens * words);
        }
    }

    bool flat() const { return t_.layout == static_cast<i32>(Layout::flat); }

    const Sealed& t_;
    const Shape& s_;
    const SourceTokens* const sent_;
    Digest digest_;
};

}  // namespace

void seal(const Sealed& tables) {
    Reader reader(tables);
    if (reader.read()) seal_of(tables.route, tables.ctx.shape.ranks) = reader.digest();
}

bool is_intact(const Sealed& tables) {
    Reader reader(tables);
    return reader.read() && seal_of(tables.route, tables.ctx.shape.ranks) == reader.digest();
}

}  // namespace moecomm::host
