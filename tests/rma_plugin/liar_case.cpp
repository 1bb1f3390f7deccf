// A rank that knows the secret, comes in as any other, and then breaks the protocol.  The other must say so, by name, and store nothing.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "crc32c.h"
#include "exchange.h"
#include "frame.h"
#include "proxy.h"
#include "scenarios.h"
#include "settings.h"

using namespace moecomm::rma;

namespace {

constexpr uint64_t kBytes = 1 << 16;

class Liar {
  public:
    Liar(Channel& channel, uint32_t window) : channel_(channel), window_(window) {}

    void tell(const std::string& lie) {
        static const std::map<std::string, void (Liar::*)()> all = {
            {"magic", &Liar::magic},
            {"header", &Liar::header},
            {"payload", &Liar::payload},
            {"length", &Liar::length},
            {"offset", &Liar::offset},
            {"wrap", &Liar::wrap},
            {"region", &Liar::region},
            {"type", &Liar::type},
            {"order", &Liar::order},
            {"signal", &Liar::signal},
            {"signal-region", &Liar::signal_region},
            {"signal-half", &Liar::signal_half},
            {"ack", &Liar::ack},
            {"data", &Liar::data},
            {"get", &Liar::get},
            {"get-flood", &Liar::get_flood},
            {"half", &Liar::half},
            {"noise", &Liar::noise},
            {"mail-count", &Liar::mail_count},
            {"mail-signal", &Liar::mail_signal},
        };
        (this->*all.at(lie))();
    }

  private:
    void send(Frame frame, const void* body = nullptr) {
        seal(frame, place_++, body);
        raw(&frame, sizeof frame);
        raw(body, frame.payload);
    }
    void raw(const void* bytes, size_t count) {
        if (count > 0) ::send(channel_.data.get(), bytes, count, MSG_NOSIGNAL);
    }
    Frame put(uint64_t at, uint32_t bytes) const {
        Frame frame{};
        frame.type = FrameType::kPut;
        frame.region = window_;
        frame.offset = at;
        frame.payload = bytes;
        frame.flags = kEndsOperation;
        return frame;
    }
    void reseal(Frame& frame) { frame.check = crc32c(&frame, offsetof(Frame, check)); }

    void magic() {
        Frame frame = put(0, 8);
        seal(frame, 0, body_);
        frame.magic ^= 1;
        raw(&frame, sizeof frame);
    }
    void header() {
        Frame frame = put(0, 8);
        seal(frame, 0, body_);
        frame.offset ^= 64;
        raw(&frame, sizeof frame);
        raw(body_, 8);
    }
    void payload() {
        Frame frame = put(0, 8);
        seal(frame, 0, body_);
        raw(&frame, sizeof frame);
        raw("12345678", 8);
    }
    void length() {
        Frame frame = put(0, 8);
        seal(frame, 0, body_);
        frame.payload = 0xfffffff0u;
        reseal(frame);
        raw(&frame, sizeof frame);
    }
    void offset() { send(put(kBytes - 4, 8), body_); }
    void wrap() { send(put(~uint64_t{0} - 3, 8), body_); }
    void region() {
        Frame frame = put(0, 8);
        frame.region = 1000;
        send(frame, body_);
    }
    void type() {
        Frame frame = put(0, 0);
        frame.type = static_cast<FrameType>(77);
        send(frame);
    }
    void order() {
        place_ = 5;
        send(put(0, 8), body_);
    }
    void signal_at(uint32_t region, uint64_t at) {
        Frame frame = put(at, 0);
        frame.type = FrameType::kSignal;
        frame.region = region;
        frame.value = 1;
        send(frame);
    }
    void signal() { signal_at(window_, kBytes); }
    void signal_region() { signal_at(4000000000u, 0); }
    void signal_half() { signal_at(window_, 12); }
    void ack() {
        Frame frame{};
        frame.type = FrameType::kAck;
        frame.value = 9;
        send(frame);
    }
    void data() {
        Frame frame = put(0, 8);
        frame.type = FrameType::kData;
        send(frame, body_);
    }
    void get_from(uint64_t at, uint64_t bytes, uint64_t number) {
        Frame frame{};
        frame.type = FrameType::kGet;
        frame.region = window_;
        frame.offset = at;
        frame.total = bytes;
        frame.value = number;
        send(frame);
    }
    void get() { get_from(kBytes - 1, 2, 0); }
    void get_flood() {  // and takes no answer
        for (uint64_t i = 0; i < 5000; ++i) get_from(0, kBytes, i);
    }
    void half() {
        Frame frame = put(0, 8);
        seal(frame, 0, body_);
        raw(&frame, 30);
        channel_.data.reset();
    }
    void noise() {
        Random random(7);
        for (int i = 0; i < 1000; ++i) {
            const uint64_t word = random.next();
            raw(&word, sizeof word);
        }
    }
    void mail_count() {
        for (uint64_t i = 0; i < 3 * Mailbox::kPlaces; ++i) {
            // The shared words are the ring's own: the first is the count of what was posted.
            Mailbox& box = *channel_.to;
            uint64_t* shared;
            std::memcpy(&shared, &box, sizeof shared);
            __atomic_store_n(shared, 1000000u, __ATOMIC_RELEASE);
        }
    }
    void mail_signal() { channel_.to->post({kBytes, 1, window_, 0}, 0); }

    Channel& channel_;
    uint32_t window_;
    uint64_t place_ = 0;
    const char body_[8] = {1, 1, 1, 1, 1, 1, 1, 1};
};

// A card as exchange.cpp sends it, of the window, with one thing wrong in it.
struct Card {
    uint32_t magic, id;
    uint64_t bytes, allocated, offset;
    uint32_t pad, check;
};

void lie_about_window(Channel& channel, uint32_t id, const std::string& lie) {
    Card card{0x6d726163, id, kBytes, 0, 0, 0, 0};
    if (lie == "card-magic") card.magic = 1;
    if (lie == "card-order") card.id = id + 1;
    if (lie == "card-no-window") card.allocated = kBytes;
    if (lie == "card-beyond") {
        card.allocated = kBytes;
        card.offset = 1;
    }
    card.check = crc32c(&card, offsetof(Card, check));
    if (lie == "card-check") ++card.bytes;
    const Descriptor nothing(::dup(0));
    send_all(channel.control.get(), &card, sizeof card, Clock::now() + std::chrono::seconds(5), lie == "card-beyond" ? nothing.get() : -1);
}

bool lie_to_it(const Options& options, World& world, const std::string& lie) {
    Settings settings = read_settings();
    Listener listener = listen_everywhere(settings);
    std::memcpy(world.shared().handles[1], &listener.address, sizeof listener.address);
    world.barrier();
    std::vector<Address> addresses(2);
    for (int i = 0; i < 2; ++i) std::memcpy(&addresses[i], world.shared().handles[i], sizeof(Address));
    std::vector<Channel> channels = connect_all(listener, addresses, {settings.secret, 42, 2, 1}, settings.timeout);
    // The regions in the order of the other rank: the inline values of each queue, then the window.
    const auto inlines = static_cast<uint32_t>(options.contexts * options.ranks);
    const bool card = lie.compare(0, 5, "card-") == 0;
    for (uint32_t id = 0; id < inlines + (card ? 0 : 1); ++id) {
        Region region;
        region.id = id;
        region.bytes = kBytes;
        region.remote.resize(2);
        exchange(region, channels, 1, nullptr, Clock::now() + std::chrono::seconds(10));
    }
    if (card) lie_about_window(channels[0], inlines, lie);
    world.barrier();
    if (!card) Liar(channels[0], inlines).tell(lie);
    world.barrier();
    return true;
}

}  // namespace

bool liar(const Options& options, World& world, int rank, const std::string& lie) {
    use_cuda_on_this_thread(options);
    if (rank == 1) return lie_to_it(options, world, lie);
    Proxy proxy(options, world, rank);
    require(proxy.listen() == abi::kSuccess, "listen: " + logged());
    world.barrier();
    require(proxy.connect() == abi::kSuccess, "connect: " + logged());
    proxy.open_contexts();
    char* window = allocate(options, kBytes, Sharing::kWindow);
    if (lie.compare(0, 5, "card-") == 0) {
        void* region = nullptr;
        const int type = options.cuda() ? abi::kPtrCuda : abi::kPtrHost;
        require(proxy.table.reg_mr(proxy.comm, window, kBytes, type, 0, &region) == abi::kRemoteError, "a false card was taken");
        std::printf("%s", logged().c_str());
        world.barrier();
        world.barrier();
        return region == nullptr;
    }
    proxy.add(window, kBytes);
    proxy.start();
    world.barrier();
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    while (!proxy.last_error() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const bool found = proxy.last_error();
    world.barrier();
    for (uint64_t i = 0; i < kBytes; ++i) require(static_cast<unsigned char>(window[i]) == kUntouched, "a lie was stored");
    std::printf("%s", logged().c_str());
    return found;
}
