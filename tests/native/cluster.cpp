#include "cluster.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace moecomm::test {

void Cluster::Free::operator()(u8* p) const { std::free(p); }

Cluster::Cluster(const Shape& s, u64 timeout_ns, u64 disorder)
    : shape(s), window(window_layout(s)), timeout_ns_(timeout_ns), records_(s.ranks), host_words_(s.ranks, 0), used_(s.ranks, 0) {
    for (i32 rank = 0; rank < s.ranks; ++rank) {
        auto* base = static_cast<u8*>(std::aligned_alloc(256, align_up<u64>(window.bytes, 256)));
        if (base == nullptr) std::abort();
        std::memset(base, 0, window.staging);
        std::memset(base + window.staging, kUntouched, window.bytes - window.staging);
        windows_.emplace_back(base);
    }
    for (i32 rank = 0; rank < s.ranks && domains(s) > 1; ++rank) {
        std::vector<u64> far(s.ranks, 0);
        for (i32 p = 0; p < s.ranks; ++p)
            if (domain_of(s, p) != domain_of(s, rank)) far[p] = reinterpret_cast<u64>(base(p));
        links_.push_back(std::make_unique<host::Link>(s, far, disorder != 0 ? disorder * 64 + rank : 0));
    }
}

Context Cluster::context(i32 rank) const {
    Context ctx{};
    for (i32 p = 0; p < shape.ranks; ++p)
        if (domain_of(shape, p) == domain_of(shape, rank)) ctx.peers[p] = reinterpret_cast<u64>(base(p));
    if (!links_.empty()) ctx.link = reinterpret_cast<u64>(links_[rank].get());
    ctx.record = reinterpret_cast<u64>(&records_[rank]);
    ctx.abort_host = reinterpret_cast<u64>(&host_words_[rank]);
    ctx.timeout_ns = timeout_ns_;
    ctx.shape = shape;
    ctx.window = window;
    ctx.rank = rank;
    return ctx;
}

void Cluster::clear_records() {
    for (FailureRecord& record : records_) record = FailureRecord{};
}

u64 Cluster::output(i32 rank, u64 bytes) {
    const u64 offset = used_[rank];
    used_[rank] = align_up<u64>(offset + bytes + kGuard, 16);
    if (used_[rank] > static_cast<u64>(heap_bytes(shape))) {
        std::fprintf(stderr, "the heap of %lld bytes is too small\n", heap_bytes(shape));
        std::abort();
    }
    return window.heap + offset;
}

void Cluster::run(const std::function<void(i32)>& body) const {
    std::vector<std::thread> threads;
    for (i32 rank = 1; rank < shape.ranks; ++rank) threads.emplace_back(body, rank);
    body(0);
    for (std::thread& thread : threads) thread.join();
}

}  // namespace moecomm::test
