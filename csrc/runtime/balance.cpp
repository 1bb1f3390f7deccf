#include "balance.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <tuple>

namespace moecomm::runtime {
namespace {

constexpr double kLeastGain = 1e-3;  // of the mean load of a rank: steps that take less off are not worth a copy

template <class Load>
std::vector<i64> heaviest_first(const Load* load, i64 items) {
    std::vector<i64> order(items);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [load](i64 a, i64 b) { return load[a] > load[b]; });
    return order;
}

struct Change {
    i64 slot, expert;
};

// The placement of one layer, with the loads of ranks and slots that follow from it.
class Layer {
  public:
    Layer(const double* load, i64 experts, const RankSlots& slots, const Rules& rules, i64* expert)
        : slots_(slots),
          rules_(rules),
          load_(load),
          experts_(experts),
          expert_(expert),
          on_node_(experts * slots.nodes()),
          total_(experts),
          on_rank_(slots.ranks() * experts),
          where_(experts),
          rank_load_(slots.ranks()),
          delta_(slots.ranks()) {
        for (i64 slot = 0; slot < slots.size(); ++slot) put(slot, expert[slot]);
        at_first_ = on_rank_;
        copies_ = 0;
        weigh();
    }

    const RankSlots& slots() const { return slots_; }
    i64 experts() const { return experts_; }
    i64 expert(i64 slot) const { return expert_[slot]; }
    i64 replicas(i64 expert) const { return total_[expert]; }
    i64 on_rank(i64 rank, i64 expert) const { return on_rank_[rank * experts_ + expert]; }
    i64 copies() const { return copies_; }
    double rank_load(i64 rank) const { return rank_load_[rank]; }
    double slot_load(i64 slot) const { return slot_load_[slot]; }
    // The load of a replica on node `at`, if `node` had so many more replicas of the expert.
    double load_after(i64 expert, i64 more, i64 node, i64 at) {
        if (!by_node()) return load_[expert] / static_cast<double>(total_[expert] + more);
        counts_.assign(nodes(expert), nodes(expert) + slots_.nodes());
        counts_[node] += more;
        return load_[expert] * Shares(counts_, true).of(counts_[at]);
    }
    // Of a replica that has moved to another node.
    double load_moved(i64 expert, i64 from, i64 to) {
        if (!by_node() || total_[expert] == 1) return load_[expert] / static_cast<double>(total_[expert]);
        counts_.assign(nodes(expert), nodes(expert) + slots_.nodes());
        --counts_[from];
        ++counts_[to];
        return load_[expert] * Shares(counts_, true).of(counts_[to]);
    }
    // The largest load of the ranks with other replicas of an expert, once that in `slot` is gone.
    double most_without(i64 expert, i64 slot) {
        double most = 0;
        for (const i64 other : where_[expert])
            if (slots_.rank(other) != slots_.rank(slot)) {
                const double more = load_after(expert, -1, node_of(slot), node_of(other)) - slot_load_[other];
                most = std::max(most, rank_load_[slots_.rank(other)] + more);
            }
        return most;
    }
    // Shares do not depend on where replicas are, or not on where they are inside a node.
    bool keeps_shares(i64 node, i64 other) const { return node == other || !by_node(); }

    double most() const { return *std::max_element(rank_load_.begin(), rank_load_.end()); }
    i64 busiest() const { return std::max_element(rank_load_.begin(), rank_load_.end()) - rank_load_.begin(); }
    double least_gain() const {
        return kLeastGain * std::accumulate(rank_load_.begin(), rank_load_.end(), 0.0) / static_cast<double>(slots_.ranks());
    }

    // True if replicas may leave `from` (a node, or none: -1) for `to`, by the rules: `expert` in that direction, `other` in the other one.
    bool may_move(i64 expert, i64 from, i64 to, i64 other) const {
        if (slots_.nodes() == 1 || from == to) return true;
        if (rules_.pinned) return from == -1 && nodes(expert)[to] > 0;
        // An expert's rows that stay on a node are a share for each node with a replica.
        double staying = 0;
        if (nodes(expert)[to] == 0) staying += load_[expert];
        if (from != -1 && nodes(expert)[from] == 1) staying -= load_[expert];
        if (nodes(other)[to] == 1) staying -= load_[other];
        if (from != -1 && nodes(other)[from] == 0) staying += load_[other];
        return staying >= 0;
    }

    // The largest load of the ranks whose load one or two changes affect.
    template <size_t N>
    double most_after(const std::array<Change, N>& changes) {
        affected_.clear();
        const std::array<i64, 2> touched = {expert_[changes[0].slot], changes[0].expert};
        std::vector<i64>& counts = counts_;
        for (const i64 expert : touched) {
            counts.assign(nodes(expert), nodes(expert) + slots_.nodes());
            add_replicas(expert, counts, -1, [](i64) { return true; });
            for (const Change& change : changes) {
                const i64 node = node_of(change.slot);
                if (expert_[change.slot] == expert) --counts[node];
                if (change.expert == expert) ++counts[node];
            }
            add_replicas(expert, counts, 1, [&changes](i64 slot) {
                return std::none_of(changes.begin(), changes.end(), [slot](const Change& change) { return change.slot == slot; });
            });
            const Shares shares(counts, by_node());
            for (const Change& change : changes)
                if (change.expert == expert) add(slots_.rank(change.slot), load_[expert] * shares.of(counts[node_of(change.slot)]));
        }
        double most = 0;
        for (const i64 rank : affected_) most = std::max(most, rank_load_[rank] + delta_[rank]);
        for (const i64 rank : affected_) delta_[rank] = 0;
        return most;
    }

    template <size_t N>
    void make(const std::array<Change, N>& changes) {
        for (const Change& change : changes) take(change.slot);
        for (const Change& change : changes) put(change.slot, change.expert);
        weigh();
    }

  private:
    // The shares of an expert's load that its replicas have, from their number on each node.
    class Shares {
      public:
        Shares(const std::vector<i64>& on_node, bool by_node) : Shares(on_node.data(), static_cast<i64>(on_node.size()), by_node) {}
        Shares(const i64* on_node, i64 nodes, bool by_node) {
            const i64 total = std::accumulate(on_node, on_node + nodes, i64{0});
            const i64 with = std::count_if(on_node, on_node + nodes, [](i64 count) { return count > 0; });
            node_ = by_node ? 1.0 / static_cast<double>(nodes) : 0.0;
            far_ = (by_node ? static_cast<double>(nodes - with) * node_ : 1.0) / static_cast<double>(total);
        }
        // Of a replica on a node that has so many of them.
        double of(i64 count) const { return node_ / static_cast<double>(count) + far_; }

      private:
        double node_, far_;
    };

    bool by_node() const { return rules_.nearest && slots_.nodes() > 1; }
    const i64* nodes(i64 expert) const { return &on_node_[expert * slots_.nodes()]; }
    i64 node_of(i64 slot) const { return slots_.node(slots_.rank(slot)); }

    void add(i64 rank, double load) {
        affected_.push_back(rank);
        delta_[rank] += load;
    }
    template <class Keeps>
    void add_replicas(i64 expert, const std::vector<i64>& counts, int sign, const Keeps& keeps) {
        const Shares shares(counts, by_node());
        for (const i64 slot : where_[expert])
            if (keeps(slot)) add(slots_.rank(slot), sign * load_[expert] * shares.of(counts[node_of(slot)]));
    }

    void put(i64 slot, i64 expert) {
        i64& here = on_rank_[slots_.rank(slot) * experts_ + expert];
        if (!at_first_.empty() && here >= at_first_[&here - on_rank_.data()]) ++copies_;
        ++here;
        ++on_node_[expert * slots_.nodes() + node_of(slot)];
        ++total_[expert];
        where_[expert].push_back(slot);
        expert_[slot] = expert;
    }
    void take(i64 slot) {
        const i64 expert = expert_[slot];
        i64& here = on_rank_[slots_.rank(slot) * experts_ + expert];
        if (here > at_first_[&here - on_rank_.data()]) --copies_;
        --here;
        --on_node_[expert * slots_.nodes() + node_of(slot)];
        --total_[expert];
        where_[expert].erase(std::find(where_[expert].begin(), where_[expert].end(), slot));
    }
    // Sum in the order of slots: equal placements have equal loads, in all bits.
    void weigh() {
        slot_load_.assign(slots_.size(), 0);
        rank_load_.assign(slots_.ranks(), 0);
        for (i64 expert = 0; expert < experts_; ++expert) {
            const Shares shares(nodes(expert), slots_.nodes(), by_node());
            for (const i64 slot : where_[expert]) slot_load_[slot] = load_[expert] * shares.of(nodes(expert)[node_of(slot)]);
        }
        for (i64 slot = 0; slot < slots_.size(); ++slot) rank_load_[slots_.rank(slot)] += slot_load_[slot];
    }

    const RankSlots& slots_;
    const Rules& rules_;
    const double* load_;
    i64 experts_;
    i64* expert_;
    std::vector<i64> on_node_, total_, on_rank_, at_first_;
    std::vector<std::vector<i64>> where_;
    std::vector<double> rank_load_, slot_load_, delta_;
    std::vector<i64> affected_, counts_;
    i64 copies_ = 0;
};

// The best step so far.
struct Best {
    double value = -std::numeric_limits<double>::infinity();
    i64 count = 0;  // of changes
    std::array<Change, 2> changes{};

    void take(double gain, i64 copies, std::initializer_list<Change> made) {
        if (is_at_least(gain, copies)) return;
        value = gain / static_cast<double>(copies);
        count = static_cast<i64>(made.size());
        std::copy(made.begin(), made.end(), changes.begin());
    }
    bool is_at_least(double gain, i64 copies) const { return gain <= value * static_cast<double>(copies); }
};

void make(Layer& layer, const Best& best) {
    if (best.count == 1)
        layer.make(std::array<Change, 1>{best.changes[0]});
    else
        layer.make(best.changes);
}

// Find the step that takes most off the busiest rank, per copy.  None: count is 0.
Best best_step(Layer& layer, i64 copies_left) {
    const RankSlots& slots = layer.slots();
    const i64 busiest = layer.busiest(), node = slots.node(busiest);
    const double most = layer.rank_load(busiest), least_gain = layer.least_gain();
    double second = 0;
    for (i64 rank = 0; rank < slots.ranks(); ++rank)
        if (rank != busiest) second = std::max(second, layer.rank_load(rank));
    // The largest load falls to the second at most; a step also counts a little by what it takes off this rank.
    const auto gain = [=](double after) { return most - std::max(after, second) + 1e-3 * (most - after); };
    Best best;
    const auto offer = [&](double after, i64 copies, std::initializer_list<Change> changes) {
        if (after < most && after <= most - least_gain) best.take(gain(after), copies, changes);
    };
    // Estimates that take the two experts of a step one by one spare most evaluations of all ranks.
    std::vector<double> added(slots.nodes()), eased(slots.nodes()), without(slots.size(), -1);
    for (i64 here = slots.first(busiest); here < slots.first(busiest + 1); ++here) {
        const i64 hot = layer.expert(here);
        const double hot_load = layer.slot_load(here);
        for (i64 n = 0; n < slots.nodes(); ++n) {
            added[n] = layer.load_after(hot, 1, n, n);
            eased[n] = most - (hot_load - layer.load_after(hot, 1, n, node)) * static_cast<double>(layer.on_rank(busiest, hot));
        }
        for (i64 rank = 0; rank < slots.ranks(); ++rank) {
            if (rank == busiest || layer.on_rank(rank, hot) > 0) continue;
            const i64 there_node = slots.node(rank);
            const bool kept = layer.keeps_shares(node, there_node);
            const double hot_there = kept ? hot_load : layer.load_moved(hot, node, there_node);
            for (i64 there = slots.first(rank); there < slots.first(rank + 1); ++there) {
                const i64 other = layer.expert(there);
                const double other_load = layer.slot_load(there);
                const double other_here = kept ? other_load : layer.load_moved(other, there_node, node);
                const double swapped = std::max(most - hot_load + other_here, layer.rank_load(rank) - other_load + hot_there);
                if (copies_left >= 2 && swapped < most && !best.is_at_least(gain(swapped), 2) && layer.on_rank(busiest, other) == 0 &&
                    layer.may_move(hot, node, there_node, other)) {
                    const std::array<Change, 2> both = {Change{there, hot}, Change{here, other}};
                    offer(kept ? swapped : layer.most_after(both), 2, {both[0], both[1]});
                }
                if (copies_left < 1 || layer.replicas(other) < 2) continue;
                if (without[there] < 0) without[there] = layer.most_without(other, there);
                const double replaced =
                    std::max({eased[there_node], without[there], layer.rank_load(rank) - other_load + added[there_node]});
                const Change change{there, hot};
                if (replaced < most && !best.is_at_least(gain(replaced), 1) && layer.may_move(hot, -1, there_node, other))
                    offer(layer.most_after(std::array<Change, 1>{change}), 1, {change});
            }
        }
        if (copies_left < 1 || layer.replicas(hot) < 2) continue;
        const double others = layer.most_without(hot, here);
        for (i64 cold = 0; cold < layer.experts(); ++cold) {
            if (layer.on_rank(busiest, cold) > 0) continue;
            const double replaced = std::max(others, most - hot_load + layer.load_after(cold, 1, node, node));
            const Change change{here, cold};
            if (replaced < most && !best.is_at_least(gain(replaced), 1) && layer.may_move(cold, -1, node, hot))
                offer(layer.most_after(std::array<Change, 1>{change}), 1, {change});
        }
    }
    return best;
}

// Find the change that takes one of several replicas of an expert from a rank, at the smallest largest load.
Best best_removal(Layer& layer, i64 slot, i64 copies_left, double limit) {
    const RankSlots& slots = layer.slots();
    const i64 rank = slots.rank(slot), node = slots.node(rank), expert = layer.expert(slot);
    Best best;
    const auto offer = [&](double after, std::initializer_list<Change> changes) {
        if (after <= limit) best.take(-after, 1, changes);
    };
    if (copies_left >= 1)
        for (i64 other = 0; other < layer.experts(); ++other)
            if (layer.on_rank(rank, other) == 0 && layer.may_move(other, -1, node, expert))
                offer(layer.most_after(std::array<Change, 1>{Change{slot, other}}), {{slot, other}});
    if (copies_left >= 2)
        for (i64 there = 0; there < slots.size(); ++there) {
            const i64 other = layer.expert(there), there_rank = slots.rank(there);
            if (there_rank == rank || layer.on_rank(rank, other) > 0 || layer.on_rank(there_rank, expert) > 0) continue;
            if (!layer.may_move(expert, node, slots.node(there_rank), other)) continue;
            const std::array<Change, 2> changes = {Change{there, expert}, Change{slot, other}};
            offer(layer.most_after(changes), {changes[0], changes[1]});
        }
    return best;
}

// Number of replicas of each expert that is `among`: one, and a further one for the largest load of a replica while there are slots.
std::vector<i64> count_replicas(const double* load, const std::vector<i64>& among, i64 experts, i64 physical) {
    std::vector<i64> count(experts);
    for (const i64 expert : among) count[expert] = 1;
    const auto of_replica = [&](i64 expert) { return load[expert] / static_cast<double>(count[expert]); };
    for (i64 i = static_cast<i64>(among.size()); i < physical; ++i)
        ++count[*std::max_element(among.begin(), among.end(), [&](i64 a, i64 b) { return of_replica(a) < of_replica(b); })];
    return count;
}

// Place replicas, heaviest first: on a rank without the expert, on the node with the fewest replicas of it, and there on the lightest rank.
void place_replicas(const double* load, const std::vector<i64>& count, i64 first_rank, i64 last_rank, const RankSlots& slots, i64* expert) {
    std::vector<i64> items;
    std::vector<double> item_load, rank_load(slots.ranks()), node_load(slots.nodes());
    for (i64 e = 0; e < static_cast<i64>(count.size()); ++e)
        for (i64 i = 0; i < count[e]; ++i) {
            items.push_back(e);
            item_load.push_back(load[e] / static_cast<double>(count[e]));
        }
    std::vector<i64> filled(slots.ranks());
    std::vector<double> wide(slots.nodes());  // ranks of a node that have slots
    for (i64 rank = first_rank; rank < last_rank; ++rank) wide[slots.node(rank)] += slots.count(rank) > 0;
    for (const i64 item : heaviest_first(item_load.data(), static_cast<i64>(items.size()))) {
        const auto has = [&](i64 rank) {
            const i64* const begin = expert + slots.first(rank);
            return std::find(begin, begin + filled[rank], items[item]) != begin + filled[rank];
        };
        std::vector<i64> on_node(slots.nodes());
        for (i64 rank = first_rank; rank < last_rank; ++rank) on_node[slots.node(rank)] += has(rank);
        i64 best = -1;
        const auto order = [&](i64 rank) {
            const i64 node = slots.node(rank);
            return std::make_tuple(has(rank), on_node[node], node_load[node] / wide[node], rank_load[rank]);
        };
        for (i64 rank = first_rank; rank < last_rank; ++rank)
            if (filled[rank] < slots.count(rank) && (best < 0 || order(rank) < order(best))) best = rank;
        expert[slots.first(best) + filled[best]++] = items[item];
        rank_load[best] += item_load[item];
        node_load[slots.node(best)] += item_load[item];
    }
}

// Match rows to columns of a square matrix, each to one, so that the sum is the largest (Kuhn, Munkres; potentials, O(n^3)).
// Returns the row of each column.
std::vector<i64> match(const std::vector<i64>& value, i64 n) {
    constexpr i64 kFar = std::numeric_limits<i64>::max() / 4;
    std::vector<i64> row_potential(n + 1), column_potential(n + 1), row_of(n + 1, -1);  // column n is where a search begins
    for (i64 row = 0; row < n; ++row) {
        std::vector<i64> least(n, kFar), before(n, n);
        std::vector<char> done(n + 1);
        i64 column = n;
        row_of[n] = row;
        do {
            done[column] = 1;
            const i64 at = row_of[column];
            i64 delta = kFar, next = n;
            for (i64 c = 0; c < n; ++c) {
                if (done[c]) continue;
                const i64 cost = -value[at * n + c] - row_potential[at] - column_potential[c];
                if (cost < least[c]) least[c] = cost, before[c] = column;
                if (least[c] < delta) delta = least[c], next = c;
            }
            for (i64 c = 0; c <= n; ++c) {
                if (done[c])
                    row_potential[row_of[c]] += delta, column_potential[c] -= delta;
                else
                    least[c] -= delta;
            }
            column = next;
        } while (row_of[column] != -1);
        for (; column != n; column = before[column]) row_of[column] = row_of[before[column]];
    }
    row_of.pop_back();
    return row_of;
}

}  // namespace

RankSlots::RankSlots(const std::vector<i64>& of_ranks, i64 nodes) : first_{0}, nodes_(nodes) {
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
        first_.push_back(first_.back() + of_ranks[rank]);
        rank_.resize(first_.back(), static_cast<i64>(rank));
    }
}

void replicate_experts(const float* load, i64 experts, i64 physical, i64* expert, i64* replica, i64* count) {
    std::fill(count, count + experts, 1);
    std::iota(expert, expert + experts, 0);
    std::fill(replica, replica + experts, 0);
    std::vector<float> of_replica(load, load + experts);
    for (i64 i = experts; i < physical; ++i) {
        const i64 most = std::max_element(of_replica.begin(), of_replica.end()) - of_replica.begin();
        expert[i] = most;
        replica[i] = count[most]++;
        of_replica[most] = load[most] / static_cast<float>(count[most]);
    }
}

void pack_items(const float* load, i64 items, const std::vector<i64>& capacity, i64* pack, i64* place) {
    const i64 packs = static_cast<i64>(capacity.size());
    if (std::all_of(capacity.begin(), capacity.end(), [](i64 room) { return room == 1; })) {
        std::iota(pack, pack + items, 0);
        std::fill(place, place + items, 0);
        return;
    }
    std::vector<float> packed(packs);
    std::vector<i64> filled(packs);
    for (const i64 item : heaviest_first(load, items)) {
        i64 lightest = -1;
        for (i64 p = 0; p < packs; ++p)
            if (filled[p] < capacity[p] && (lightest < 0 || packed[p] < packed[lightest])) lightest = p;
        pack[item] = lightest;
        place[item] = filled[lightest]++;
        packed[lightest] += load[item];
    }
}

void spread_experts(const double* load, i64 experts, const i64* home, const RankSlots& slots, const Rules& rules, i64* expert) {
    const i64 parts = rules.pinned ? slots.nodes() : 1, width = slots.ranks() / parts;
    for (i64 part = 0; part < parts; ++part) {
        std::vector<i64> among;
        for (i64 e = 0; e < experts; ++e)
            if (!rules.pinned || home[e] == part) among.push_back(e);
        const i64 first = part * width, last = first + width, physical = slots.first(last) - slots.first(first);
        place_replicas(load, count_replicas(load, among, experts, physical), first, last, slots, expert);
    }
    const i64 any = std::numeric_limits<i64>::max();
    remove_duplicates(load, experts, slots, rules, any, true, expert);
    improve(load, experts, slots, rules, any, expert);
}

std::vector<Step> improve(const double* load, i64 experts, const RankSlots& slots, const Rules& rules, i64 most_copies, i64* expert) {
    Layer layer(load, experts, slots, rules, expert);
    std::vector<Step> steps;
    for (i64 i = 0; i < 4 * slots.size(); ++i) {
        const Best best = best_step(layer, most_copies - layer.copies());
        if (best.count == 0) break;
        make(layer, best);
        Step step{{}, {}, layer.copies(), layer.most()};
        for (i64 c = 0; c < best.count; ++c) {
            step.slots.push_back(best.changes[c].slot);
            step.experts.push_back(best.changes[c].expert);
        }
        steps.push_back(std::move(step));
    }
    return steps;
}

i64 remove_duplicates(const double* load, i64 experts, const RankSlots& slots, const Rules& rules, i64 most_copies, bool any_load,
                      i64* expert) {
    Layer layer(load, experts, slots, rules, expert);
    for (i64 slot = 0; slot < slots.size(); ++slot) {
        if (layer.on_rank(slots.rank(slot), layer.expert(slot)) < 2) continue;
        const double limit = any_load ? std::numeric_limits<double>::infinity() : layer.most();
        const Best best = best_removal(layer, slot, most_copies - layer.copies(), limit);
        if (best.count > 0) make(layer, best);
    }
    return layer.copies();
}

void keep_slots(const i64* before, i64 experts, const RankSlots& slots, bool renumber_ranks, i64* expert) {
    const i64 ranks = slots.ranks(), nodes = slots.nodes(), width = ranks / nodes;
    std::vector<i64> taken_from(ranks);  // by rank: the rank of `expert` whose experts it gets
    std::iota(taken_from.begin(), taken_from.end(), 0);
    if (renumber_ranks) {
        // Every pair of ranks with different numbers of slots costs more than all that can be kept; that of each rank with itself is
        // allowed.
        const i64 forbidden = -(slots.size() + 1) * ranks;
        std::vector<i64> had(experts), kept(nodes * nodes), values(width * width);
        std::vector<std::vector<i64>> matched(nodes * nodes);
        for (i64 from = 0; from < nodes; ++from)
            for (i64 to = 0; to < nodes; ++to) {
                for (i64 c = 0; c < width; ++c) {
                    const i64 old = to * width + c;
                    std::fill(had.begin(), had.end(), 0);
                    for (i64 slot = slots.first(old); slot < slots.first(old + 1); ++slot) ++had[before[slot]];
                    for (i64 r = 0; r < width; ++r) {
                        const i64 rank = from * width + r;
                        i64 both = 0;
                        for (i64 slot = slots.first(rank); slot < slots.first(rank + 1); ++slot) both += had[expert[slot]]-- > 0;
                        for (i64 slot = slots.first(rank); slot < slots.first(rank + 1); ++slot) ++had[expert[slot]];
                        values[r * width + c] = slots.count(rank) == slots.count(old) ? both : forbidden;
                    }
                }
                std::vector<i64>& rows = matched[from * nodes + to] = match(values, width);
                for (i64 c = 0; c < width; ++c) kept[from * nodes + to] += values[rows[c] * width + c];
            }
        const std::vector<i64> node_of = match(kept, nodes);
        for (i64 to = 0; to < nodes; ++to)
            for (i64 c = 0; c < width; ++c) taken_from[to * width + c] = node_of[to] * width + matched[node_of[to] * nodes + to][c];
    }
    const std::vector<i64> given(expert, expert + slots.size());
    for (i64 rank = 0; rank < ranks; ++rank) {
        const i64 first = slots.first(rank), last = slots.first(rank + 1), from = slots.first(taken_from[rank]);
        std::vector<i64> rest(given.begin() + from, given.begin() + from + (last - first)), open;
        for (i64 slot = first; slot < last; ++slot) {
            const auto same = std::find(rest.begin(), rest.end(), before[slot]);
            if (same == rest.end())
                open.push_back(slot);
            else
                expert[slot] = *same, rest.erase(same);
        }
        for (size_t i = 0; i < open.size(); ++i) expert[open[i]] = rest[i];
    }
}

}  // namespace moecomm::runtime
