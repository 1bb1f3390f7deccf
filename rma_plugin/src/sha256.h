// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), for the handshake.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace moecomm::rma {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
  public:
    void add(const void* data, size_t bytes);
    Digest end();  // call once

  private:
    void block(const uint8_t* data);

    uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t rest_[64] = {};
    uint64_t bytes_ = 0;
};

Digest hmac_sha256(const std::string& key, const void* data, size_t bytes);
bool same_digest(const Digest& a, const Digest& b);  // constant time

}  // namespace moecomm::rma
