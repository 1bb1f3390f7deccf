#include "frame.h"

#include "crc32c.h"
#include "failure.h"

namespace moecomm::rma {
namespace {

constexpr uint32_t kMagic = 0x6d726166;
constexpr uint8_t kVersion = 1;

}  // namespace

void seal(Frame& frame, uint64_t place, const void* payload) {
    frame.magic = kMagic;
    frame.version = kVersion;
    frame.place = place;
    frame.payload_check = frame.payload == 0 ? 0 : crc32c(payload, frame.payload);
    frame.check = crc32c(&frame, offsetof(Frame, check));
}

void check_header(const Frame& frame, uint64_t place, int peer) {
    const std::string who = rank_name(peer);
    if (frame.magic != kMagic || frame.version != kVersion) throw Failure(Fault::kPeerLied, who + " sends what is no frame");
    if (frame.check != crc32c(&frame, offsetof(Frame, check))) throw Failure(Fault::kBadChecksum, "a header from " + who + " is damaged");
    if (frame.place != place) throw Failure(Fault::kPeerLied, who + " sends frames out of their order");
    const bool carries = frame.type == FrameType::kPut || frame.type == FrameType::kData;
    if (frame.type < FrameType::kPut || frame.type > FrameType::kBye) throw Failure(Fault::kPeerLied, who + " sends an unknown frame");
    if (frame.payload > (carries ? kMostPayload : 0)) throw Failure(Fault::kPeerLied, who + " sends a frame of an impossible length");
}

void check_payload(const Frame& frame, const void* payload, int peer) {
    if (frame.payload_check != (frame.payload == 0 ? 0 : crc32c(payload, frame.payload))) {
        throw Failure(Fault::kBadChecksum, "a payload from " + rank_name(peer) + " is damaged");
    }
}

}  // namespace moecomm::rma
