#include "exchange.h"

#include <algorithm>

#include "crc32c.h"
#include "log.h"

namespace moecomm::rma {
namespace {

struct Card {
    uint32_t magic;
    uint32_t id;
    uint64_t bytes;
    uint64_t allocated;  // 0: no descriptor accompanies this card
    uint64_t offset;     // of the region in the allocation
    uint32_t pad;
    uint32_t check;
};
static_assert(sizeof(Card) == 40 && offsetof(Card, check) == 36, "sent as it is");
constexpr uint32_t kMagic = 0x6d726163;

void take_card(Region& region, Remote& remote, Channel& channel, int rank, Gpu* gpu, Deadline deadline) {
    Card card{};
    const std::vector<Descriptor> came = receive_all(channel.control.get(), &card, sizeof card, deadline);
    if (card.magic != kMagic || card.check != crc32c(&card, offsetof(Card, check))) {
        throw Failure(Fault::kPeerLied, rank_name(rank) + " sends no card of a region");
    }
    if (card.id != region.id) {
        throw Failure(Fault::kPeerLied, rank_name(rank) + " registers region " + std::to_string(card.id) + " where this rank registers " +
                                            std::to_string(region.id));
    }
    remote.bytes = card.bytes;
    if (card.allocated == 0 || gpu == nullptr || !region.on_gpu) return;
    if (came.size() != 1 || !fits(card.offset, card.bytes, card.allocated)) {
        throw Failure(Fault::kPeerLied, rank_name(rank) + " gives a window that is none");
    }
    remote.mapped = gpu->map_window(came[0].get(), card.allocated);
    if (remote.mapped == nullptr) {
        inform("this GPU can't map memory of " + rank_name(rank) + ": bytes for it go through a socket");
        return;
    }
    remote.mapped_bytes = card.allocated;
    remote.at = remote.mapped + card.offset;
}

}  // namespace

void exchange(Region& region, std::vector<Channel>& channels, int me, Gpu* gpu, Deadline deadline) {
    const bool neighbours =
        std::any_of(channels.begin(), channels.end(), [](const Channel& c) { return c.control.open() && c.route == Route::kLocal; });
    Gpu::Exported window;
    if (neighbours && gpu != nullptr && region.on_gpu && !region.never_reset) window = gpu->export_window(region.base, region.bytes);
    Card card{kMagic, region.id, region.bytes, window.bytes, window.offset, 0, 0};
    for (int rank = 0; rank < static_cast<int>(channels.size()); ++rank) {
        if (rank == me) continue;
        const bool gives = channels[rank].route == Route::kLocal && window.fd.open();
        card.allocated = gives ? window.bytes : 0;
        card.check = crc32c(&card, offsetof(Card, check));
        send_all(channels[rank].control.get(), &card, sizeof card, deadline, gives ? window.fd.get() : -1);
    }
    for (int rank = 0; rank < static_cast<int>(channels.size()); ++rank) {
        if (rank == me) continue;
        try {
            take_card(region, region.remote[rank], channels[rank], rank, gpu, deadline);
        } catch (const Failure& failure) {
            throw Failure(failure.fault(), "registering memory with " + rank_name(rank) + ": " + failure.text());
        }
    }
}

void unmap(Region& region, Gpu* gpu) {
    for (Remote& remote : region.remote) {
        if (remote.mapped != nullptr) gpu->unmap_window(remote.mapped, remote.mapped_bytes);
        remote.mapped = remote.at = nullptr;
    }
}

}  // namespace moecomm::rma
