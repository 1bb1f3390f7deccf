// wgmma (sm_90a): a warpgroup multiplies 64 rows of a by n rows of b, 32 bytes of each: accum[64][n] += a b^T, in fp32.
//
// Both operands are in shared memory with the layout of a tensor load with 128-byte swizzle: rows of 128 bytes, 8 rows an atom of 1024
// bytes, aligned to 1024 bytes.  Lane l of warp w of the warpgroup holds, for the j-th 8 rows of b,
//     accum[4 j + {0, 1}]: row 16 w + l / 4 of a,      rows 8 j + 2 (l % 4) + {0, 1} of b,
//     accum[4 j + {2, 3}]: row 16 w + l / 4 + 8 of a,  the same rows of b.
//
// All functions are called by the whole warpgroup and cannot fail.
#pragma once
#include "../device/bulk.cuh"

namespace moecomm {

constexpr i32 kAtomBytes = 1024;

// The matrix descriptor of an operand.  Bits 0-13: address, 16-29: not used with this swizzle, 32-45: stride between atoms, all in units of
// 16 bytes; 62-63: 1, swizzle of 128 bytes.  operand_at() makes the low word, which alone changes: 32 bytes further on is 2 more.
MOECOMM_FN u32 operand_at(u32 address) { return (address & 0x3ffffu) >> 4 | 1u << 16; }
MOECOMM_FN u64 operand(u32 low) { return static_cast<u64>(1u << 30 | kAtomBytes >> 4) << 32 | low; }

// wgmma.fence: call it before the first product, and after accumulator registers were read or written.
MOECOMM_FN void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MOECOMM_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last `groups` committed groups are complete.
template <i32 groups>
MOECOMM_FN void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// clang-format off
#define MOECOMM_SUMS(kind, i) \
    kind(accum[i]), kind(accum[i + 1]), kind(accum[i + 2]), kind(accum[i + 3]), \
    kind(accum[i + 4]), kind(accum[i + 5]), kind(accum[i + 6]), kind(accum[i + 7])
#define MOECOMM_REGISTERS_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOECOMM_SUMS_1(kind) MOECOMM_SUMS(kind, 0)
#define MOECOMM_REGISTERS_2 MOECOMM_REGISTERS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOECOMM_SUMS_2(kind) MOECOMM_SUMS_1(kind), MOECOMM_SUMS(kind, 8)
#define MOECOMM_REGISTERS_3 MOECOMM_REGISTERS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MOECOMM_SUMS_3(kind) MOECOMM_SUMS_2(kind), MOECOMM_SUMS(kind, 16)
#define MOECOMM_REGISTERS_4 MOECOMM_REGISTERS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MOECOMM_SUMS_4(kind) MOECOMM_SUMS_3(kind), MOECOMM_SUMS(kind, 24)
#define MOECOMM_REGISTERS_5 MOECOMM_REGISTERS_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MOECOMM_SUMS_5(kind) MOECOMM_SUMS_4(kind), MOECOMM_SUMS(kind, 32)
#define MOECOMM_REGISTERS_6 MOECOMM_REGISTERS_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MOECOMM_SUMS_6(kind) MOECOMM_SUMS_5(kind), MOECOMM_SUMS(kind, 40)
#define MOECOMM_REGISTERS_7 MOECOMM_REGISTERS_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MOECOMM_SUMS_7(kind) MOECOMM_SUMS_6(kind), MOECOMM_SUMS(kind, 48)
#define MOECOMM_REGISTERS_8 MOECOMM_REGISTERS_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MOECOMM_SUMS_8(kind) MOECOMM_SUMS_7(kind), MOECOMM_SUMS(kind, 56)
#define MOECOMM_REGISTERS_9 MOECOMM_REGISTERS_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MOECOMM_SUMS_9(kind) MOECOMM_SUMS_8(kind), MOECOMM_SUMS(kind, 64)
#define MOECOMM_REGISTERS_10 MOECOMM_REGISTERS_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MOECOMM_SUMS_10(kind) MOECOMM_SUMS_9(kind), MOECOMM_SUMS(kind, 72)
#define MOECOMM_REGISTERS_11 MOECOMM_REGISTERS_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MOECOMM_SUMS_11(kind) MOECOMM_SUMS_10(kind), MOECOMM_SUMS(kind, 80)
#define MOECOMM_REGISTERS_12 MOECOMM_REGISTERS_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MOECOMM_SUMS_12(kind) MOECOMM_SUMS_11(kind), MOECOMM_SUMS(kind, 88)
#define MOECOMM_REGISTERS_13 MOECOMM_REGISTERS_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MOECOMM_SUMS_13(kind) MOECOMM_SUMS_12(kind), MOECOMM_SUMS(kind, 96)
#define MOECOMM_REGISTERS_14 MOECOMM_REGISTERS_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MOECOMM_SUMS_14(kind) MOECOMM_SUMS_13(kind), MOECOMM_SUMS(kind, 104)
#define MOECOMM_REGISTERS_15 MOECOMM_REGISTERS_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define MOECOMM_SUMS_15(kind) MOECOMM_SUMS_14(kind), MOECOMM_SUMS(kind, 112)
#define MOECOMM_REGISTERS_16 MOECOMM_REGISTERS_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define MOECOMM_SUMS_16(kind) MOECOMM_SUMS_15(kind), MOECOMM_SUMS(kind, 120)
#define MOECOMM_WGMMA_OF(kind, kinds, signs, n, registers, a_at, b_at, keep_at) \
    asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, %" #keep_at ", 0;\n\t" \
                 "wgmma.mma_async.sync.aligned.m64n" #n kinds " {" MOECOMM_REGISTERS_##registers \
                 "}, %" #a_at ", %" #b_at ", keep" signs ";\n\t}" \
                 : MOECOMM_SUMS_##registers(kind) : "l"(a), "l"(b), "r"(keep))
#define MOECOMM_WGMMA_A_IN_REGISTERS(n, registers, a0_at, a1_at, a2_at, a3_at, b_at, keep_at) \
    asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, %" #keep_at ", 0;\n\t" \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" MOECOMM_REGISTERS_##registers \
                 "}, {%" #a0_at ", %" #a1_at ", %" #a2_at ", %" #a3_at "}, %" #b_at ", keep, 1, 1, 0;\n\t}" \
                 : MOECOMM_SUMS_##registers("+f") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep))
#define MOECOMM_WGMMA(n, registers, a_at, b_at, keep_at) \
    { \
        if constexpr (type == Type::bf16) MOECOMM_WGMMA_OF("+f", "k16.f32.bf16.bf16", ", 1, 1, 0, 0", n, registers, a_at, b_at, keep_at); \
        else if constexpr (type == Type::fp16) MOECOMM_WGMMA_OF("+f", "k16.f32.f16.f16", ", 1, 1, 0, 0", n, registers, a_at, b_at, keep_at); \
        else MOECOMM_WGMMA_OF("+f", "k32.f32.e4m3.e4m3", ", 1, 1", n, registers, a_at, b_at, keep_at); \
    }

#define MOECOMM_WGMMA_INTEGERS(n, registers, a_at, b_at, keep_at) \
    MOECOMM_WGMMA_OF("+r", "k32.s32.s8.s8", "", n, registers, a_at, b_at, keep_at)
#define MOECOMM_ALL(of) \
    if constexpr (n == 16) of(16, 1, 8, 9, 10); \
    if constexpr (n == 32) of(32, 2, 16, 17, 18); \
    if constexpr (n == 48) of(48, 3, 24, 25, 26); \
    if constexpr (n == 64) of(64, 4, 32, 33, 34); \
    if constexpr (n == 80) of(80, 5, 40, 41, 42); \
    if constexpr (n == 96) of(96, 6, 48, 49, 50); \
    if constexpr (n == 112) of(112, 7, 56, 57, 58); \
    if constexpr (n == 128) of(128, 8, 64, 65, 66); \
    if constexpr (n == 144) of(144, 9, 72, 73, 74); \
    if constexpr (n == 160) of(160, 10, 80, 81, 82); \
    if constexpr (n == 176) of(176, 11, 88, 89, 90); \
    if constexpr (n == 192) of(192, 12, 96, 97, 98); \
    if constexpr (n == 208) of(208, 13, 104, 105, 106); \
    if constexpr (n == 224) of(224, 14, 112, 113, 114); \
    if constexpr (n == 240) of(240, 15, 120, 121, 122); \
    if constexpr (n == 256) of(256, 16, 128, 129, 130);

// Issues one product, asynchronously; wgmma_commit() and wgmma_wait() complete it.  keep = 0 overwrites `accum` instead of adding to it.
template <Type type, i32 n, i32 size>
MOECOMM_FN void wgmma(float (&accum)[size], u64 a, u64 b, i32 keep) {
    static_assert(2 * size >= n && n % 16 == 0 && n <= 256, "registers for the sums");
    static_assert(type == Type::bf16 || type == Type::fp16 || type == Type::e4m3, "types that are multiplied so");
    MOECOMM_ALL(MOECOMM_WGMMA)
}
// Issues one product of int8, as wgmma() does of e4m3. The registers hold s32.
template <i32 n, i32 size>
MOECOMM_FN void wgmma_integers(i32 (&accum)[size], u64 a, u64 b, i32 keep) {
    static_assert(2 * size >= n && n % 16 == 0 && n <= 256, "registers for the sums");
    MOECOMM_ALL(MOECOMM_WGMMA_INTEGERS)
}

// Issues one product of bf16 whose operand A is in registers: 16 columns of 64 rows.  Lane l of warp w holds columns 2 (l % 4) + {0, 1}
//     a[0]: of row 16 w + l / 4,  a[1]: of row 16 w + l / 4 + 8,  a[2], a[3]: of the same rows, 8 columns further on.
// The registers must not change before wgmma_wait() has completed the product.
template <i32 n, i32 size>
MOECOMM_FN void wgmma_registers(float (&accum)[size], const u32* a, u64 b, i32 keep) {
    static_assert(2 * size >= n && n % 16 == 0 && n <= 256, "registers for the sums");
    if constexpr (n == 16) MOECOMM_WGMMA_A_IN_REGISTERS(16, 1, 8, 9, 10, 11, 12, 13);
    if constexpr (n == 32) MOECOMM_WGMMA_A_IN_REGISTERS(32, 2, 16, 17, 18, 19, 20, 21);
    if constexpr (n == 48) MOECOMM_WGMMA_A_IN_REGISTERS(48, 3, 24, 25, 26, 27, 28, 29);
    if constexpr (n == 64) MOECOMM_WGMMA_A_IN_REGISTERS(64, 4, 32, 33, 34, 35, 36, 37);
    if constexpr (n == 80) MOECOMM_WGMMA_A_IN_REGISTERS(80, 5, 40, 41, 42, 43, 44, 45);
    if constexpr (n == 96) MOECOMM_WGMMA_A_IN_REGISTERS(96, 6, 48, 49, 50, 51, 52, 53);
    if constexpr (n == 112) MOECOMM_WGMMA_A_IN_REGISTERS(112, 7, 56, 57, 58, 59, 60, 61);
    if constexpr (n == 128) MOECOMM_WGMMA_A_IN_REGISTERS(128, 8, 64, 65, 66, 67, 68, 69);
    if constexpr (n == 144) MOECOMM_WGMMA_A_IN_REGISTERS(144, 9, 72, 73, 74, 75, 76, 77);
    if constexpr (n == 160) MOECOMM_WGMMA_A_IN_REGISTERS(160, 10, 80, 81, 82, 83, 84, 85);
    if constexpr (n == 176) MOECOMM_WGMMA_A_IN_REGISTERS(176, 11, 88, 89, 90, 91, 92, 93);
    if constexpr (n == 192) MOECOMM_WGMMA_A_IN_REGISTERS(192, 12, 96, 97, 98, 99, 100, 101);
    if constexpr (n == 208) MOECOMM_WGMMA_A_IN_REGISTERS(208, 13, 104, 105, 106, 107, 108, 109);
    if constexpr (n == 224) MOECOMM_WGMMA_A_IN_REGISTERS(224, 14, 112, 113, 114, 115, 116, 117);
    if constexpr (n == 240) MOECOMM_WGMMA_A_IN_REGISTERS(240, 15, 120, 121, 122, 123, 124, 125);
    if constexpr (n == 256) MOECOMM_WGMMA_A_IN_REGISTERS(256, 16, 128, 129, 130, 131, 132, 133);
}
// clang-format on

#undef MOECOMM_ALL
#undef MOECOMM_WGMMA_INTEGERS
#undef MOECOMM_WGMMA
#undef MOECOMM_WGMMA_A_IN_REGISTERS
#undef MOECOMM_WGMMA_OF
#undef MOECOMM_SUMS
#undef MOECOMM_REGISTERS_1
#undef MOECOMM_SUMS_1
#undef MOECOMM_REGISTERS_2
#undef MOECOMM_SUMS_2
#undef MOECOMM_REGISTERS_3
#undef MOECOMM_SUMS_3
#undef MOECOMM_REGISTERS_4
#undef MOECOMM_SUMS_4
#undef MOECOMM_REGISTERS_5
#undef MOECOMM_SUMS_5
#undef MOECOMM_REGISTERS_6
#undef MOECOMM_SUMS_6
#undef MOECOMM_REGISTERS_7
#undef MOECOMM_SUMS_7
#undef MOECOMM_REGISTERS_8
#undef MOECOMM_SUMS_8
#undef MOECOMM_REGISTERS_9
#undef MOECOMM_SUMS_9
#undef MOECOMM_REGISTERS_10
#undef MOECOMM_SUMS_10
#undef MOECOMM_REGISTERS_11
#undef MOECOMM_SUMS_11
#undef MOECOMM_REGISTERS_12
#undef MOECOMM_SUMS_12
#undef MOECOMM_REGISTERS_13
#undef MOECOMM_SUMS_13
#undef MOECOMM_REGISTERS_14
#undef MOECOMM_SUMS_14
#undef MOECOMM_REGISTERS_15
#undef MOECOMM_SUMS_15
#undef MOECOMM_REGISTERS_16
#undef MOECOMM_SUMS_16

}  // namespace moecomm
