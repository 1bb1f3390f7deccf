// Random puts, gets and signals between all ranks at once, against what the same numbers say about them.
#include <cstdlib>
#include <cstring>

#include "proxy.h"
#include "scenarios.h"

namespace {

uint64_t big_bytes(const Options& options) { return options.slice / 8 * 5; }  // by default more than two bounces of a put to oneself

// The byte that `source` puts at `at` of its slice at `target`, and the byte of its own memory at `at` that others get.
unsigned char put_byte(uint64_t seed, int epoch, int source, int target, uint64_t at) {
    return static_cast<unsigned char>(
        mix(seed ^ static_cast<uint64_t>(epoch) << 32 ^ static_cast<uint64_t>(source * 64 + target) << 24 ^ at / 8) >> (at % 8 * 8));
}

struct Planned {
    uint64_t at, bytes;
    bool inlined, signals;
    uint64_t value;
    bool increment, weak;
};

// Plan the operations of `source` on `target` in one context and epoch: both ranks know them.
std::vector<Planned> plan(const Options& options, int epoch, int source, int target, int context) {
    Random random(options.seed * 1000003 + static_cast<uint64_t>(((epoch * 64 + source) * 64 + target) * 64 + context));
    std::vector<Planned> ops;
    uint64_t at = random.below(32);
    bool big = random.below(3) == 0;
    for (int i = 0; i < options.ops; ++i) {
        Planned op{};
        const uint64_t kind = random.below(10);
        op.inlined = kind < 2;
        op.bytes = op.inlined ? 1 + random.below(8) : kind == 2 ? 0 : kind < 8 ? 1 + random.below(300) : 1 + random.below(9000);
        if (big && !op.inlined && i == options.ops / 2) {
            op.bytes = big_bytes(options);
            big = false;
        }
        if (at + op.bytes > options.slice) break;
        op.at = at;
        at += op.bytes + random.below(9);
        op.signals = random.below(2) == 0 || i + 1 == options.ops;
        op.increment = random.below(2) == 0;
        op.value = op.increment ? 1 : 1 + random.below(5);
        op.weak = random.below(4) == 0;
        ops.push_back(op);
    }
    return ops;
}

uint64_t load(const char* at) { return __atomic_load_n(reinterpret_cast<const uint64_t*>(at), __ATOMIC_ACQUIRE); }

struct Case {
    const Options& options;
    World& world;
    Proxy& proxy;
    int rank;
    char *window, *source, *fetched, *signals, *words;
    void *window_region, *source_region, *fetched_region, *signals_region, *words_region;
    std::vector<uint64_t> base;  // of each signal at the start of the epoch

    uint64_t slice(int peer, int context) const { return static_cast<uint64_t>(peer * options.contexts + context) * options.slice; }
    uint64_t signal_at(int peer, int context) const { return static_cast<uint64_t>(peer * options.contexts + context) * 8; }

    void post(int epoch) {
        Random random(options.seed + static_cast<uint64_t>(rank) * 77 + static_cast<uint64_t>(epoch));
        std::vector<std::vector<Planned>> plans;
        std::vector<size_t> next;
        for (int peer = 0; peer < options.ranks; ++peer) {
            for (int context = 0; context < options.contexts; ++context) {
                plans.push_back(plan(options, epoch, rank, peer, context));
                next.push_back(0);
                for (const Planned& op : plans.back()) {
                    for (uint64_t i = 0; i < op.bytes; ++i) {
                        source[slice(peer, context) + op.at + i] =
                            static_cast<char>(put_byte(options.seed + static_cast<uint64_t>(context), epoch, rank, peer, op.at + i));
                    }
                }
            }
        }
        size_t left = plans.size();
        while (left > 0) {
            const size_t lane = random.below(plans.size());
            if (next[lane] == plans[lane].size()) {
                left = 0;
                for (size_t i = 0; i < plans.size(); ++i) left += next[i] < plans[i].size() ? 1 : 0;
                continue;
            }
            const int peer = static_cast<int>(lane) / options.contexts, context = static_cast<int>(lane) % options.contexts;
            post_one(plans[lane][next[lane]++], peer, context);
            if (random.below(20) == 0) raise_word(peer, context, random);
        }
    }

    void post_one(const Planned& op, int peer, int context) {
        Operation operation;
        operation.kind = op.inlined ? Operation::kPutInline : Operation::kPut;
        operation.from = source_region;
        operation.to = window_region;
        operation.from_at = slice(peer, context) + op.at;
        operation.to_at = slice(rank, context) + op.at;
        operation.bytes = op.bytes;
        if (op.inlined) std::memcpy(&operation.value, source + operation.from_at, op.bytes);
        if (op.signals) {
            operation.signal = signals_region;
            operation.signal_at = signal_at(rank, context);
            operation.signal_value = op.increment ? 12345 : op.value;
            operation.signal_op = op.increment ? abi::kSignalInc : abi::kSignalAdd;
            operation.strong = !op.weak;
        }
        proxy.post(context, peer, operation);
    }

    // A signal in memory that is the user's own: no put with it, and no regions for one.
    void raise_word(int peer, int context, Random& random) {
        Operation operation;
        operation.signal = words_region;
        operation.signal_at = static_cast<uint64_t>(rank) * 8;
        operation.signal_value = 1;
        operation.signal_op = random.below(2) == 0 ? abi::kSignalInc : abi::kSignalAdd;
        proxy.post(context, peer, operation);
        ++world.shared().sent[rank][peer];
    }

    // As soon as a signal is seen, everything before it must be there.
    void watch(int epoch) {
        struct Watched {
            std::vector<Planned> ops;
            int peer, context;
            size_t checked = 0;
            uint64_t sum = 0;
        };
        std::vector<Watched> all;
        for (int peer = 0; peer < options.ranks; ++peer) {
            for (int context = 0; context < options.contexts; ++context)
                all.push_back({plan(options, epoch, peer, rank, context), peer, context});
        }
        for (bool waiting = true; waiting;) {
            waiting = false;
            require(proxy.result() == abi::kSuccess, "the proxy failed: " + logged());
            for (Watched& one : all) {
                const uint64_t at = signal_at(one.peer, one.context);
                const uint64_t now = load(signals + at) - base[at / 8];
                size_t upto = one.checked;
                uint64_t sum = one.sum;
                for (size_t i = one.checked; i < one.ops.size(); ++i) {
                    if (!one.ops[i].signals) continue;
                    if (sum + one.ops[i].value > now) break;
                    sum += one.ops[i].value;
                    upto = i + 1;
                }
                for (; one.checked < upto; ++one.checked) check(one.ops[one.checked], epoch, one.peer, one.context);
                one.sum = sum;
                bool more = false;
                for (size_t i = one.checked; i < one.ops.size(); ++i) more = more || one.ops[i].signals;
                waiting = waiting || more;
                require(now <= sum || more, "more signals than were sent");
            }
            std::this_thread::yield();
        }
    }

    void check(const Planned& op, int epoch, int peer, int context) const {
        const char* at = window + slice(peer, context) + op.at;
        for (uint64_t i = 0; i < op.bytes; ++i) {
            const unsigned char want = put_byte(options.seed + static_cast<uint64_t>(context), epoch, peer, rank, op.at + i);
            require(static_cast<unsigned char>(at[i]) == want, "a signal was seen before the bytes of an earlier put, or they are wrong");
        }
    }

    // After everything: each byte is what was put there, or was never touched.
    void check_all(int epoch) {
        for (int peer = 0; peer < options.ranks; ++peer) {
            for (int context = 0; context < options.contexts; ++context) {
                const char* slice_at = window + slice(peer, context);
                uint64_t at = 0;
                for (const Planned& op : plan(options, epoch, peer, rank, context)) {
                    for (; at < op.at; ++at) require(static_cast<unsigned char>(slice_at[at]) == kUntouched, "a byte beside a put changed");
                    check(op, epoch, peer, context);
                    at += op.bytes;
                }
                for (; at < options.slice; ++at)
                    require(static_cast<unsigned char>(slice_at[at]) == kUntouched, "a byte behind the puts changed");
            }
        }
        std::memset(window, kUntouched, slice(options.ranks, 0));
        for (size_t i = 0; i < base.size(); ++i) base[i] = load(signals + i * 8);
    }

    void get(int epoch) {
        Random random(options.seed * 31 + static_cast<uint64_t>(rank * 7 + epoch));
        struct Wanted {
            int peer, context;
            uint64_t from, to, bytes;
        };
        std::vector<Wanted> wanted;
        uint64_t at = 0;
        for (int i = 0; i < options.ops / 4 + 1; ++i) {
            const uint64_t bytes = i == 0 && epoch == 0 ? big_bytes(options) : random.below(3000);
            const int peer = static_cast<int>(random.below(static_cast<uint64_t>(options.ranks)));
            const int context = static_cast<int>(random.below(static_cast<uint64_t>(options.contexts)));
            if (at + bytes > options.slice) break;
            Operation operation;
            operation.kind = Operation::kGet;
            operation.from = source_region;
            operation.from_at = random.below(options.slice - bytes);
            operation.to = fetched_region;
            operation.to_at = at;
            operation.bytes = bytes;
            wanted.push_back({peer, context, operation.from_at, at, bytes});
            proxy.post(context, peer, operation);
            at += bytes;
        }
        Operation flush;
        flush.kind = Operation::kFlush;
        flush.signal = signals_region;
        proxy.post(0, rank, flush);
        require(proxy.wait_all(), "gets failed: " + logged());
        world.barrier();
        for (const Wanted& one : wanted) {
            for (uint64_t i = 0; i < one.bytes; ++i) {
                require(fetched[one.to + i] == expected_source(one.peer, one.from + i), "a get brought a wrong byte");
            }
        }
    }

    // The first slice of a source window is for rank 0, context 0; what is not in a plan was never touched.
    std::vector<std::string> known = std::vector<std::string>(kMostRanks);
    int known_epoch = -1;
    char expected_source(int peer, uint64_t at) { return known[static_cast<size_t>(peer)][at]; }
    void learn(int epoch) {
        for (int peer = 0; peer < options.ranks; ++peer) {
            std::string& bytes = known[static_cast<size_t>(peer)];
            if (bytes.empty()) bytes.assign(options.slice, static_cast<char>(kUntouched));
            for (const Planned& op : plan(options, epoch, peer, 0, 0)) {
                for (uint64_t i = 0; i < op.bytes; ++i)
                    bytes[op.at + i] = static_cast<char>(put_byte(options.seed, epoch, peer, 0, op.at + i));
            }
        }
    }
};

}  // namespace

bool random_case(const Options& options, World& world, int rank) {
    Proxy proxy(options, world, rank);
    proxy.listen();
    require(proxy.connect() == abi::kSuccess, "connect: " + logged());
    const uint64_t bytes = static_cast<uint64_t>(options.ranks * options.contexts) * options.slice;
    const uint64_t signal_bytes = static_cast<uint64_t>(options.ranks * options.contexts) * 8;
    Case it{options,
            world,
            proxy,
            rank,
            allocate_window(bytes),
            allocate_window(bytes),
            allocate_window(options.slice),
            allocate_signals(signal_bytes),
            allocate_signals(kMostRanks * 8),
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            {}};
    it.base.assign(signal_bytes / 8, 0);
    proxy.open_contexts();
    it.signals_region = proxy.add(it.signals, signal_bytes, 1 | abi::kSignalNeverReset);
    proxy.start();
    it.window_region = proxy.add(it.window, bytes);  // windows are also registered while others are in use
    it.source_region = proxy.add(it.source, bytes);
    it.fetched_region = proxy.add(it.fetched, options.slice);
    it.words_region = proxy.add(it.words, kMostRanks * 8);
    for (int epoch = 0; epoch < options.epochs; ++epoch) {
        std::thread kernel([&] { it.post(epoch); });
        proxy.add_in_passing(allocate_window(4096), 4096);
        it.watch(epoch);
        kernel.join();
        require(proxy.wait_all(), "puts failed: " + logged());
        world.barrier();
        it.check_all(epoch);
        world.barrier();
        it.learn(epoch);
        it.get(epoch);
        world.barrier();
    }
    for (int peer = 0; peer < options.ranks; ++peer) {
        while (load(it.words + peer * 8) != world.shared().sent[peer][rank].load()) {
            require(proxy.result() == abi::kSuccess, "the proxy failed: " + logged());
            std::this_thread::yield();
        }
    }
    world.barrier();
    require(!proxy.last_error(), "an error was kept: " + logged());
    require(logged().empty() || options.mode == "threads", "something was logged: " + logged());
    proxy.close();
    if (options.mode == "processes") proxy.print_times();
    return true;
}
