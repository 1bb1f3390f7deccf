// Visits every interleaving of ranks at their accesses to words that several of them access.
//
// A state is where each rank is, what it has written so far, and read last of each word, and what the words hold.  A rank's program is
// deterministic, so that is all there is to it, if ordinary accesses race nowhere: ThreadSanitizer, to which ranks are threads, watches for
// that.  The search is depth first.  It runs the ranks again from the start for each way to a state that is new, and looks for no further
// states behind one that it has seen; but each run goes on to its end, where its results are checked.
#pragma once
#include <ucontext.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hooks.h"

namespace moecomm::test {

struct Region {
    const void* base;
    unsigned long long bytes;
};

class Explorer {
  public:
    using Word = unsigned long long;  // the number of a region, and an offset there: the same in every run

    struct Case {
        std::function<std::vector<Region>()> prepare;  // before a run: the windows, one of each rank
        std::function<void(int)> body;                 // of a rank
        std::function<std::string()> check;            // after a run: what is wrong, or ""
    };

    Explorer(int ranks, Case known, size_t most_states);
    Explorer(const Explorer&) = delete;
    Explorer& operator=(const Explorer&) = delete;

    // Return what is wrong in the first run that fails, or "".
    std::string explore();
    size_t states() const { return visited_.size(); }
    size_t runs() const { return runs_; }

    void arrive(Access access, const void* p, unsigned bytes, Word value, Word expected);
    // Called when the current rank begins to look whether it can go on, and when it has looked in vain.
    void begin_poll();
    void wait_for_news();

  private:
    struct Next {
        Access access = Access::begin;
        Word word = 0, value = 0, expected = 0;
        const void* p = nullptr;
        unsigned bytes = 0;
        Word place = 0;
    };
    struct Seen {
        const void* p;
        unsigned bytes;
        Word value;
    };
    struct Past {
        Word written = 0;  // all that it has written
        Word read = 0;     // the last value of each word that it has read, and how often it has found another
        Word place = 0;    // the calls that it is in, and its last word
    };
    struct Known {
        Word value;
        unsigned changes;
    };
    struct Rank {
        ucontext_t context;
        void* thread = nullptr;  // as ThreadSanitizer knows it
        std::vector<char> stack;
        Next next;
        Past past;
        std::unordered_map<Word, Known> known;  // what it has last seen in a word, or written there
        std::vector<Seen> polled;               // since a poll has begun
        bool waits = false;                     // for one of these words to change
        bool done = false;
    };
    struct Way {
        int rank;
        Word state;  // after the next access of this rank
    };
    struct Choice {
        Way chosen;
        std::vector<Way> others;
    };

    void run();
    void begin(int rank);
    static void entry(int rank);
    void go_on();  // with the rank whose turn it is
    void switch_from(int rank);
    int choose();
    bool backtrack();
    static bool able(const Rank& rank);
    Word state_after(int rank) const;
    Word word_of(const void* p) const;
    Past past_after(const Rank& rank) const;
    static Word place_on(const Rank& rank);
    static Word held_after(const Next& next, Word held);

    const int count_;
    const Case case_;
    const size_t most_states_;
    std::vector<Region> regions_;
    std::vector<Rank> ranks_;
    ucontext_t home_;
    void* home_thread_ = nullptr;
    int current_ = -1;
    Word memory_ = 0;
    size_t runs_ = 0, depth_ = 0;
    bool seen_ = false, stuck_ = false, differs_ = false, grown_ = false;
    std::vector<Choice> path_;
    std::unordered_set<Word> visited_;
    std::unordered_map<Word, unsigned> users_;  // ranks that access a word, one bit each
    std::unordered_map<Word, Word> initial_;    // what words held when the run began
};

}  // namespace moecomm::test
