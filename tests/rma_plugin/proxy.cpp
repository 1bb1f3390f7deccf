#include "proxy.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace {

void* load(const std::string& plugin) {
    void* library = ::dlopen(plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
    require(library != nullptr, "the plugin does not load");
    return library;
}

}  // namespace

Proxy::Proxy(const Options& options, World& world, int rank)
    : table(load(options.plugin), options.table),
      options_(options),
      world_(world),
      rank_(rank),
      queues_(static_cast<size_t>(options.contexts * options.ranks)) {
    take_times_ = reinterpret_cast<decltype(take_times_)>(::dlsym(load(options.plugin), "moecomm_rma_take_times"));
    require(take_times_ != nullptr, "the plugin lacks its times");
    void* second = nullptr;  // NCCL makes two: for RMA, and for GIN
    require(table.init(&second, 42, log_line) == abi::kSuccess && table.finalize(second) == abi::kSuccess, "init");
    require(table.init(&context_, 42, log_line) == abi::kSuccess, "init");
    int devices = 0;
    abi::Properties properties{};
    require(table.devices(&devices) == abi::kSuccess && devices == 1, "devices");
    require(table.getProperties(0, &properties) == abi::kSuccess, "getProperties");
    const int queue = abi::kMaxRequests * properties.maxRecvs;
    require(properties.netDeviceType == abi::kGinProxy && (queue & (queue - 1)) == 0 && queue >= options.queue, "properties");
    const int kinds = abi::kPtrHost | abi::kPtrCuda;
    require((properties.ptrSupport & kinds) == kinds && properties.vProps.ndevs == 1 && properties.vProps.devs[0] == 0, "properties");
    // A plugin that takes dma-bufs must have regMrSymDmaBuf.
    require((properties.ptrSupport & abi::kPtrDmaBuf) == 0 || table.regMrSymDmaBuf != nullptr, "dma-bufs are taken, and by no function");
    for (Queue& one : queues_) one.states.resize(static_cast<size_t>(options.queue));
}

Proxy::~Proxy() {
    close();
    if (context_ != nullptr) require(table.finalize(context_) == abi::kSuccess, "finalize");
}

void Proxy::listen() {
    require(table.listen(context_, 0, world_.shared().handles[rank_], &listener_) == abi::kSuccess, "listen: " + logged());
    world_.barrier();
}

abi::Result Proxy::connect() {
    std::vector<void*> handles;
    for (int rank = 0; rank < options_.ranks; ++rank) handles.push_back(world_.shared().handles[rank]);
    const abi::Result result = table.connect(context_, handles.data(), options_.ranks, rank_, listener_, &comm);
    require(table.closeListen(listener_) == abi::kSuccess, "closeListen");
    if (result != abi::kSuccess) return result;
    // Were it true, NCCL's barriers would leave out their flushes of other peers: a signal stands for the puts before it of its own context
    // and peer, and for no others.  That it does stand for those, the random puts show.
    abi::RmaProperties promised{true};
    require(table.getRmaProperties(comm, &promised) == abi::kSuccess && !promised.flushesAllPutsOnAnySignal, "getRmaProperties");
    return result;
}

void Proxy::open_contexts() {
    rma = add_context(options_.contexts);
    for (Queue& queue : queues_) {
        queue.inlines.reset(new uint64_t[static_cast<size_t>(options_.queue)]());
        queue.inlines_region =
            add(reinterpret_cast<char*>(queue.inlines.get()), sizeof(uint64_t) * static_cast<size_t>(options_.queue), 0, abi::kPtrHost);
    }
}

void Proxy::start() {
    thread_ = std::thread([this] { run(); });
}

void* Proxy::add(char* memory, size_t bytes, uint64_t flags, int type) {
    void* region = nullptr;
    require(table.regMrSym(comm, memory, bytes, type, flags, &region) == abi::kSuccess, "regMrSym: " + logged());
    require(reinterpret_cast<uint64_t>(region) >> 63 == 0, "NCCL keeps 63 bits of a handle");
    regions_.push_back(region);
    return region;
}

void Proxy::remove(void* region) {
    require(table.deregMrSym(comm, region) == abi::kSuccess, "deregMrSym: " + logged());
    regions_.erase(std::find(regions_.begin(), regions_.end(), region));
}

void* Proxy::add_context(int count) {
    abi::Config config{count, 0, 1};
    void* context = nullptr;
    require(table.createContext(comm, &config, &context) == abi::kSuccess, "createContext");
    return context;
}

void Proxy::add_in_passing(char* memory, size_t bytes) {
    for (int i = 0; i < 10; ++i) {
        remove(add(memory, bytes));
        require(table.destroyContext(add_context(1)) == abi::kSuccess, "destroyContext");
        require(!last_error(), "an error was kept: " + logged());
    }
}

void Proxy::close() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    if (rma != nullptr) require(table.destroyContext(rma) == abi::kSuccess, "destroyContext");
    rma = nullptr;
    while (!regions_.empty()) remove(regions_.back());
    if (comm != nullptr) require(table.closeColl(comm) == abi::kSuccess, "closeColl");
    comm = nullptr;
}

template <class Call>
abi::Result Proxy::timed(Calls& calls, const Call& call) {
    const auto begin = Clock::now();
    const abi::Result result = call();
    const auto time = Clock::now() - begin;
    ++calls.count;
    calls.time += static_cast<uint64_t>(std::chrono::nanoseconds(time).count());
    longest_call_ = std::max(longest_call_, std::chrono::duration<double>(time).count());
    return result;
}

void Proxy::run() {  // no CUDA context is current here, as in NCCL's thread
    fake_nccl_thread(true);
    while (!stop_ && result_ == abi::kSuccess) {
        result_ = turn();
        std::this_thread::yield();
        if (options_.lag > 0 && rank_ == 1) std::this_thread::sleep_for(std::chrono::microseconds(options_.lag));
    }
    fake_nccl_thread(false);
}

abi::Result Proxy::turn() {
    for (int context = 0; context < options_.contexts; ++context) {
        for (int peer = 0; peer < options_.ranks; ++peer) {
            Queue& queue = queues_[static_cast<size_t>(context * options_.ranks + peer)];
            const auto size = static_cast<uint32_t>(options_.queue);
            uint32_t done = queue.done.load();
            for (uint32_t i = done; i != queue.seen; ++i) {
                State& state = queue.states[i % size];
                if (state.done == 0) {
                    if (const auto result = timed(polls_, [&] { return table.test(comm, state.request, &state.done); })) return result;
                }
                if (state.done != 0 && i == done) queue.done.store(++done);
            }
        }
        for (int peer = 0; peer < options_.ranks; ++peer) {
            Queue& queue = queues_[static_cast<size_t>(context * options_.ranks + peer)];
            if (queue.seen == queue.posted.load(std::memory_order_acquire)) continue;
            const uint32_t place = queue.seen++ % static_cast<uint32_t>(options_.queue);
            State& state = queue.states[place];
            state.done = 0;
            state.request = nullptr;
            if (const auto result = timed(issues_, [&] { return issue(context, peer, queue, state, place); })) return result;
            if (state.request == nullptr) {
                require(state.operation.kind == Operation::kFlush, "a request is null");
                state.done = 1;
            }
        }
    }
    timed(polls_, [&] { return table.rmaProgress(rma); });  // NCCL does not look at what it returns
    return abi::kSuccess;
}

abi::Result Proxy::issue(int context, int peer, Queue& queue, State& state, uint32_t place) {
    const Operation& o = state.operation;
    const uint32_t rank = static_cast<uint32_t>(peer), hints = place % 2;  // 1: requests may be put together
    if (o.kind == Operation::kFlush) return table.iflush(rma, context, o.signal, static_cast<uint32_t>(rank_), &state.request);
    if (o.kind == Operation::kGet) {
        return table.iget(rma, context, o.from_at, o.from, o.bytes, o.to_at, o.to, rank, hints, &state.request);
    }
    void* from = o.from;
    uint64_t from_at = o.from_at;
    if (o.kind == Operation::kPutInline) {
        queue.inlines[place] = o.value;
        from = queue.inlines_region;
        from_at = place * sizeof(uint64_t);
    }
    if (o.signal == nullptr) return table.iput(rma, context, from_at, from, o.bytes, o.to_at, o.to, rank, hints, &state.request);
    return table.iputSignal(rma, context, from_at, from, o.bytes, o.to_at, o.to, rank, o.signal_at, o.signal, o.signal_value, o.signal_op,
                            o.strong, hints, &state.request);
}

void Proxy::post(int context, int peer, const Operation& operation) {
    Queue& queue = queues_[static_cast<size_t>(context * options_.ranks + peer)];
    const uint32_t place = queue.posted.load(std::memory_order_relaxed);
    while (place - queue.done.load() == static_cast<uint32_t>(options_.queue)) {
        if (result_ != abi::kSuccess) return;
        std::this_thread::yield();
    }
    queue.states[place % static_cast<uint32_t>(options_.queue)].operation = operation;
    if (operation.kind != Operation::kFlush) {
        ++posted_;
        signals_ += operation.signal != nullptr ? 1 : 0;
        bytes_ += operation.bytes;
    }
    queue.posted.store(place + 1, std::memory_order_release);
}

void Proxy::print_times() const {
    moecomm::rma::times::Taken taken{}, other{};
    taken.version = moecomm::rma::times::kVersion;
    other.version = taken.version + 1;
    require(take_times_(&other) != 0 && take_times_(&taken) == 0, "versions of what is taken");
    std::string line = "times " + std::to_string(posted_) + " " + std::to_string(signals_) + " " + std::to_string(bytes_);
    line += " " + std::to_string(issues_.time) + " " + std::to_string(polls_.count) + " " + std::to_string(polls_.time);
    line += " " + std::to_string(taken.on) + " " + std::to_string(taken.since);
    for (const uint64_t sum : taken.sums) line += " " + std::to_string(sum);
    require(take_times_(&taken) == 0 && taken.sums[moecomm::rma::times::kOperations] == 0, "what was taken is taken again");
    std::puts(line.c_str());
}

bool Proxy::wait_all() {
    for (Queue& queue : queues_) {
        while (queue.done.load() != queue.posted.load()) {
            if (result_ != abi::kSuccess) return false;
            std::this_thread::yield();
        }
    }
    return true;
}

bool Proxy::last_error() {
    bool failed = false;
    require(table.queryLastError(rma, &failed) == abi::kSuccess, "queryLastError");
    return failed;
}
