// Two ends of a connection prove to each other that they know the job's secret, and say who they are.
//   connecting: Hello(rank, purpose, nonce)          accepting: Challenge(nonce)
//   connecting: Proof over both nonces               accepting: Verdict(answer, proof over both nonces)
// Anybody can connect, so the accepting side proves nothing before it has checked the other's proof: nobody without the secret gets a
// digest to try secrets against.  The connecting side comes to an address that the job itself has handed out.
// It keeps strangers out.  It does not hide or protect what follows from somebody who can change packets on their way.
#pragma once
#include <string>

#include "sha256.h"
#include "socket.h"

namespace moecomm::rma {

constexpr uint32_t kProtocolVersion = 2;  // of the handshake, and of what follows it

enum class Purpose : uint32_t { kControl = 0, kData = 1 };

struct Hello {
    uint32_t magic;
    uint32_t purpose;
    uint64_t comm;  // NCCL's number of the communicator
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

// Of both sides: "rank `me` of `ranks` in communicator `comm`".
struct Identity {
    std::string secret;
    uint64_t comm;
    int ranks;
    int me;
};

// The side that connects: waits for the other, until the deadline.  Throws Failure.
void introduce(int socket, const Identity& identity, int to, Purpose purpose, Deadline deadline);

// A rank speaks as soon as it has connected, and once more when it is answered: this is one round trip, with room for packets that are
// lost and for hosts that are busy.  Who takes longer is no rank, and has to make room for one.
constexpr auto kLongestReception = std::chrono::seconds(5);

// The side that accepts: never waits, and refuses who has not proved himself in time, so that a stranger who connects and stays silent
// holds nobody up.
class Reception {
  public:
    explicit Reception(Descriptor socket) : socket(std::move(socket)), deadline_(Clock::now() + kLongestReception) {}
    enum class State { kWaiting, kAccepted, kRefused };
    State step(const Identity& identity);

    Descriptor socket;
    Hello hello{};         // valid once accepted
    const char* why = "";  // it was refused

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
