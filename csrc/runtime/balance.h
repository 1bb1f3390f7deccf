// Placement of expert replicas on ranks, a layer at a time: what moecomm.balance computes.  No communication, no protocol.
#pragma once
#include <vector>

#include "../protocol/compiler.h"

namespace moecomm::runtime {

// Slots of all ranks, numbered from rank 0 on, and the node of each rank.
class RankSlots {
  public:
    // `ranks` is a multiple of `nodes`; consecutive ranks are on a node.
    RankSlots(const std::vector<i64>& of_ranks, i64 nodes);

    i64 ranks() const { return static_cast<i64>(first_.size()) - 1; }
    i64 nodes() const { return nodes_; }
    i64 size() const { return first_.back(); }
    i64 first(i64 rank) const { return first_[rank]; }
    i64 count(i64 rank) const { return first_[rank + 1] - first_[rank]; }
    i64 rank(i64 slot) const { return rank_[slot]; }
    i64 node(i64 rank) const { return rank / (ranks() / nodes_); }

  private:
    std::vector<i64> first_, rank_;
    i64 nodes_;
};

// Replicate experts greedily: the next replica goes to the expert with the largest load of a replica, the first of several.
// expert, replica [physical]: the expert of each physical expert, and which of its replicas it is; count [experts].  As replicate_experts
// of deepseek-ai/EPLB (d52c72d), whose sums and quotients are float32.
void replicate_experts(const float* load, i64 experts, i64 physical, i64* expert, i64* replica, i64* count);

// Pack items, heaviest first, each to the lightest pack that is not full, the first of several.  capacity [packs].
// pack, place [items]: the pack of each item, and its place there.  As balanced_packing of EPLB, where all capacities are the same.
void pack_items(const float* load, i64 items, const std::vector<i64>& capacity, i64* pack, i64* place);

// How experts may be replicated and placed.
struct Rules {
    bool pinned;   // replicas of an expert stay on its node; else they are spread over nodes
    bool nearest;  // tokens take a replica on the node of their rank where there is one; else replicas of an expert share its load evenly
};

// Replicate and place the experts of a layer, so that no rank has two replicas of an expert, unless it has more slots than there are
// experts. home [experts]: the node of each expert if rules.pinned.  expert [slots]: the expert of each slot.
void spread_experts(const double* load, i64 experts, const i64* home, const RankSlots& slots, const Rules& rules, i64* expert);

// A step of `improve`: slots and their new experts, and what holds after it.
struct Step {
    std::vector<i64> slots, experts;
    i64 copies;  // of experts to ranks that did not have them at the beginning
    double most;
};

// Take load off the busiest rank of a layer, step by step, until no step does or the next one exceeds `most_copies`.  Slots exchange their
// experts, or a replica of one expert replaces a replica of another.  No step raises the largest load of a rank, brings a second replica of
// an expert to a rank, takes an expert from its node if rules.pinned, or makes more rows leave their node.  expert [slots] is changed.
std::vector<Step> improve(const double* load, i64 experts, const RankSlots& slots, const Rules& rules, i64 most_copies, i64* expert);

// Remove second replicas of an expert from ranks, by the same kinds of steps, as far as `most_copies` allows and the largest load of a rank
// does not grow (`any_load`: or although it does).  Returns the copies needed.
i64 remove_duplicates(const double* load, i64 experts, const RankSlots& slots, const Rules& rules, i64 most_copies, bool any_load,
                      i64* expert);

// Renumber the ranks of a layer, inside nodes and nodes among each other, and the slots of each rank, so that `expert` [slots] differs from
// `before` in as few slots as possible.  Only ranks with the same number of slots change places.  renumber_ranks = false: slots alone do.
void keep_slots(const i64* before, i64 experts, const RankSlots& slots, bool renumber_ranks, i64* expert);

}  // namespace moecomm::runtime
