"""Every seeded bug of the kernel that casts rows must be seen in the cases of test_plain_kernels.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moecomm.base import formats
from moecomm.gpu import plain_kernel, quantize_rows
from tests.gpu import test_plain_kernels as cases

from ..native.mutants import Mutant
from . import plain
from .test_kernels import pytestmark as of_emulator
from .test_plain_kernels import ENDS, launcher
from .units import Units, scheduler

pytestmark = [*of_emulator, pytest.mark.long]

FILE = "elementwise/quantize_rows.cuh"
MUTANTS = [  # `caught_by`: a format
    Mutant(name, FILE, old, new, of)
    for name, old, new, of in (
        ("a last group lacks a column", "if (column + i >= columns)", "if (column + i + 1 >= columns)", "nvfp4"),
        ("odd columns in the low half", "<< 4 * k;", "<< 4 * (k ^ 1);", "mxfp4"),
        ("the scale of too few columns", "largest_in_group<type, lanes>", "largest_in_group<type, 1>", "mxfp8"),
        (
            "the scale of one warp",
            "amax = max(amax, of_warps[turn][i])",
            "amax = max(amax, of_warps[turn][0])",
            "fp8_token",
        ),
        ("no barrier before the scale", "        __syncthreads();\n", "", "int8_token"),
        (
            "what registers do not hold counts for nothing",
            "column < a.hidden; column += stride)\n            seen",
            "false;)\n            seen",
            "int8_token",
        ),
        ("no least scale", "scale < least_scale) scale = least_scale;", "false) scale = 0.0f;", "fp8_token"),
        ("no least amax", "amax < least ? least : amax, largest", "amax, largest", "int8_group"),
        (
            "NaN of a scale keeps its bits",
            "scale == scale ? __float_as_uint(scale) : kNanBits",
            "__float_as_uint(scale)",
            "int8_group",
        ),
        ("scales are rounded down", "0x400000u : 0u) ? 1u : 0u);", "0x400000u : 0u) ? 0u : 0u);", "mxfp8"),
        ("2^-127 counts as 0", "(exponent == 0 ? 0x400000u : 0u)", "0u", "mxfp4"),
        ("infinity is NaN", "bits == kInfinityBits ? 254u : min(up, 255u)", "min(up, 255u)", "mxfp8"),
        ("2^127 has no reciprocal", "biased == 254u ? 0x400000u", "biased == 254u ? 0u", "mxfp8"),
        (
            "the global scale counts twice",
            "__fdiv_rn(1.0f, given)));",
            "__fdiv_rn(1.0f, __fmul_rn(given, given))));",
            "nvfp4",
        ),
        ("infinite factors", "up > most ? most : up", "up", "nvfp4"),
        ("NaN of e2m1 is 0", "= 0x77777777u;", "= 0u;", "mxfp4"),
        ("ties of e2m1 go up", "0x1fffffu + ((size >> 22) & 1u)", "0x200000u", "nvfp4"),
        (
            "small values of e2m1 are not halves",
            "size < (127u << 23) ? subnormal",
            "size < (126u << 23) ? subnormal",
            "mxfp4",
        ),
        ("e2m1 does not saturate", "? subnormal : normal, 7u)", "? subnormal : normal, 8u)", "nvfp4"),
        ("e2m1 has no sign", "bits >> 28 & 8u", "bits >> 28 & 0u", "mxfp4"),
        ("int8 is symmetric", "fmaxf(value, -128.0f)", "fmaxf(value, -127.0f)", "int8_token"),
        ("NaN of int8 is not 0", "value == value ? fminf", "true ? fminf", "int8_token"),
        ("quotients are products", "__fmaf_rn(__fmaf_rn(-near, scale, value), reciprocal, near)", "near", "fp8_token"),
        ("-0 becomes 0", "| (__float_as_uint(value) & 0x80000000u)", "| (quotient & 0x80000000u)", "fp8_token"),
        ("infinite scales are corrected", "by < __uint_as_float(kInfinityBits) ? by : 0.0f", "by", "fp8_token"),
        ("NaN of e4m3 keeps its sign", "& 0x80808080u);  // NaN", "& 0u);  // NaN", "fp8_tensor"),
        ("scales of the next group", "+ column / group;", "+ column / group / 2 * 2;", "mxfp8"),
    )
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(csrc: Path, into: Path) -> None:
        plain.write(csrc, into)
        text = (into / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant
        (into / mutant.file).write_text(text.replace(mutant.old, mutant.new))

    launched: list[str] = []
    monkeypatch.setattr(plain_kernel, "launch_on", launcher(scheduler(), Units(write, "cuda.h").library, launched))
    name, different = mutant.caught_by, 0
    values = torch.cat((torch.arange(0, 1 << 16, 509), ENDS, ENDS + 0x8000))
    for x in (*cases.cast_rows(torch.bfloat16, most=20), *cases.each_bf16(values)):
        for scale in cases.scales_of(name, "cpu"):
            wanted = formats.quantize(x, name, global_scale=scale)
            made = quantize_rows.by_kernel(x, name, global_scale=scale)
            try:
                cases.check_cast(made, wanted)
            except AssertionError:
                different += 1
        if different:
            break
    assert launched and different
