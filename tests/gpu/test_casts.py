"""Factor and scale of a group of columns, of every float there is, and quotients by a scale: as divisions have it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch

from moecomm.gpu.plain_kernel import PlainKernel, launch

pytestmark = pytest.mark.gpu1

_SOURCE = """
#include "elementwise/quantize_rows.cuh"
using namespace moecomm;
struct Args { unsigned long long wrong; };
template <ScaleFormat format> __device__ void compare(u32 bits, u32* wrong) {
    const float seen[1] = {__uint_as_float(bits)}, amax = seen[0] < 1e-4f ? 1e-4f : seen[0];
    GroupScale made[1];
    group_scales<format>(seen, made);
    u32 scale = __float_as_uint(__fdiv_rn(amax, 448.0f));
    float up = __fmul_rn(__fdiv_rn(1.0f, amax), 448.0f);
    if (format == ScaleFormat::ue8m0) {
        scale = min((scale >> 23) + ((scale & 0x7fffffu) != 0 ? 1u : 0u), 255u);
        up = __fdiv_rn(1.0f, __uint_as_float(scale << 23));
    }
    if (made[0].bits != scale || __float_as_uint(made[0].up) != __float_as_uint(up))
        if (atomicAdd(wrong, 1) == 0) wrong[1] = bits;
}
// Every significand of a divisor, by all of 16-bit values.
__device__ void compare_quotients(u32 significand, u32* wrong) {
    const float scale = __uint_as_float(127u << 23 | significand);
    const Divisor divisor(scale);
    u32 differ = 0;
    for (u32 bits = 0; bits < 1024; ++bits) {
        const float value = __uint_as_float(127u << 23 | bits << 13);
        const float quotient = __fdiv_rn(value, scale);
        differ += divisor.divide(value) != quotient || divisor.divide(-value) != -quotient;
    }
    if (differ != 0 && atomicAdd(wrong, differ) == 0) wrong[1] = significand;
}
extern "C" __global__ void moecomm_plain(const __grid_constant__ Args args) {
    u32* wrong = reinterpret_cast<u32*>(args.wrong);
    for (u32 bits = blockIdx.x * blockDim.x + threadIdx.x; bits < 0x80000000u; bits += gridDim.x * blockDim.x) {
        compare<ScaleFormat::fp32>(bits, wrong);
        compare<ScaleFormat::ue8m0>(bits, wrong + 2);
        if (bits < 1u << 23) compare_quotients(bits, wrong + 4);
    }
}
"""


@dataclass(frozen=True)
class _Comparison(PlainKernel):
    @property
    def source(self) -> str:
        return _SOURCE


class _Args(ctypes.Structure):
    _fields_ = (("wrong", ctypes.c_uint64),)


COMPARISON = _Comparison("elementwise/quantize_rows", "", "Args", 512)


def test_scales_of_every_magnitude_and_quotients() -> None:
    wrong = torch.zeros(6, dtype=torch.int32, device="cuda")
    launch(COMPARISON, 256, _Args(wrong.data_ptr()))
    assert wrong.tolist() == 6 * [0], "how many are wrong in fp32, the first of them; of ue8m0; of quotients"
