// Three ranks for the rounds that fail, and what is asked of them afterwards.
#pragma once
#include <string>
#include <vector>

#include "compare.h"
#include "protocol/record.h"

namespace moecomm::test {

constexpr i32 kRanks = 3;
constexpr i32 kTokens = 40;          // at most, of a rank
constexpr u64 kShort = 150'000'000;  // ns: of a wait that shall expire
extern u64 patience;                 // ns: of one that shall not
extern i32 neighbors;                // Shape::domain_ranks: 0, or 1, and each rank is a domain

// A dispatch of `layout` with tokens on every rank, and a combine of it.
struct Fixture {
    explicit Fixture(Layout layout, u64 timeout_ns = patience);

    static Scenario find(Layout layout);
    void dispatch_all();
    // Both rounds as they are meant to be, now that nothing is wrong any more.
    std::string go_on();
    State& state(i32 rank) { return *reinterpret_cast<State*>(cluster.base(rank) + cluster.window.state); }
    u64& word(i32 rank, u64 offset) { return *reinterpret_cast<u64*>(cluster.base(rank) + offset); }

    Scenario scenario;
    Cluster cluster;
    std::vector<DispatchArgs> dispatches;  // by rank
    std::vector<CombineArgs> combines;
};

// The fields of a record that a case is about; kAny for what does not matter.
constexpr i64 kAny = -2;
struct Want {
    Failure code;
    Op op;
    Phase phase;
    i32 peer;
    u32 round;
    Argument argument = Argument::none;
    i64 expected = kAny, seen = kAny;
};

// Each of these says what is wrong, or "".
std::string check_record(const FailureRecord& record, const Want& want, i32 rank);
// Every rank has been told that it and `other` differ: `want` is what those who are alike hear.
std::string check_failure(Fixture& f, i32 other, const Want& want);
// A wait of kShort ended in time.
std::string check_waited(const FailureRecord& record);
// Nothing arrived, nothing was written, and the round counts.
std::string check_invalid(Fixture& fixture, i32 rank);
// Every rank has the record, the round was void, and the next one works.
std::string check_invalid_everywhere(Fixture& fixture, const Want& want);

}  // namespace moecomm::test
