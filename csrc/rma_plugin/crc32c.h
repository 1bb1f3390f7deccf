// CRC-32C (Castagnoli), of frames on their way between hosts.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moecomm::rma {

uint32_t crc32c(const void* data, size_t bytes);
uint32_t crc32c_by_table(const void* data, size_t bytes);  // what CPUs without the instruction do

}  // namespace moecomm::rma
