#include "handshake.h"

#include <cstring>

#include "failure.h"

namespace moecomm::rma {
namespace {

constexpr uint32_t kMagic = 0x6d72616d;

Digest prove(const Identity& identity, char side, const Hello& hello, const uint8_t* nonce) {
    uint8_t text[1 + sizeof(Hello) + 32];
    text[0] = static_cast<uint8_t>(side);
    std::memcpy(text + 1, &hello, sizeof hello);
    std::memcpy(text + 1 + sizeof hello, nonce, 32);
    return hmac_sha256(identity.secret, text, sizeof text);
}

}  // namespace

void introduce(int socket, const Identity& identity, int to, Purpose purpose, Deadline deadline) {
    Hello hello{};
    hello.magic = kMagic;
    hello.purpose = static_cast<uint32_t>(purpose);
    hello.comm = identity.comm;
    hello.ranks = static_cast<uint32_t>(identity.ranks);
    hello.from = static_cast<uint32_t>(identity.me);
    hello.to = static_cast<uint32_t>(to);
    hello.version = kProtocolVersion;
    fill_random(hello.nonce, sizeof hello.nonce);
    send_all(socket, &hello, sizeof hello, deadline);
    Challenge challenge{};
    receive_all(socket, &challenge, sizeof challenge, deadline);
    if (challenge.magic != kMagic || challenge.version != kProtocolVersion) {
        throw Failure(Fault::kPeerLied, "it does not speak this protocol");
    }
    const Digest proof = prove(identity, 'c', hello, challenge.nonce);
    send_all(socket, proof.data(), proof.size(), deadline);
    Verdict verdict{};
    receive_all(socket, &verdict, sizeof verdict, deadline);
    if (verdict.magic != kMagic) throw Failure(Fault::kPeerLied, "it does not speak this protocol");
    if (verdict.answer == Answer::kRefused) throw Failure(Fault::kConnectFailed, "it refused the connection");
    if (verdict.answer != Answer::kAccepted || !same_digest(verdict.proof, prove(identity, 'a', hello, challenge.nonce))) {
        throw Failure(Fault::kWrongSecret, "it has another MOECOMM_JOB_SECRET");
    }
}

Reception::State Reception::refuse(const char* reason, Answer answer) {
    why = reason;
    const Verdict verdict{kMagic, answer, {}};
    try {
        if (challenged_) send_some(socket.get(), &verdict, sizeof verdict, nullptr, 0);
    } catch (const Failure&) {  // the peer is gone
    }
    socket.reset();
    return State::kRefused;
}

Reception::State Reception::wait() { return Clock::now() < deadline_ ? State::kWaiting : refuse("it did not say in time who it is"); }

bool Reception::read(void* to, size_t bytes) {
    while (got_ < bytes) {
        const long some = receive_some(socket.get(), static_cast<char*>(to) + got_, bytes - got_);
        if (some == 0) closed_ = true;
        if (some <= 0) return false;
        got_ += static_cast<size_t>(some);
    }
    got_ = 0;
    return true;
}

Reception::State Reception::step(const Identity& identity) try {
    if (!challenged_) {
        if (!read(&hello, sizeof hello)) return closed_ ? refuse("it left before it said who it is") : wait();
        if (hello.magic != kMagic) return refuse("it does not speak this protocol");
        if (hello.version != kProtocolVersion) return refuse("it speaks another version of this protocol");
        if (hello.comm != identity.comm || hello.ranks != static_cast<uint32_t>(identity.ranks)) {
            return refuse("it belongs to another communicator");
        }
        if (hello.to != static_cast<uint32_t>(identity.me) || hello.from >= hello.ranks || hello.from == hello.to || hello.purpose > 1) {
            return refuse("it says that it is an impossible rank");
        }
        challenge_.magic = kMagic;
        challenge_.version = kProtocolVersion;
        fill_random(challenge_.nonce, sizeof challenge_.nonce);
        if (send_some(socket.get(), &challenge_, sizeof challenge_, nullptr, 0) != sizeof challenge_) return refuse("it does not read");
        challenged_ = true;
    }
    if (!read(proof_.data(), proof_.size())) return closed_ ? refuse("it left: it has another secret") : wait();
    if (!same_digest(proof_, prove(identity, 'c', hello, challenge_.nonce))) return refuse("it has another secret", Answer::kWrongProof);
    const Verdict verdict{kMagic, Answer::kAccepted, prove(identity, 'a', hello, challenge_.nonce)};
    if (send_some(socket.get(), &verdict, sizeof verdict, nullptr, 0) != sizeof verdict) return refuse("it does not read");
    return State::kAccepted;
} catch (const Failure&) {
    return refuse("it left");
}

}  // namespace moecomm::rma
