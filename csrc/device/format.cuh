// Properties of the formats of payloads.
#pragma once
#include "../protocol/args.h"

namespace moecomm {

// Formats of payloads: the names of moecomm/base/formats.py.
enum class Format : i32 { fp8, fp8_token, fp8_tensor, int8_token, int8_group, mxfp8, nvfp4, mxfp4 };

// Columns that share a scale; 0: all of a row, or of all rows.
MOECOMM_BOTH constexpr i32 group_of(Format format) {
    switch (format) {
        case Format::fp8:
        case Format::int8_group:
            return kQuantGroup;
        case Format::nvfp4:
            return 16;
        case Format::mxfp8:
        case Format::mxfp4:
            return 32;
        default:
            return 0;
    }
}
MOECOMM_BOTH constexpr bool is_scaled_by_row(Format format) { return format == Format::fp8_token || format == Format::int8_token; }
MOECOMM_BOTH constexpr bool is_int8(Format format) { return format == Format::int8_token || format == Format::int8_group; }
MOECOMM_BOTH constexpr bool is_e2m1(Format format) { return format == Format::nvfp4 || format == Format::mxfp4; }
MOECOMM_BOTH constexpr i32 bits_of(Format format) { return is_e2m1(format) ? 4 : 8; }
MOECOMM_BOTH constexpr float largest_of(Format format) { return is_int8(format) ? 127.0f : is_e2m1(format) ? 6.0f : 448.0f; }

}  // namespace moecomm
