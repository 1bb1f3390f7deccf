// Frame of a data connection: a header of 64 bytes, then up to kMostPayload bytes. Both carry a checksum.
// Fields are sent in memory order, so all hosts must be little-endian.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moecomm::rma {

constexpr size_t kMostPayload = 256 * 1024;

enum class FrameType : uint8_t {
    kPut = 1,     // store the payload in `region`, at `offset`
    kSignal = 2,  // add `value` to the word of `region` at `offset`
    kAck = 3,     // the first `value` operations are done
    kGet = 4,     // send `total` bytes of `region`, from `offset`, for get number `value`
    kData = 5,    // the payload belongs to get number `value`, at `offset` of it
    kBye = 6,     // nothing follows, and no further request is answered
};
constexpr uint8_t kEndsOperation = 1;  // flag

struct Frame {
    uint32_t magic;
    uint8_t version;
    FrameType type;
    uint8_t flags;
    uint8_t pad;
    uint32_t region;
    uint32_t payload;
    uint64_t offset;
    uint64_t value;
    uint64_t total;
    uint64_t place;  // index in this connection's stream of frames, from 0
    uint32_t payload_check;
    uint32_t pads[2];
    uint32_t check;  // checksum of all fields before it
};
static_assert(sizeof(Frame) == 64 && offsetof(Frame, check) == 60, "sent as it is");

void seal(Frame& frame, uint64_t place, const void* payload);  // fills magic, place and checks
// Both throw Failure (kBadChecksum or kPeerLied), naming the peer.
void check_header(const Frame& frame, uint64_t place, int peer);
void check_payload(const Frame& frame, const void* payload, int peer);

}  // namespace moecomm::rma
