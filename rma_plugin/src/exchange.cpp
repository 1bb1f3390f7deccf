#include "exchange.h"

namespace moecomm::rma {
namespace {

struct Card {
    uint32_t magic;
    uint32_t id;
    uint64_t bytes;
    uint64_t allocated;  // 0: no descriptor accompanies this card
    uint64_t offset;     // of the region in the allocation
};
static_assert(sizeof(Card) == 32, "sent as it is");
constexpr uint32_t kMagic = 0x6d726163;

void take_card(Region& region, Remote& remote, Channel& channel, int rank, Gpu* gpu, Deadline deadline) {
    Card card{};
    const Descriptor window = receive_message(channel.socket.get(), &card, sizeof card, deadline);
    if (card.magic != kMagic) throw Failure(Fault::kPeerLied, rank_name(rank) + " sends no card of a region");
    if (card.id != region.id) {
        throw Failure(Fault::kPeerLied, rank_name(rank) + " registers region " + std::to_string(card.id) + " where this rank registers " +
                                            std::to_string(region.id));
    }
    remote.bytes = card.bytes;
    if (card.allocated == 0 || gpu == nullptr || !region.on_gpu) return;
    if (!window.open() || !fits(card.offset, card.bytes, card.allocated)) {
        throw Failure(Fault::kPeerLied, rank_name(rank) + " gives a window that is none");
    }
    remote.mapped = gpu->map_window(window.get(), card.allocated);
    if (remote.mapped == nullptr) throw Failure(Fault::kNotReachable, "this GPU can't map memory of " + rank_name(rank));
    remote.mapped_bytes = card.allocated;
    remote.at = remote.mapped + card.offset;
}

}  // namespace

void exchange(Region& region, std::vector<Channel>& channels, int me, Gpu* gpu, Deadline deadline) {
    Gpu::Exported window;
    if (channels.size() > 1 && gpu != nullptr && region.on_gpu && !region.never_reset)
        window = gpu->export_window(region.base, region.bytes);
    const Card card{kMagic, region.id, region.bytes, window.fd.open() ? window.bytes : 0, window.offset};
    for (int rank = 0; rank < static_cast<int>(channels.size()); ++rank) {
        if (rank != me) send_message(channels[rank].socket.get(), &card, sizeof card, deadline, window.fd.get());
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
