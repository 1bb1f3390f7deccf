"""Every seeded bug of a cast must be seen: of the pass in the cases of test_plain_kernels.py, of kernels that cast on
the way in those of test_casts_on_the_way.py.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess

import pytest
import torch

from moecomm.base import formats
from moecomm.gpu import plain_kernel, quantize_rows
from tests.gpu import test_plain_kernels as cases

from ..native.mutants import Mutant
from . import plain
from .machine import Machine
from .test_casts_on_the_way import HIDDEN, check_rounds, values
from .test_mutants import LIMIT_S, NOT_COMPILED
from .test_plain_kernels import ENDS, launcher, on_gpu
from .units import Units, edited, scheduler

pytestmark = pytest.mark.long

OF_PASS = (
    "a last group lacks a column",
    "the scale of too few columns",
    "the scale of one warp",
    "no barrier before the scale",
    "what registers do not hold counts for nothing",
    "scales of the next group",
)

PASS, ARITHMETIC = "elementwise/quantize_rows.cuh", "device/format_casts.cuh"
MUTANTS = [  # `caught_by`: a format
    Mutant(name, PASS if name in OF_PASS else ARITHMETIC, old, new, of)
    for name, old, new, of in (
        ("a last group lacks a column", "if (column + i >= columns)", "if (column + i + 1 >= columns)", "nvfp4"),
        (
            "columns in reverse",
            "__funnelshift_r(codes, sum + (sum >> 22), 4)",
            "__funnelshift_l(sum + (sum >> 22) << 28, codes, 4)",
            "mxfp4",
        ),
        ("signs in reverse", "__float_as_uint(columns[7 - i])", "__float_as_uint(columns[i])", "nvfp4"),
        ("the scale of too few columns", "largest_in_group<type, lanes>", "largest_in_group<type, 1>", "mxfp8"),
        (
            "the scale of one warp",
            "amax = max(amax, of_warps[walk.turn][i])",
            "amax = max(amax, of_warps[walk.turn][0])",
            "fp8_token",
        ),
        (
            "no barrier before the scale",
            "        __syncthreads();\n        u32 amax = 0;",
            "        u32 amax = 0;",
            "int8_token",
        ),
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
            "__fmul_rn(scale, given.reciprocal)",
            "__fmul_rn(__fmul_rn(scale, given.reciprocal), given.reciprocal)",
            "nvfp4",
        ),
        ("infinite factors", "up > most ? most : up", "up", "nvfp4"),
        ("NaN of e2m1 is 0", "= 0x77777777u;", "= 0u;", "mxfp4"),
        ("ties of e2m1 go up", "0x1p22f, size)", "0x1p22f, size * 1.0000002f)", "nvfp4"),
        ("small values of e2m1 are not halves", "& kInfinityBits), 1.0f)", "& kInfinityBits), 0.5f)", "mxfp4"),
        ("e2m1 does not saturate", "fabsf(columns[i]), 6.0f)", "fabsf(columns[i]), 8.0f)", "nvfp4"),
        ("e2m1 has no sign", "| (signs & 0x88888888u)", "", "mxfp4"),
        ("the exponent's bias stays", "- 0x22222222u", "- 0x11111111u", "mxfp4"),
        ("int8 is symmetric", "fmaxf(value, -128.0f)", "fmaxf(value, -127.0f)", "int8_token"),
        ("NaN of int8 is not 0", "value == value ? fminf", "true ? fminf", "int8_token"),
        ("quotients are products", "__fmaf_rn(__fmaf_rn(-near, scale, value), reciprocal, near)", "near", "fp8_token"),
        ("-0 becomes 0", "| (__float_as_uint(value) & 0x80000000u)", "| (quotient & 0x80000000u)", "fp8_token"),
        ("infinite scales are corrected", "by < __uint_as_float(kInfinityBits) ? by : 0.0f", "by", "fp8_token"),
        ("scales of the next group", "+ column / group;", "+ column / group / 2 * 2;", "mxfp8"),
    )
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    unit = Units(edited(plain.write, mutant.file, mutant.old, mutant.new), "cuda.h")
    monkeypatch.setattr(plain_kernel, "launch_on", launcher(scheduler(), unit.library, launched))
    name, different = mutant.caught_by, 0
    values = torch.cat((torch.arange(0, 1 << 16, 509), ENDS, ENDS + 0x8000))
    for x in (*cases.cast_rows(torch.bfloat16, most=20), *cases.each_bf16(values)):
        for scale in cases.scales_of(name, "cpu"):
            wanted = formats.quantize(x, name, global_scale=scale)
            made = quantize_rows.cast(on_gpu(x), name, global_scale=scale)
            try:
                cases.check_cast(made, wanted)
            except AssertionError:
                different += 1
        if different:
            break
    assert launched and different


ON_THE_WAY = [  # `caught_by`: how rows travel, and a format
    Mutant(name, file, old, new, of)
    for name, file, old, new, of in (
        ("no half is read first", ARITHMETIC, "row[i ^ half]", "row[i]", "rows nvfp4"),
        (
            "4-bit halves are not put back",
            ARITHMETIC,
            "make_uint2(out[1], out[0])",
            "make_uint2(out[0], out[1])",
            "rows mxfp4",
        ),
        (
            "8-bit halves are not put back",
            ARITHMETIC,
            "make_uint4(out[2], out[3], out[0], out[1])",
            "make_uint4(out[0], out[1], out[2], out[3])",
            "rows mxfp8",
        ),
        (
            "scales of half a group",
            ARITHMETIC,
            "largest_in_group<type, lanes>",
            "largest_in_group<type, lanes / 2>",
            "rows mxfp8",
        ),
        (
            "a last lane has no columns",
            ARITHMETIC,
            "|| column(step) < columns;",
            "|| column(step) + 16 < columns;",
            "rows int8_group",
        ),
        (
            "the scale of another step",
            ARITHMETIC,
            "column(s) / group, scale[s]",
            "column(s) / group, scale[0]",
            "rows nvfp4",
        ),
        ("one step of two", ARITHMETIC, "begin += steps * of_step", "begin += (steps + 1) * of_step", "rows mxfp4"),
        (
            "values of 4 bits lie apart",
            "device/config.cuh",
            "is_e2m1(format) ? columns / 2 : columns",
            "columns",
            "rows mxfp4",
        ),
        (
            "scales of all pieces are the first's",
            "dispatch/send.cuh",
            "scales() + at / cfg.group() * cfg.scale_size()",
            "scales()",
            "rows nvfp4",
        ),
        (
            "the last piece is a complete one",
            "device/quantize.cuh",
            "cast_columns<cfg.type, cfg.format, rest, steps>",
            "cast_columns<cfg.type, cfg.format, most, steps>",
            "packets nvfp4",
        ),
        ("no global scale", "dispatch/call.cuh", "static_cast<i32>(a.in_scales_stride)", "0x3f800000", "packets nvfp4"),
        (
            "scales are bytes",
            "device/config.cuh",
            "return format == Format::int8_group ? 4 : 1;",
            "return 1;",
            "rows int8_group",
        ),
    )
]


def with_an_edit(mutant: Mutant) -> None:
    """Compare rounds of a mutant's kernels in a process of its own, which may end in any way."""
    machine, (way, name) = Machine(), mutant.caught_by.split()
    machine.library = Units(edited(plain.write, mutant.file, mutant.old, mutant.new), "cuda.h").library
    x = [values(17, HIDDEN, 0), values(23, HIDDEN, 1)]
    try:
        with pytest.MonkeyPatch.context() as patch:
            scale = torch.full((1,), 0.01) if name == "nvfp4" else None
            check_rounds(machine, patch, way, name, x, scale, layout="flat")
    except subprocess.CalledProcessError:  # of the compiler
        os._exit(NOT_COMPILED)


@pytest.mark.parametrize("mutant", ON_THE_WAY, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_on_the_way_is_caught(mutant: Mutant) -> None:
    process = multiprocessing.get_context("fork").Process(target=with_an_edit, args=(mutant,))
    process.start()
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode not in (0, NOT_COMPILED)
