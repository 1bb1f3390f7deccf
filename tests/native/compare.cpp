#include "compare.h"

#include <cmath>
#include <cstring>

#include "numbers.h"

namespace moecomm::test {

namespace {

// Return the first difference, or "".
std::string compare_bytes(const char* name, const u8* got, const std::vector<u8>& want) {
    for (size_t i = 0; i < want.size(); ++i)
        if (got[i] != want[i])
            return std::string(name) + " differs at byte " + std::to_string(i) + ": " + std::to_string(got[i]) + " for " +
                   std::to_string(want[i]);
    for (size_t i = want.size(); i < want.size() + Cluster::kGuard; ++i)
        if (got[i] != kUntouched) return std::string(name) + " was written behind its end";
    return "";
}

template <class T>
std::string compare_values(const char* name, const std::vector<T>& got, const std::vector<T>& want) {
    for (size_t i = 0; i < want.size(); ++i)
        if (std::memcmp(&got[i], &want[i], sizeof(T)) != 0) return std::string(name) + " differs at " + std::to_string(i);
    return got.size() == want.size() ? "" : std::string(name) + " has another size";
}

// Bit for bit, but one NaN is as good as another.
std::string compare_floats(const std::vector<u8>& got, const std::vector<u8>& want, Type type, i64 stride, i32 hidden) {
    for (size_t row = 0; row * stride < want.size(); ++row) {
        const u8 *g = &got[row * stride], *w = &want[row * stride];
        for (i32 i = 0; i < hidden; ++i) {
            if (std::memcmp(g + i * size_of(type), w + i * size_of(type), size_of(type)) == 0) continue;
            if (std::isnan(value_at(g, type, i)) && std::isnan(value_at(w, type, i))) continue;
            return "out differs at token " + std::to_string(row) + ", column " + std::to_string(i);
        }
        const i64 used = hidden * size_of(type);
        if (std::memcmp(g + used, w + used, stride - used) != 0) return "out was written between its rows";
    }
    return "";
}

std::string first_of(std::initializer_list<std::string> problems) {
    for (const std::string& problem : problems)
        if (!problem.empty()) return problem;
    return "";
}

// Where a chunk that brings nothing would have begun is nobody's business.
std::string compare_ranges(const std::vector<u32>& got, const std::vector<u32>& want) {
    for (size_t i = 0; i < want.size(); ++i)
        if (want[i] == 0 ? signal_count(got[i]) != 0 : got[i] != want[i]) return "ranges differs at " + std::to_string(i);
    return "";
}

// Check the results that the first half of a dispatch gives already.
std::string check_route(const ReceiveBuffer& l, const Routed& want, i32 rank) {
    const Arrived& a = want.arrived[rank];
    return first_of({
        compare_values("tokens_per_expert", l.tokens_per_expert, a.tokens_per_expert),
        compare_values("rows_per_expert", l.rows_per_expert, a.rows_per_expert),
        compare_values("num_rows", l.num_rows, {a.num_rows}),
        compare_values("sent", {l.sent.begin(), l.sent.begin() + static_cast<i64>(a.sent.size())}, a.sent),
        compare_values("token_rows", l.token_rows, want.row[rank]),
        compare_values("token_owner", l.token_owner, want.owner[rank]),
        compare_values("token_slot", l.token_slot, want.slot[rank]),
    });
}

std::string check_dispatch(const Cluster& cluster, const Dispatched& d, const Routed& want, i32 rank) {
    const ReceiveBuffer& l = d.receive_buffer[rank];
    const Arrived& a = want.arrived[rank];
    const u8* base = cluster.base(rank);
    const std::string payload = first_of({compare_bytes("x", base + l.x, a.x), compare_bytes("scales", base + l.scales, a.scales),
                                          compare_values("scale_columns", l.scale_columns, a.scale_columns)});
    if (d.repeats != nullptr || !payload.empty()) return payload;
    return first_of({
        compare_bytes("src", base + l.src, a.src),
        compare_bytes("weights", base + l.weights, a.weights),
        l.topk_idx != 0 ? compare_bytes("topk_idx", base + l.topk_idx, a.topk_idx) : "",
        l.rows != 0 ? compare_bytes("rows", base + l.rows, a.rows) : "",
        compare_ranges(l.ranges, a.ranges),
        check_route(l, want, rank),
        d.begun.empty() ? "" : check_route(d.begun[rank], want, rank),
    });
}

std::string check_combine(const Shape& shape, const Combined& c, const Routed& routed, i32 rank) {
    const SourceReduce want = expect_combine(shape, c, routed, rank);
    const Combined::Part& part = c.parts[rank];
    const std::string out = compare_floats(part.out, want.out, c.type, part.out_stride, c.routed->hidden);
    return first_of({out, compare_values("weight grads", part.out_grads, want.grads)});
}

}  // namespace

std::string text(const FailureRecord& r) {
    std::string out;
    const std::pair<const char*, i64> fields[] = {{"code", r.code}, {"op", r.op},     {"phase", r.phase}, {"argument", r.argument},
                                                  {"rank", r.rank}, {"peer", r.peer}, {"round", r.round}, {"expected", r.expected},
                                                  {"seen", r.seen}};
    for (const auto& [name, value] : fields) out += std::string(name) + " " + std::to_string(value) + " ";
    return out;
}

std::string check_step(Cluster& cluster, const Step& step, Expected& expected, i32 rank) {
    const FailureRecord& record = cluster.record(rank);
    if (record.code != 0) return "failed: " + text(record);
    if (step.combine != nullptr) return check_combine(cluster.shape, *step.combine, expected.at(step.combine->routed), rank);
    if (step.part == Part::begin) return "";
    if (expected.count(step.dispatch) == 0) expected[step.dispatch] = expect_dispatch(cluster.shape, *step.dispatch);
    return check_dispatch(cluster, *step.dispatch, expected.at(step.dispatch), rank);
}

std::string check_steps(Cluster& cluster, const Scenario& scenario) {
    Expected expected;
    for (size_t i = 0; i < scenario.steps.size(); ++i) {
        for (i32 rank = 0; rank < scenario.shape.ranks; ++rank) {
            const std::string problem = check_step(cluster, scenario.steps[i], expected, rank);
            if (!problem.empty())
                return "round " + std::to_string(i + 1) + (scenario.steps[i].combine != nullptr ? " (combine)" : " (dispatch)") + " rank " +
                       std::to_string(rank) + " of " + std::to_string(scenario.shape.ranks) + " in domains of " +
                       std::to_string(domain_ranks(scenario.shape)) + ": " + problem;
        }
    }
    return "";
}

}  // namespace moecomm::test
