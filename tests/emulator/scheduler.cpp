// Runs the threads of kernels of several ranks as fibers of one thread, warps in an order that changes, and moves what crosses between
// domains late and out of order.  x86-64.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda.h"

namespace emulator {

Thread* emulator_thread;

namespace {

constexpr std::size_t kStack = 48 << 10;
enum class Until { next_pass, least, change };

struct Fiber {
    void* stack;
    Thread thread;
    Until until;
    const unsigned* word;
    unsigned value;
    bool ended;
    void (*kernel)(const void*);
    const void* arguments;

    bool ready() const {
        if (until == Until::next_pass) return true;
        return until == Until::least ? static_cast<int>(*word - value) >= 0 : *word != value;
    }
};

Fiber* running;
void* scheduler_stack;
std::uint64_t passes;
std::vector<std::uint64_t> most_steps, most_block_steps;  // of the last run, by launch: of a thread, and of all threads of a block

// On its way to another domain.
struct Order {
    bool adds;
    void* to;
    const void* from;
    std::uint64_t n;
    std::uint64_t due;     // the pass in which it arrives
    std::uint64_t number;  // of a put, among all
};
constexpr int kLanes = 64 * 64 * 4;  // by sender, receiver and channel
std::vector<Order> orders[kLanes];
std::uint64_t held_until[kLanes];
std::uint64_t puts[64 * 64];  // by sender and receiver: how many there have been
std::uint64_t put_bytes[64];  // by sender
std::uint64_t lines[64];      // of packets, by sender: those to itself, too
std::uint64_t last_put;       // number of the last one
std::uint64_t windows[64];    // addresses of windows that are alike, by rank
struct Wire {
    std::uint64_t byte_passes, free;  // passes that a byte takes, or 0; the pass in which all earlier bytes have arrived
};
Wire wires[64 * 64];  // by sender and receiver
std::vector<int> busy;

void push(int rank, int peer, int channel, const Order& order) {
    const int lane = (rank * 64 + peer) * 4 + channel;
    if (orders[lane].empty()) busy.push_back(lane);
    orders[lane].push_back(order);
}

// One of those that may be next: a put, or an add that nothing is before.  Now and then a lane moves nothing for long.
void move_one(unsigned random) {
    if (busy.empty()) return;
    const std::size_t chosen = random % busy.size();
    const int lane = busy[chosen];
    if (passes < held_until[lane]) return;
    if (random % 29 == 0) {
        held_until[lane] = passes + (random >> 12) % 2500;
        return;
    }
    auto& waiting = orders[lane];
    std::size_t nth = (random >> 8) % waiting.size();
    if (waiting[nth].adds) nth = 0;
    const Order order = waiting[nth];
    if (passes < order.due) return;
    if (order.adds) {
        *static_cast<unsigned long long*>(order.to) += order.n;
    } else {
        std::memcpy(order.to, order.from, order.n);
    }
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(nth));
    if (!waiting.empty()) return;
    busy[chosen] = busy.back();
    busy.pop_back();
}

}  // namespace

extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace {

void pause(Until until, const unsigned* word, unsigned value) {
    running->until = until;
    running->word = word;
    running->value = value;
    emulator_switch(&running->stack, scheduler_stack);
}

void begin_fiber() {
    running->kernel(running->arguments);
    running->ended = true;
    Block& block = *running->thread.of_block;
    if (++block.ended == block.threads) let_next_launch(block);
    if (Barrier& b = block.barriers[0]; b.arrived != 0 && b.arrived >= block.threads - block.ended) {
        b.result = b.any;
        b.any = b.arrived = 0;
        ++b.generation;
    }
    pause(Until::next_pass, nullptr, 0);
    std::abort();
}

void* first_frame(char* stack) {
    auto** top = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(stack + kStack) & ~std::uintptr_t{15});
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(begin_fiber);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    return top;
}

void report_stuck(const std::vector<Fiber>& fibers) {
    for (const Fiber& fiber : fibers)
        if (!fiber.ended && fiber.thread.thread.x % 32 == 0)
            std::printf("stuck: block %u warp %u\n", fiber.thread.block.x, fiber.thread.thread.x / 32);
    std::fflush(stdout);
}

}  // namespace

extern "C" {

long emulator_flip_in = 0;               // bulk loads until one of which a bit flips; 0: none does
const void* emulator_flipped = nullptr;  // where that one came from
void emulator_flip(void* to, const void* from, int bytes) {
    if (emulator_flip_in == 0 || --emulator_flip_in != 0) return;
    const unsigned bit = static_cast<unsigned>(passes * 2654435761u) % (8 * bytes);
    static_cast<unsigned char*>(to)[bit / 8] ^= 1u << bit % 8;
    emulator_flipped = from;
}

void emulator_yield() { pause(Until::next_pass, nullptr, 0); }
void emulator_wait(const unsigned* word, unsigned least) {
    while (static_cast<int>(*word - least) < 0) pause(Until::least, word, least);
}
void emulator_wait_change(const unsigned* word, unsigned was) {
    while (*word == was) pause(Until::change, word, was);
}
void emulator_put(int rank, int peer, int channel, void* to, const void* from, std::uint64_t bytes) {
    ++puts[rank * 64 + peer];
    put_bytes[rank] += bytes;
    Wire& wire = wires[rank * 64 + peer];
    wire.free = std::max(wire.free, passes) + bytes * wire.byte_passes;
    push(rank, peer, channel, {false, to, from, bytes, wire.free, ++last_put});
}
void emulator_add(int rank, int peer, int channel, unsigned long long* word, unsigned long long amount) {
    push(rank, peer, channel, {true, word, nullptr, amount, 0, 0});
}
void emulator_quiet(int rank) {
    const std::uint64_t last = last_put;
    const auto is_on_its_way = [=](const Order& order) { return !order.adds && order.number <= last; };
    const auto holds_one = [&](int lane) {
        return lane / (64 * 4) == rank && std::any_of(orders[lane].begin(), orders[lane].end(), is_on_its_way);
    };
    while (std::any_of(busy.begin(), busy.end(), holds_one)) emulator_yield();
}
void emulator_windows(const std::uint64_t* addresses, int ranks) { std::copy_n(addresses, ranks, windows); }
void* emulator_address(int rank, int peer, const void* local) {
    return reinterpret_cast<void*>(reinterpret_cast<std::uint64_t>(local) - windows[rank] + windows[peer]);
}

void emulator_slow_link(int rank, int peer, std::uint64_t byte_passes) { wires[rank * 64 + peer].byte_passes = byte_passes; }
std::uint64_t emulator_put_bytes(int rank) { return put_bytes[rank]; }
void emulator_count_line(int rank) { ++lines[rank]; }
std::uint64_t emulator_lines(int rank) { return lines[rank]; }
std::uint64_t emulator_passes() { return passes; }
std::uint64_t emulator_puts(int rank, int peer) { return puts[rank * 64 + peer]; }

struct Launch {
    void (*kernel)(const void*);
    const void* arguments;
    int blocks, threads, shared_bytes;
    int after;  // the launch before it in its stream, -1: none
    int early;  // 1: it begins when all blocks of that let it; 0: when that has ended
};

// Drop puts on their way: their windows go away.
void emulator_forget() {
    for (const int lane : busy) orders[lane].clear();
    busy.clear();
}

std::uint64_t emulator_steps(int launch) { return most_steps[launch]; }
std::uint64_t emulator_block_steps(int launch) { return most_block_steps[launch]; }

// 0; 1 if not all of them have ended after `limit` passes over all threads.
int emulator_run(const Launch* launches, int count, std::uint64_t limit, unsigned seed) {
    std::size_t threads = 0, blocks = 0;
    for (int i = 0; i < count; ++i) {
        threads += static_cast<std::size_t>(launches[i].blocks) * launches[i].threads;
        blocks += launches[i].blocks;
    }
    std::vector<Fiber> fibers(threads);
    std::vector<Warp> warps(threads / 32, Warp{});
    std::vector<Block> of_block(blocks, Block{});
    std::vector<std::vector<unsigned char>> shared(blocks), mbarriers(blocks);
    std::vector<Launched> launched(count);
    auto* stacks =
        static_cast<char*>(mmap(nullptr, threads * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) return 2;
    std::size_t thread = 0, block = 0;
    for (int i = 0; i < count; ++i) {
        const Launch& launch = launches[i];
        const Launched* const before = launch.after < 0 ? nullptr : &launched[launch.after];
        const int rank = before == nullptr ? i : before->rank;
        launched[i] = {rank, before, launch.early != 0, unsigned(launch.blocks * launch.threads), 0, unsigned(launch.blocks), 0};
        for (int nth = 0; nth < launch.blocks; ++nth, ++block) {
            shared[block].assign(launch.shared_bytes + 128, 0xa5);  // nobody has cleared it
            const auto at = reinterpret_cast<std::uintptr_t>(shared[block].data());
            of_block[block].shared = reinterpret_cast<unsigned char*>((at + 127) & ~std::uintptr_t{127});
            mbarriers[block].assign(launch.shared_bytes / 8 + 1, 0);
            of_block[block].mbarriers = mbarriers[block].data();
            of_block[block].launch = &launched[i];
            of_block[block].threads = launch.threads;
            for (int t = 0; t < launch.threads; ++t, ++thread) {
                Fiber& fiber = fibers[thread];
                fiber = Fiber{};
                fiber.stack = first_frame(stacks + thread * kStack);
                fiber.thread = {{unsigned(t)}, {unsigned(nth)}, {unsigned(launch.blocks)}, &of_block[block], &warps[thread / 32], 0};
                fiber.kernel = launch.kernel;
                fiber.arguments = launch.arguments;
            }
        }
    }
    std::vector<std::uint64_t> held(count, 0);            // until when; 0: it has not let the next one begin
    std::vector<unsigned> here, lanes(threads / 32, 32);  // warps that may run in this pass; lanes of each that have not ended
    std::size_t left = threads;
    unsigned random = seed * 2654435761u + 1;
    for (const std::uint64_t end = passes + limit; left != 0 && passes < end; ++passes) {
        random = random * 1664525u + 1013904223u;
        for (unsigned n = 0; n < (random >> 20) % 6; ++n) move_one(random * (2 * n + 1) >> 3);
        here.clear();
        unsigned warp = 0;
        for (int i = 0; i < count; ++i) {
            Launched& launch = launched[i];
            if (held[i] == 0 && launch.letting == launch.blocks)  // what has let another begin may take long all the same
                held[i] = passes + (random * (2 * i + 1) >> 8) % 3 * 700;
            const unsigned behind = warp + launch.threads / 32;
            if (held[i] > passes || launch.ended == launch.threads || !launch.may_begin()) warp = behind;
            for (; warp != behind; ++warp)
                if (lanes[warp] != 0) here.push_back(warp);
        }
        const std::size_t first = here.empty() ? 0 : (random >> 8) % here.size();
        for (std::size_t n = 0; n < here.size(); ++n) {
            const unsigned i = here[(n + first) % here.size()];
            const bool slow = (random ^ (i * 40503u)) % 7 == 0;  // some warps are
            for (Fiber* fiber = &fibers[i * 32]; fiber != &fibers[i * 32] + 32; ++fiber) {
                if (fiber->ended || !fiber->ready() || (slow && fiber->until == Until::next_pass)) continue;
                running = fiber;
                emulator_thread = &fiber->thread;
                fiber->until = Until::next_pass;
                emulator_switch(&scheduler_stack, fiber->stack);
                if (!fiber->ended) continue;
                --left, --lanes[i];
                ++fiber->thread.of_block->launch->ended;
            }
        }
    }
    if (left != 0) report_stuck(fibers);
    most_steps.assign(count, 0), most_block_steps.assign(count, 0);
    thread = 0;
    for (int i = 0; i < count; ++i) {
        for (int nth = 0; nth < launches[i].blocks; ++nth) {
            std::uint64_t all = 0;
            for (int t = 0; t < launches[i].threads; ++t, ++thread) {
                const std::uint64_t steps = fibers[thread].thread.steps;
                all += steps;
                most_steps[i] = std::max(most_steps[i], steps);
            }
            most_block_steps[i] = std::max(most_block_steps[i], all);
        }
    }
    munmap(stacks, threads * kStack);
    return left != 0;
}

}  // extern "C"

}  // namespace emulator

namespace moecomm {

// For protocol/deadline.h.
unsigned long long now_ns() { return emulator::passes * 1000; }
// Polls in vain are as many as the order of threads makes them: of a wait, only the first counts.
void back_off(unsigned tries) {
    emulator::Thread& thread = *emulator::emulator_thread;
    if (tries == 1) thread.polled = thread.steps;
    thread.steps = thread.polled;
    emulator::emulator_yield();
}

}  // namespace moecomm
