// Calls that might wait, and must not hold up NCCL's thread; and signals that wait for longer than their memory is registered.
#include "copies.h"
#include "scenarios.h"

// A GPU that ends no copy for a while.  NCCL's thread gives it as many as there is room for, and has all that it needs for them.
bool crowded(const Options& options, World& world, int rank) {
    Open open(options, world, rank);
    world.barrier();
    constexpr int kRoom = moecomm::rma::CopyStream::kRoom;
    fake_hold_copies(true);
    open.proxy.start();
    if (rank == 0) {
        Operation one = open.put(8);
        one.kind = Operation::kPutInline;
        open.proxy.post(0, 0, one);  // one copy, and others to ourselves are two: there is room left for half of the last
        for (int i = 0; i < 2 * kRoom; ++i) {
            for (int peer = 0; peer < options.ranks; ++peer) open.proxy.post(0, peer, open.put(100));
        }
        const auto deadline = Clock::now() + kLong;
        while (fake_open_copies() < 2 * kRoom - 1 && Clock::now() < deadline) std::this_thread::yield();
        require(fake_open_copies() == 2 * kRoom - 1, "copies to two ranks are open: " + std::to_string(fake_open_copies()));
    }
    fake_hold_copies(false);
    require(open.proxy.wait_all(), "puts failed: " + logged());
    world.barrier();
    open.proxy.close();
    return open.proxy.longest_call() < kBlocked;
}

// The last rank registers nothing.  What the others had mapped of each other by then is given back while their threads are at work.
bool half_registered(const Options& options, World& world, int rank) {
    Open open(options, world, rank);
    open.proxy.start();
    const int last = options.ranks - 1, mapped = fake_mapped_windows();
    require(mapped > last, "windows of all others are mapped beside our own");
    if (rank < last) {
        char* memory = allocate_window(4096);
        void* region = nullptr;
        require(open.proxy.table.regMrSym(open.proxy.comm, memory, 4096, abi::kPtrCuda, 0, &region) == abi::kRemoteError, "regMrSym");
        require(region == nullptr && names("ConnectFailed: registering memory with rank 2: nothing came"), "its error");
        require(fake_mapped_windows() == mapped + 1, "only the memory itself is still mapped");
    }
    world.barrier();
    for (int peer = 0; peer < options.ranks; ++peer) open.proxy.post(0, peer, open.put(100));
    require(open.proxy.wait_all(), "puts after that: " + logged());
    world.barrier();
    open.proxy.close();
    return true;
}

// The memory of the first of two signals is given back while that one waits: before rank 0 looks ("unread"), or behind copies of a put to
// ourselves ("own").
bool late_signal(const Options& options, World& world, int rank) {
    const bool own = options.variant == "own";
    Open open(options, world, rank);
    static uint64_t first = 0, second = 0;
    void* gone = open.proxy.add(reinterpret_cast<char*>(&first), sizeof first, 0, abi::kPtrHost);
    void* stays = open.proxy.add(reinterpret_cast<char*>(&second), sizeof second, 0, abi::kPtrHost);
    if (rank == 0) fake_hold_copies(own);
    if (rank == 1 || own) open.proxy.start();
    world.barrier();
    if (rank == (own ? 0 : 1)) {
        for (void* signals : {gone, stays}) {
            Operation put = open.put(1000);
            put.signal = signals;
            open.proxy.post(0, 0, put);
        }
        if (!own) require(open.proxy.wait_all(), "puts failed: " + logged());
    }
    if (!own) world.barrier();
    if (rank == 0) {
        const auto deadline = Clock::now() + kLong;
        while (own && fake_open_copies() < 4 && Clock::now() < deadline) std::this_thread::yield();  // through the host
        open.proxy.remove(gone);
        fake_hold_copies(false);
        if (!own) open.proxy.start();
        const auto came = [] { return __atomic_load_n(&second, __ATOMIC_ACQUIRE) != 0; };
        while (!came() && !open.proxy.last_error() && Clock::now() < deadline) std::this_thread::yield();
        require(second == 1, "the signal behind the dropped one: " + logged());
        require(first == 0, "a signal was written to memory that was given back");
        require(open.proxy.wait_all() && !open.proxy.last_error(), "puts failed: " + logged());
    }
    world.barrier();
    open.proxy.close();
    return true;
}

// Memory is given back while a copy into it is under way: that waits for the copy.
bool copied_into(const Options& options, World& world, int rank) {
    Open open(options, world, rank);
    open.proxy.start();
    void* gone = open.proxy.add(allocate_window(4096), 4096);
    world.barrier();
    fake_hold_copies(true);
    Operation put = open.put(1000);
    put.to = gone;
    open.proxy.post(0, rank, put);
    const auto deadline = Clock::now() + kLong;
    while (fake_open_copies() < 2 && Clock::now() < deadline) std::this_thread::yield();  // through the host
    std::atomic<bool> given_back{false};
    std::thread giving([&] {
        open.proxy.remove(gone);
        given_back = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    require(!given_back, "memory was given back with a copy under way");
    fake_hold_copies(false);
    giving.join();
    require(open.proxy.wait_all(), "puts failed: " + logged());
    world.barrier();
    open.proxy.close();
    return true;
}
