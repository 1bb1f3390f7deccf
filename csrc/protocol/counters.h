// Counters of a rank: rounds, rows and bytes, and time spent waiting, by peer. They are u64 words in the rank's own window, which only this
// rank writes, with relaxed atomic adds; moecomm/observe/stats reads them. They never decrease, except that Buffer.reset_stats() makes them
// 0.
#pragma once
#include "layout.h"

namespace moecomm {

// Counters with a word for each peer, in the order of their words. Waits are in ns of this rank's clock: the time from this rank's first
// vain look at the peer's word to its arrival, or to the end of a round that fails. A word that is there at the first look costs nothing
// and counts nothing. A rank does not wait for itself.
enum class Counter : i32 {
    rows_from = 0,   // rows that arrived from the peer: one for each of its tokens with an expert here
    rows_to = 1,     // rows that this rank sent to the peer
    bytes_from = 2,  // of these rows, with scales
    bytes_to = 3,
    wait_header = 4,    // for the peer's round header: it comes late to a round
    wait_dispatch = 5,  // for the signal of the peer's last chunk in a dispatch: its rows come late
    wait_combine = 6,   // for the peer's rows in a combine
    expert_rows = 7,    // by local expert: rows, without padding. Last, because its words are as many as a rank has experts
};

MOECOMM_BOTH constexpr u64 rounds_counter_at(const WindowLayout& w) { return w.counters; }
MOECOMM_BOTH constexpr u64 dropped_counter_at(const WindowLayout& w) { return w.counters + sizeof(u64); }  // entries of overflow="drop"
MOECOMM_BOTH constexpr u64 counter_at(const WindowLayout& w, const Shape& s, Counter which, i32 index) {
    return w.counters + (kScalarCounters + static_cast<u64>(which) * s.ranks + index) * sizeof(u64);
}

}  // namespace moecomm
