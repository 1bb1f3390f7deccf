// What travels on a data connection: a header of 64 bytes, and up to kMostPayload bytes behind it.  Both carry a checksum.
// Only x86-64 and other little-endian machines are served: a field is sent as it lies in memory.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moecomm::rma {

constexpr size_t kMostPayload = 256 * 1024;

enum class FrameType : uint8_t {
    kPut = 1,     // payload goes to `region`, at `offset`
    kSignal = 2,  // add `value` to the word of `region` at `offset`
    kAck = 3,     // the first `value` operations are done
    kGet = 4,     // send `total` bytes of `region`, from `offset` on, for get number `value`
    kData = 5,    // payload is for get number `value`, at `offset` of it
    kBye = 6,     // nothing follows, and nothing more is answered
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
    uint64_t place;  // in the stream of frames of this connection, from 0
    uint32_t payload_check;
    uint32_t pads[2];
    uint32_t check;  // of all before it
};
static_assert(sizeof(Frame) == 64 && offsetof(Frame, check) == 60, "sent as it is");

void seal(Frame& frame, uint64_t place, const void* payload);  // fills magic, place and checks
// Throw Failure, naming the peer: kBadChecksum, or kPeerLied.
void check_header(const Frame& frame, uint64_t place, int peer);
void check_payload(const Frame& frame, const void* payload, int peer);

}  // namespace moecomm::rma
