#include "sha256.h"

#include <cstring>

namespace moecomm::rma {
namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turn(uint32_t word, int by) { return word >> by | word << (32 - by); }

}  // namespace

void Sha256::block(const uint8_t* data) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
        w[i] = uint32_t{data[4 * i]} << 24 | uint32_t{data[4 * i + 1]} << 16 | uint32_t{data[4 * i + 2]} << 8 | data[4 * i + 3];
    }
    for (int i = 16; i < 64; ++i) {
        const uint32_t low = turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3;
        const uint32_t high = turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    uint32_t a = state_[0], b = state_[1], c = state_[2], d = state_[3], e = state_[4], f = state_[5], g = state_[6], h = state_[7];
    for (int i = 0; i < 64; ++i) {
        const uint32_t one = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
        const uint32_t two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state_[i] += sums[i];
}

void Sha256::add(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < bytes; ++i) {
        rest_[bytes_++ % 64] = from[i];
        if (bytes_ % 64 == 0) block(rest_);
    }
}

Digest Sha256::end() {
    const uint64_t bits = bytes_ * 8;
    const uint8_t one = 0x80, zero = 0;
    add(&one, 1);
    while (bytes_ % 64 != 56) add(&zero, 1);
    uint8_t length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
    add(length, sizeof length);
    Digest digest;
    for (int i = 0; i < 32; ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
}

Digest hmac_sha256(const std::string& key, const void* data, size_t bytes) {
    uint8_t block[64] = {};
    if (key.size() > sizeof block) {
        Sha256 shorter;
        shorter.add(key.data(), key.size());
        const Digest digest = shorter.end();
        std::memcpy(block, digest.data(), digest.size());
    } else {
        std::memcpy(block, key.data(), key.size());
    }
    uint8_t inner_key[64], outer_key[64];
    for (int i = 0; i < 64; ++i) inner_key[i] = block[i] ^ 0x36, outer_key[i] = block[i] ^ 0x5c;
    Sha256 inner, outer;
    inner.add(inner_key, sizeof inner_key);
    inner.add(data, bytes);
    const Digest digest = inner.end();
    outer.add(outer_key, sizeof outer_key);
    outer.add(digest.data(), digest.size());
    return outer.end();
}

bool same_digest(const Digest& a, const Digest& b) {
    uint8_t different = 0;
    for (size_t i = 0; i < a.size(); ++i) different |= a[i] ^ b[i];
    return different == 0;
}

}  // namespace moecomm::rma
