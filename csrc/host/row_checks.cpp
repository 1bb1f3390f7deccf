#include "row_checks.h"

#include <algorithm>
#include <cstring>

#include "../protocol/domains.h"
#include "../protocol/order.h"
#include "../protocol/signal.h"

namespace moecomm::host {

namespace {

// Bijective in `hash` and in `word`, so that a change of one word is never lost.
u64 mix(u64 hash, u64 word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    return hash ^ hash >> 32;
}

i64 entries(const Shape& shape) { return (domains(shape) > 1 ? 2ll : 1ll) * shape.ranks * shape.max_tokens; }

}  // namespace

u64 hash_row(const u8* row, i64 bytes, u64 seed) {
    constexpr i32 kChains = 4;  // independent, because a multiplication takes several cycles
    u64 chain[kChains] = {seed + 1, seed + 2, seed + 3, seed + 4};
    i64 at = 0;
    for (; at + kChains * 8 <= bytes; at += kChains * 8) {
        u64 words[kChains];
        std::memcpy(words, row + at, sizeof(words));
        for (i32 i = 0; i < kChains; ++i) chain[i] = mix(chain[i], words[i]);
    }
    for (; at < bytes; at += 8) {
        u64 word = 0;
        std::memcpy(&word, row + at, std::min<i64>(8, bytes - at));
        chain[0] = mix(chain[0], word);
    }
    u64 hash = mix(static_cast<u64>(bytes), chain[0]);
    for (i32 i = 1; i < kChains; ++i) hash = mix(hash, chain[i]);
    return hash;
}

u64 RowChecks::table_bytes(const Shape& shape) { return 2 * entries(shape) * sizeof(u64); }

i32 RowChecks::sums_of(i32 source_rank) const { return shape_.ranks + source_rank; }

u64* RowChecks::entry(i32 rank, u32 tag, i32 rows, i32 token) const {
    const i64 table = round_parity(tag) * entries(shape_);
    return reinterpret_cast<u64*>(tables_[rank]) + table + static_cast<i64>(rows) * shape_.max_tokens + token;
}

void RowChecks::sent(u32 tag, i32 rows, i32 token, u64 hash) { store_relaxed(entry(rank_, tag, rows, token), hash); }

void RowChecks::compare(u32 tag, i32 rows, const CorruptRow& row, u64 hash) {
    if (load_relaxed(entry(row.from, tag, rows, row.token)) == hash) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!first_) first_ = row;
}

std::optional<CorruptRow> RowChecks::take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(first_, std::nullopt);
}

void RowChecks::flip_later(const CorruptRow& row, i64 bit) { flip_ = {row, bit}; }

void RowChecks::flip_now(const CorruptRow& row, const u8* bytes, i64 n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!flip_ || flip_->row.from != row.from || flip_->row.source_rank != row.source_rank || flip_->row.token != row.token) return;
    const i64 bit = flip_->bit % (8 * n);
    const_cast<u8*>(bytes)[bit / 8] ^= static_cast<u8>(1u << bit % 8);
    flip_.reset();
}

}  // namespace moecomm::host
