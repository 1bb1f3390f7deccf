#include "choose.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace moecomm::host {

namespace {

// By expert that callers name: its candidates, slots of different ranks, ascending.
using Candidates = std::vector<std::vector<i32>>;
Candidates candidates_of(const Placement& placement) {
    const u32* const words = reinterpret_cast<const u32*>(&placement + 1);
    Candidates found(placement.experts);
    for (i32 expert = 0; expert < placement.experts; ++expert) {
        const u32 count = words[expert] % kMostReplicas, at = words[expert] / kMostReplicas;
        if (count == 1) found[expert] = {static_cast<i32>(at)};
        if (count > 1) found[expert].assign(words + at, words + at + count);
    }
    return found;
}

// The shares of candidates, as moecomm/base/replicas.py computes them.
class Shares {
  public:
    Shares(const Candidates& candidates, const std::vector<i32>& totals, const ExpertRanges& ranges, i32 ranks)
        : ranges_(ranges), totals_(totals), loads_(ranks, 0), found_(candidates.size()), owners_(candidates.size()) {
        std::vector<i32> several;
        for (i32 expert = 0; expert < experts(); ++expert) {
            const i32 count = static_cast<i32>(candidates[expert].size());
            for (i32 i = 0; i < count; ++i) {
                owners_[expert].push_back(ranges_.owner(candidates[expert][i]));
                found_[expert].push_back(totals[expert] / count + (i < totals[expert] % count));
            }
            add(expert, 1);
            if (count > 1) several.push_back(expert);
        }
        for (i32 pass = 0; pass < kSharePasses; ++pass)
            for (const i32 expert : several) pour_anew(expert);
    }
    i32 experts() const { return static_cast<i32>(owners_.size()); }
    i32 owner(i32 expert, i32 nth) const { return owners_[expert][nth]; }
    i32 of(i32 expert, i32 nth) const { return found_[expert][nth]; }
    const std::vector<i64>& loads() const { return loads_; }
    // The share of a candidate on a rank; -1: there is none.
    i32 on(i32 expert, i32 rank) const {
        const auto found = std::lower_bound(owners_[expert].begin(), owners_[expert].end(), rank);
        return found == owners_[expert].end() || *found != rank ? -1 : found_[expert][found - owners_[expert].begin()];
    }
    // Give an expert a candidate on one more rank, and pour its entries anew.
    void add_candidate(i32 expert, i32 rank) {
        const auto place = std::lower_bound(owners_[expert].begin(), owners_[expert].end(), rank);
        found_[expert].insert(found_[expert].begin() + (place - owners_[expert].begin()), 0);
        owners_[expert].insert(place, rank);
        pour_anew(expert);
    }

  private:
    void add(i32 expert, i64 sign) {
        for (std::size_t i = 0; i < owners_[expert].size(); ++i) loads_[owners_[expert][i]] += sign * found_[expert][i];
    }
    void pour_anew(i32 expert) {
        add(expert, -1);
        pour(totals_[expert], owners_[expert], found_[expert]);
        add(expert, 1);
    }
    void pour(i64 entries, const std::vector<i32>& owners, std::vector<i32>& found) const {
        std::vector<i32> filled(owners.size());
        std::iota(filled.begin(), filled.end(), 0);
        for (;;) {
            i64 sum = entries;
            for (const i32 i : filled) sum += loads_[owners[i]];
            const i64 n = static_cast<i64>(filled.size()), level = sum / n;
            const auto over = [&](i32 i) { return loads_[owners[i]] > level; };
            if (std::none_of(filled.begin(), filled.end(), over)) {
                std::fill(found.begin(), found.end(), 0);
                for (i64 nth = 0; nth < n; ++nth)
                    found[filled[nth]] = static_cast<i32>(level - loads_[owners[filled[nth]]] + (nth < sum % n));
                return;
            }
            filled.erase(std::remove_if(filled.begin(), filled.end(), over), filled.end());
        }
    }

    const ExpertRanges& ranges_;
    const std::vector<i32>& totals_;
    std::vector<i64> loads_;
    std::vector<std::vector<i32>> found_, owners_;
};

// Choose experts to copy to empty slots, as copies() of moecomm/base/replicas.py. The slots become candidates, and the window's table says
// of which slots they are copies: the first of an expert.
void choose_copies(Dispatch& d, const std::vector<i32>& totals, const ExpertRanges& ranges, Candidates& candidates) {
    const Placement& placement = d.r.placement;
    const i32 ranks = d.r.ranks, slots = d.a.ctx.shape.slots;
    i32* const copied = at<i32>(d.a.ctx, d.r.me, copied_at(d.a.ctx.window, d.a.ctx.shape));
    std::fill(copied, copied + slots, -1);
    Shares shares(candidates, totals, ranges, ranks);
    std::vector<std::vector<i32>> empty(ranks);  // by rank; the next one is the last
    const u32* const list = reinterpret_cast<const u32*>(&placement + 1) + placement.empty;
    for (u32 i = list[0]; i > 0; --i) empty[ranges.owner(static_cast<i32>(list[i]))].push_back(static_cast<i32>(list[i]));
    std::vector<bool> holds(ranks, false);
    std::vector<i32> source(placement.experts, -1);
    for (i32 expert = 0; expert < placement.experts; ++expert) {
        for (const i32 slot : candidates[expert]) holds[ranges.owner(slot)] = true;
        if (!candidates[expert].empty()) source[expert] = candidates[expert].front();
    }
    const i64 least = std::max<i64>(1, std::accumulate(totals.begin(), totals.end(), i64{0}) / (ranks * kCopyPart));
    for (;;) {
        const std::vector<i64>& loads = shares.loads();
        const i32 busiest = static_cast<i32>(std::max_element(loads.begin(), loads.end()) - loads.begin());
        i32 idlest = -1, best = -1, most = 0;
        for (i32 rank = 0; rank < ranks; ++rank)
            if (holds[rank] && !empty[rank].empty() && (idlest < 0 || loads[rank] < loads[idlest])) idlest = rank;
        if (idlest < 0) return;
        for (i32 expert = 0; expert < placement.experts; ++expert)
            if (const i32 share = shares.on(expert, busiest); share > most && shares.on(expert, idlest) < 0) best = expert, most = share;
        if (std::min<i64>(most, (loads[busiest] - loads[idlest]) / 2) < least) return;
        const i32 slot = empty[idlest].back();
        empty[idlest].pop_back();
        copied[slot] = source[best];
        shares.add_candidate(best, idlest);
        candidates[best].insert(std::lower_bound(candidates[best].begin(), candidates[best].end(), slot), slot);
    }
}

// Send what this rank has for each expert, and take the counts of all ranks: i32[ranks][experts].  False if a wait has failed, or a peer
// makes another call.
bool exchange(Dispatch& d, const std::vector<i32>& mine, std::vector<i32>& all) {
    const i32 experts = static_cast<i32>(mine.size());
    const auto words = [&](i32 window, i32 from) {
        return at<u64>(d.a.ctx, window, choice_words_at(d.a.ctx.window, d.a.ctx.shape, d.r.tag, from));
    };
    for (i32 step = 0; step < d.r.ranks; ++step) {
        const i32 peer = d.r.peer(step);
        for (i32 expert = 0; expert < experts && !d.r.masked(peer); ++expert)
            store_release(&words(peer, d.r.me)[expert], word_signal(d.r.tag, static_cast<u32>(mine[expert])));
    }
    i32 from = 0, expert = 0;
    bool differs = false;
    const auto all_in = [&] {
        for (; from < d.r.ranks; ++from, expert = 0)
            for (; expert < experts && !d.r.masked(from); ++expert) {
                const u64 word = load_acquire(&words(d.r.me, from)[expert]);
                if (signal_tag(word) != d.r.tag) return differs = d.r.calls_otherwise(from, d.a.call);
                all[from * experts + expert] = static_cast<i32>(signal_word(word));
            }
        return true;
    };
    const bool in_time = d.r.watch.until(Phase::header, all_in, [&] { return Missing{from, &words(d.r.me, from)[expert], d.r.tag}; });
    return in_time && !differs;
}

}  // namespace

bool choose_replicas(Dispatch& d) {
    const Timed timed = d.r.watch.timed("choose");
    const Placement& placement = d.r.placement;
    const i32 experts = placement.experts, me = d.r.me;
    const i64 entries = static_cast<i64>(d.a.num_tokens) * d.topk;
    std::vector<i32> mine(experts, 0), all(static_cast<std::size_t>(d.r.ranks) * experts, 0);
    for (i64 entry = 0; entry < entries; ++entry)
        if (const i64 id = d.plan.read_id(entry); id >= 0 && id < experts) ++mine[id];
    i32* const chosen = at<i32>(d.a.ctx, me, chosen_at(d.a.ctx.window));
    if (!exchange(d, mine, all)) {
        std::fill(chosen, chosen + entries, -1);
        return !d.r.watch.failed();
    }
    const auto count = [&](i32 rank, i32 expert) { return all[rank * experts + expert]; };
    std::vector<i32> totals(experts, 0);
    for (std::size_t i = 0; i < all.size(); ++i) totals[i % experts] += all[i];
    const ExpertRanges ranges = expert_ranges(d.a.ctx.shape);
    Candidates candidates = candidates_of(placement);
    if (d.a.ctx.placed == kReplicated) choose_copies(d, totals, ranges, candidates);
    const Shares shares(candidates, totals, ranges, d.r.ranks);
    // By expert, the candidates that this rank's entries take in turn, and how many each.
    struct Take {
        i32 slot, count;
    };
    std::vector<std::vector<Take>> takes(experts);
    for (i32 expert = 0; expert < experts; ++expert) {
        const std::vector<i32>& one = candidates[expert];
        const i32 n = static_cast<i32>(one.size());
        std::vector<i32> kept(d.r.ranks, 0);
        for (i32 i = 0; i < n; ++i) kept[shares.owner(expert, i)] = std::min(shares.of(expert, i), count(shares.owner(expert, i), expert));
        i32 first = 0;
        for (i32 source = 0; source < me; ++source) first += count(source, expert) - kept[source];
        const i32 last = first + count(me, expert) - kept[me];
        for (i32 i = 0; i < n; ++i)
            if (shares.owner(expert, i) == me) takes[expert].push_back({one[i], kept[me]});
        for (i32 i = 0, begin = 0, end = 0; i < n; ++i, begin = end) {
            end += shares.of(expert, i) - kept[shares.owner(expert, i)];
            takes[expert].push_back({one[i], std::max(0, std::min(end, last) - std::max(begin, first))});
        }
        std::reverse(takes[expert].begin(), takes[expert].end());  // the next one is the last
    }
    for (i64 entry = 0; entry < entries; ++entry) {
        const i64 id = d.plan.read_id(entry);
        i32 slot = id == -1 ? -1 : d.a.ctx.shape.slots;
        if (id >= 0 && id < experts) {
            std::vector<Take>& left = takes[id];
            while (!left.empty() && left.back().count == 0) left.pop_back();
            slot = left.empty() ? -1 : left.back().slot;
            if (!left.empty()) --left.back().count;
        }
        chosen[entry] = slot;
    }
    return true;
}

}  // namespace moecomm::host
