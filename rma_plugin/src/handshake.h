// Handshake: both ends of a connection prove that they know the job's secret, and state their ranks.
//   connecting side: Hello(rank, purpose, nonce)      accepting side: Challenge(nonce)
//   connecting side: Proof over both nonces           accepting side: Verdict(answer, proof over both nonces)
// Anyone can connect, so the accepting side proves nothing before it has checked the other side's proof: without the secret, nobody gets a
// digest to test guesses against. The connecting side connects to an address that the job itself has published. The handshake keeps
// strangers out. It does not encrypt or authenticate the frames that follow.
#pragma once
#include <string>

#include "sha256.h"
#include "socket.h"

namespace moecomm::rma {

constexpr uint32_t kProtocolVersion = 2;  // version of the handshake and of the frames

enum class Purpose : uint32_t { kControl = 0, kData = 1 };

struct Hello {
    uint32_t magic;
    uint32_t purpose;
    uint64_t comm;  // NCCL's communicator id
    uint32_t ranks;
    uint32_t from, to;
    uint32_t version;
    uint8_t nonce[32];
};
struct Challenge {
    uint32_t magic;
    uint32_t version;
    uint8_t nonce[32];
};
enum class Answer : uint32_t { kRefused = 0, kAccepted = 1, kWrongProof = 2 };
struct Verdict {
    uint32_t magic;
    Answer answer;
    Digest proof;  // zeros unless accepted
};
static_assert(sizeof(Hello) == 64 && sizeof(Challenge) == 40 && sizeof(Verdict) == 40, "sent as they are");

// One side's identity: rank `me` of `ranks` in communicator `comm`.
struct Identity {
    std::string secret;
    uint64_t comm;
    int ranks;
    int me;
};

// The connecting side. Waits for the accepting side until the deadline. Throws Failure.
void introduce(int socket, const Identity& identity, int to, Purpose purpose, Deadline deadline);

// Time limit of a reception. A rank sends its Hello when it has connected, and its Proof when it is challenged: one round trip, with margin
// for packet loss and busy hosts. A connection that takes longer is no rank and gives up its place.
constexpr auto kLongestReception = std::chrono::seconds(5);

// The accepting side. Never waits, and refuses a connection without proof at the time limit, so that a silent stranger delays no rank.
class Reception {
  public:
    explicit Reception(Descriptor socket) : socket(std::move(socket)), deadline_(Clock::now() + kLongestReception) {}
    enum class State { kWaiting, kAccepted, kRefused };
    State step(const Identity& identity);

    Descriptor socket;
    Hello hello{};         // valid once accepted
    const char* why = "";  // reason of the refusal

  private:
    State refuse(const char* reason, Answer answer = Answer::kRefused);
    State wait();
    bool read(void* to, size_t bytes);

    Deadline deadline_;
    bool challenged_ = false;
    bool closed_ = false;
    size_t got_ = 0;
    Challenge challenge_{};
    Digest proof_{};
};

}  // namespace moecomm::rma
