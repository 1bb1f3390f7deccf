#include "crc32c.h"

#include <cstring>

namespace moecomm::rma {
namespace {

struct Table {
    uint32_t entry[256];
    constexpr Table() : entry() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
            entry[i] = crc;
        }
    }
};
constexpr Table kTable;

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_by_instruction(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    unsigned long long crc = 0xffffffffu;
    for (; bytes >= 8; bytes -= 8, from += 8) {
        unsigned long long word;
        std::memcpy(&word, from, sizeof word);
        crc = __builtin_ia32_crc32di(crc, word);
    }
    auto rest = static_cast<uint32_t>(crc);
    for (; bytes > 0; --bytes, ++from) rest = __builtin_ia32_crc32qi(rest, *from);
    return ~rest;
}
#endif

}  // namespace

uint32_t crc32c_by_table(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < bytes; ++i) crc = crc >> 8 ^ kTable.entry[(crc ^ from[i]) & 255];
    return ~crc;
}

uint32_t crc32c(const void* data, size_t bytes) {
#if defined(__x86_64__)
    static const bool there = __builtin_cpu_supports("sse4.2") != 0;
    if (there) return crc32c_by_instruction(data, bytes);
#endif
    return crc32c_by_table(data, bytes);
}

}  // namespace moecomm::rma
