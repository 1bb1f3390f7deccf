#include "explorer.h"

// ThreadSanitizer's interface for programs that switch stacks; absent without it.
extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* p);
__attribute__((weak)) void __tsan_release(void* p);
__attribute__((weak)) void __tsan_ignore_thread_begin();
__attribute__((weak)) void __tsan_ignore_thread_end();
}

namespace moecomm::test {

namespace {

constexpr size_t kStackBytes = 1 << 20;
constexpr unsigned kWithoutOrder = 1;  // a switch orders nothing

Explorer* exploring = nullptr;

Explorer::Word mixed(Explorer::Word a, Explorer::Word b) {
    Explorer::Word z = (a ^ (b + 0x9e3779b97f4a7c15ull + (a << 6))) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 29)) * 0x94d049bb133111ebull;
    return z ^ (z >> 32);
}

Explorer::Word held(const void* p, unsigned bytes) {
    Explorer::Word value = 0;
    std::memcpy(&value, p, bytes);
    return value;
}

void switch_to(void* thread) {
    if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(thread, kWithoutOrder);
}

// Order between runs and the ranks in them: what one side did before release() comes before what the other does after acquire().
void release(void* p) {
    if (__tsan_release != nullptr) __tsan_release(p);
}
void acquire(void* p) {
    if (__tsan_acquire != nullptr) __tsan_acquire(p);
}

// While one lives, nothing that this rank does counts as an access: the explorer is no part of the program.
struct Unwatched {
    Unwatched() {
        if (__tsan_ignore_thread_begin != nullptr) __tsan_ignore_thread_begin();
    }
    ~Unwatched() {
        if (__tsan_ignore_thread_end != nullptr) __tsan_ignore_thread_end();
    }
};

}  // namespace

void arrive(Access access, const void* word, unsigned bytes, unsigned long long value, unsigned long long expected) {
    if (exploring != nullptr) exploring->arrive(access, word, bytes, value, expected);
}

Explorer::Explorer(int ranks, Case known, size_t most_states)
    : count_(ranks), case_(std::move(known)), most_states_(most_states), ranks_(ranks) {
    for (Rank& rank : ranks_) rank.stack.resize(kStackBytes);
    if (__tsan_get_current_fiber != nullptr) home_thread_ = __tsan_get_current_fiber();
}

std::string Explorer::explore() {
    do {
        run();
        if (differs_) return "a rank has not done the same in two runs";
        if (stuck_) return "all ranks wait";
        if (std::string problem = case_.check(); !problem.empty()) return problem;
        if (visited_.size() > most_states_) return "more than " + std::to_string(most_states_) + " states";
        if (grown_) {  // a word turned out to be shared: what is known of states is void
            visited_.clear();
            path_.clear();
        }
    } while (grown_ || backtrack());
    return "";
}

void Explorer::run() {
    regions_ = case_.prepare();
    memory_ = 0;
    initial_.clear();
    depth_ = 0;
    seen_ = stuck_ = differs_ = grown_ = false;
    ++runs_;
    release(this);
    for (int rank = 0; rank < count_; ++rank) begin(rank);
    exploring = this;
    current_ = choose();
    switch_to(ranks_[current_].thread);
    swapcontext(&home_, &ranks_[current_].context);
    exploring = nullptr;
    acquire(this);
    for (Rank& rank : ranks_)
        if (__tsan_destroy_fiber != nullptr) __tsan_destroy_fiber(rank.thread);
}

void Explorer::begin(int number) {
    Rank& rank = ranks_[number];
    rank.next = {};
    rank.past = {};
    rank.polled.clear();
    rank.known.clear();
    rank.waits = rank.done = false;
    if (__tsan_create_fiber != nullptr) rank.thread = __tsan_create_fiber(0);
    getcontext(&rank.context);
    rank.context.uc_stack.ss_sp = rank.stack.data();
    rank.context.uc_stack.ss_size = rank.stack.size();
    rank.context.uc_link = nullptr;
    makecontext(&rank.context, reinterpret_cast<void (*)()>(entry), 1, number);
}

void Explorer::entry(int rank) {
    Explorer& self = *exploring;
    acquire(&self);
    self.ranks_[rank].past = self.past_after(self.ranks_[rank]);
    self.case_.body(rank);
    release(&self);
    {
        const Unwatched now;
        self.ranks_[rank].done = true;
        self.current_ = self.choose();
    }
    self.switch_from(rank);
}

void Explorer::arrive(Access access, const void* p, unsigned bytes, Word value, Word expected) {
    const Unwatched now;
    const Word word = word_of(p);
    if (word == 0) return;
    Rank& rank = ranks_[current_];
    unsigned& users = users_[word];
    const bool was_shared = (users & (users - 1)) != 0;
    users |= 1u << current_;
    const bool shared = (users & (users - 1)) != 0;
    grown_ |= shared && !was_shared;
    rank.next = {access, word, value, expected, p, bytes, place_on(rank)};
    initial_.emplace(word, held(p, bytes));
    if (shared) {
        go_on();
        const Word before = held(p, bytes), after = held_after(rank.next, before);
        rank.past = past_after(rank);
        Known& known = rank.known.try_emplace(word, Known{initial_.at(word), 0}).first->second;
        known = {after, known.changes + (before != known.value)};
        memory_ ^= mixed(word, before) ^ mixed(word, after);
    }
    if (access == Access::load) rank.polled.push_back({p, bytes, held(p, bytes)});
}

void Explorer::begin_poll() { ranks_[current_].polled.clear(); }

void Explorer::wait_for_news() {
    const Unwatched now;
    Rank& rank = ranks_[current_];
    rank.next = {Access::poll_again, 0, 0, 0, nullptr, 0, place_on(rank)};
    rank.waits = true;
    go_on();
    rank.waits = false;
    rank.past = past_after(rank);
}

// Called on the stack of the current rank.  Returns when the rank is chosen again.
void Explorer::go_on() {
    const int from = current_;
    current_ = choose();
    if (current_ != from) switch_from(from);
}

void Explorer::switch_from(int rank) {
    const bool over = current_ < 0;
    switch_to(over ? home_thread_ : ranks_[current_].thread);
    swapcontext(&ranks_[rank].context, over ? &home_ : &ranks_[current_].context);
}

// Return the rank whose turn it is, or -1 at the end of a run.
int Explorer::choose() {
    std::vector<int> ready;
    bool done = true;
    for (int rank = 0; rank < count_; ++rank) {
        done &= ranks_[rank].done;
        if (able(ranks_[rank])) ready.push_back(rank);
    }
    stuck_ = ready.empty() && !done;
    if (ready.empty()) return -1;
    if (depth_ < path_.size()) {
        const Way& way = path_[depth_++].chosen;
        differs_ = !able(ranks_[way.rank]) || state_after(way.rank) != way.state;
        return differs_ ? -1 : way.rank;
    }
    if (seen_) return ready[0];
    Choice choice{{-1, 0}, {}};
    for (const int rank : ready)
        if (const Word state = state_after(rank); visited_.count(state) == 0) choice.others.push_back({rank, state});
    seen_ = choice.others.empty();  // the run goes on to its end, where it is checked, but finds nothing new
    if (seen_) return ready[0];
    choice.chosen = choice.others.back();
    visited_.insert(choice.chosen.state);
    choice.others.pop_back();
    path_.push_back(std::move(choice));
    ++depth_;
    return path_.back().chosen.rank;
}

// Take the last choice that has another way to a state that is new.  Return false if there is none.
bool Explorer::backtrack() {
    for (; !path_.empty(); path_.pop_back()) {
        Choice& last = path_.back();
        while (!last.others.empty()) {
            last.chosen = last.others.back();
            last.others.pop_back();
            if (visited_.insert(last.chosen.state).second) return true;
        }
    }
    return false;
}

bool Explorer::able(const Rank& rank) {
    if (rank.done || !rank.waits) return !rank.done;
    return std::any_of(rank.polled.begin(), rank.polled.end(), [](const Seen& one) { return held(one.p, one.bytes) != one.value; });
}

Explorer::Word Explorer::state_after(int number) const {
    const Next& next = ranks_[number].next;
    Word state = memory_;
    if (next.p != nullptr) {
        const Word before = held(next.p, next.bytes);
        state ^= mixed(next.word, before) ^ mixed(next.word, held_after(next, before));
    }
    for (int rank = 0; rank < count_; ++rank) {
        const Past past = rank == number ? past_after(ranks_[rank]) : ranks_[rank].past;
        state = mixed(mixed(mixed(state, past.written), past.read), past.place);
    }
    return state;
}

Explorer::Past Explorer::past_after(const Rank& rank) const {
    const Next& next = rank.next;
    Past past = rank.past;
    past.place = mixed(next.place, next.word);
    if (next.p == nullptr) return past;
    const Word before = held(next.p, next.bytes), after = held_after(next, before);
    const auto found = rank.known.find(next.word);
    const Known known = found != rank.known.end() ? found->second : Known{initial_.at(next.word), 0};
    const bool is_news = before != known.value;
    if (next.access != Access::load) past.written = mixed(past.written, mixed(next.word, mixed(before, after)));
    if (is_news) past.read ^= mixed(next.word, mixed(known.value, known.changes)) ^ mixed(next.word, mixed(before, known.changes + 1));
    return past;
}

Explorer::Word Explorer::held_after(const Next& next, Word held) {
    if (next.access == Access::store) return next.value;
    if (next.access == Access::compare_exchange) return held == next.expected ? next.value : held;
    return next.access == Access::add ? held + next.value : held;
}

// The calls that the rank is in.  Inlined into the call that asks; frames have pointers to each other: -fno-omit-frame-pointer.
Explorer::Word Explorer::place_on(const Rank& rank) {
    const char *const begin = rank.stack.data(), *const end = begin + rank.stack.size();
    Word place = 1;
    for (auto frame = static_cast<const char*>(__builtin_frame_address(0)); frame >= begin && frame + 16 <= end;) {
        const char* words[2];  // the frame of the caller, and where it goes on
        std::memcpy(words, frame, sizeof(words));
        place = mixed(place, reinterpret_cast<Word>(words[1]));
        if (words[0] <= frame) break;
        frame = words[0];
    }
    return place;
}

// 0: not in a window.
Explorer::Word Explorer::word_of(const void* p) const {
    for (size_t i = 0; i < regions_.size(); ++i) {
        const auto offset = static_cast<Word>(static_cast<const char*>(p) - static_cast<const char*>(regions_[i].base));
        if (offset < regions_[i].bytes) return (i + 1) << 48 | offset;
    }
    return 0;
}

}  // namespace moecomm::test

// In place of csrc/host/clock.cpp: time stands still, so no wait ends by its deadline, and a rank that polls in vain sleeps until one of
// the words that it has seen changes.
namespace moecomm {

unsigned long long now_ns() {
    if (test::exploring != nullptr) test::exploring->begin_poll();
    return 0;
}
void back_off(unsigned) {
    if (test::exploring != nullptr) test::exploring->wait_for_news();
}

}  // namespace moecomm
