// State of one dispatch of this rank, shared by the threads of its team.
#pragma once
#include "../protocol/args.h"
#include "plan.h"
#include "rows.h"
#include "scaleout_direct.h"

namespace moecomm::host {

struct Dispatch {
    explicit Dispatch(const DispatchArgs& args) : a(args), r(args.ctx, Op::dispatch, tag_of(args)), plan(a, r) {}

    const DispatchArgs& a;
    Round r;
    Plan plan;
    const i32 topk = a.ctx.shape.topk;
    const bool flat = a.layout == static_cast<i32>(Layout::flat);
    const bool repeat = a.repeat != 0;
    const bool scale_columns = a.scale_columns != 0;
    // This rank's rows are put to their owners in other domains without a forwarder.
    const bool direct = goes_direct(a.ctx.shape, a.num_tokens) && a.part == static_cast<i32>(Part::whole);
    const bool past_cache = static_cast<i64>(a.num_tokens) * a.row_bytes >= kPastCache;
    // Destinations of this rank's tokens: written by place_token(), or by the earlier dispatch that this one repeats.
    i32* const token_rows = memory<i32>(a.route.token_rows);
    i32* const token_owner = memory<i32>(a.route.token_owner);
    i32* const token_slot = memory<i32>(a.route.token_slot);

    // True if `source`, a rank of another domain, puts its rows direct.
    bool direct_from(i32 source) const {
        return goes_direct(a.ctx.shape, sent(source).num_tokens) && a.part == static_cast<i32>(Part::whole);
    }
    const SourceTokens& sent(i32 source) const { return memory<const SourceTokens>(a.route.sent)[source]; }
    DirectSends sent_direct{std::vector<i32>(direct ? r.ranks : 0, plan.own_chunks())};

  private:
    // The second half of a split dispatch has the tag of the first.
    static u32 tag_of(const DispatchArgs& args) {
        const State& state = Round::state_of(args.ctx);
        return args.part == static_cast<i32>(Part::end) ? state.last_dispatch : round_tag(state.round + 1);
    }
};

}  // namespace moecomm::host
