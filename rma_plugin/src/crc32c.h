// CRC-32C (Castagnoli) of frames.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moecomm::rma {

uint32_t crc32c(const void* data, size_t bytes);
uint32_t crc32c_by_table(const void* data, size_t bytes);  // fallback for CPUs without the instruction

}  // namespace moecomm::rma
