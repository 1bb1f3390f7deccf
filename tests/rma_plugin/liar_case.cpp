// A rank that comes in as any other, and then breaks the protocol: in its mailbox, or in the card of a window.  The other must say so, by
// name, and store nothing.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "exchange.h"
#include "scenarios.h"

using namespace moecomm::rma;

namespace {

constexpr uint64_t kBytes = 1 << 16;

bool is_card(const std::string& lie) { return lie.compare(0, 5, "card-") == 0; }

void lie_by_mail(Mailbox& box, uint32_t window, const std::string& lie) {
    if (lie == "mail-signal") box.post({kBytes, 1, window, 0}, 0);
    if (lie == "mail-region") box.post({0, 1, 4000000000u, 0}, 0);
    if (lie == "mail-half") box.post({12, 1, window, 0}, 0);
    if (lie == "mail-wrap") box.post({~uint64_t{0} - 7, 1, window, 0}, 0);
    if (lie != "mail-count") return;
    uint64_t* shared;  // the ring: its first word is the count of what was posted
    std::memcpy(&shared, &box, sizeof shared);
    __atomic_store_n(shared, 1000000u, __ATOMIC_RELEASE);
}

// A card as exchange.cpp sends it, of the window, with one thing wrong in it.
struct Card {
    uint32_t magic, id;
    uint64_t bytes, allocated, offset;
};

void lie_about_window(Channel& channel, uint32_t id, const std::string& lie) {
    Card card{0x6d726163, id, kBytes, 0, 0};
    if (lie == "card-magic") card.magic = 1;
    if (lie == "card-order") card.id = id + 1;
    if (lie == "card-no-window" || lie == "card-beyond" || lie == "card-not-mapped") card.allocated = kBytes;
    if (lie == "card-beyond") card.offset = 1;
    const Descriptor nothing(::dup(0));
    const bool gives = lie == "card-beyond" || lie == "card-not-mapped";
    send_message(channel.socket.get(), &card, lie == "card-short" ? 8 : sizeof card, Clock::now() + kLong, gives ? nothing.get() : -1);
}

bool lie_to_it(const Options& options, World& world) {
    const std::string& lie = options.variant;
    const Listener listener = listen_here();
    std::memcpy(world.shared().handles[1], &listener.address, sizeof listener.address);
    world.barrier();
    std::vector<Address> addresses(2);
    for (int i = 0; i < 2; ++i) std::memcpy(&addresses[i], world.shared().handles[i], sizeof(Address));
    std::vector<Channel> channels = connect_all(listener, addresses, 1, Clock::now() + kLong);
    // The regions in the order of the other rank: the inline values of each queue, then the window.
    const auto inlines = static_cast<uint32_t>(options.contexts * options.ranks);
    for (uint32_t id = 0; id < inlines + (is_card(lie) ? 0 : 1); ++id) {
        Region region;
        region.id = id;
        region.bytes = kBytes;
        region.remote.resize(2);
        exchange(region, channels, 1, Gpu::current().get(), Clock::now() + kLong);
        unmap(region, Gpu::current().get());
    }
    if (is_card(lie)) lie_about_window(channels[0], inlines, lie);
    world.barrier();
    if (!is_card(lie)) lie_by_mail(*channels[0].to, inlines, lie);
    world.barrier();
    return true;
}

}  // namespace

bool liar(const Options& options, World& world, int rank) {
    if (rank == 1) return lie_to_it(options, world);
    Proxy proxy(options, world, rank);
    proxy.listen();
    require(proxy.connect() == abi::kSuccess, "connect: " + logged());
    proxy.open_contexts();
    char* window = allocate_window(kBytes);
    if (is_card(options.variant)) {
        void* region = nullptr;
        require(proxy.table.regMrSym(proxy.comm, window, kBytes, abi::kPtrCuda, 0, &region) != abi::kSuccess, "a false card was taken");
        require(region == nullptr, "an error has no region");
        world.barrier();
    } else {
        proxy.add(window, kBytes);
        proxy.start();
        world.barrier();
        const auto deadline = Clock::now() + kLong;
        while (!proxy.last_error() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        require(proxy.last_error(), "a lie was believed");
    }
    world.barrier();
    for (uint64_t i = 0; i < kBytes; ++i) require(static_cast<unsigned char>(window[i]) == kUntouched, "a lie was stored");
    std::printf("%s", logged().c_str());
    return true;
}
