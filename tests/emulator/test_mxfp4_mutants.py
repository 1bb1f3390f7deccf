"""Every seeded bug of the kernel that multiplies MXFP4 weights must be seen in the cases of test_mxfp4_gemm.py."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest

from ..native.mutants import Mutant
from . import gemm_machine, plain_gemm
from . import test_mxfp4_gemm as cases
from .test_mxfp4_gemm import plain_maps as plain_maps
from .units import Units, edited

pytestmark = pytest.mark.long

FILE, EVERY = "gemm/mxfp4.cuh", "every value"
MUTANTS = [  # `caught_by`: a case of test_mxfp4_gemm.py, or EVERY
    Mutant(name, FILE, old, new, caught_by)
    for name, old, new, caught_by in (
        ("odd columns come first", "0x00040040u", "0x00400004u", "plain"),
        ("bytes of another lane", "static_cast<u32>(place)", "(static_cast<u32>(place) ^ 1)", "plain"),
        ("words in another order", "{__byte_perm(words.x", "{__byte_perm(words.y", "plain"),
        ("no sign", "* 0x01001000u & 0x80008000u", "* 0x01001000u & 0x80000000u", "plain"),
        ("the mantissa is lost", "& 0x01c001c0u)", "& 0x01800180u)", "plain"),
        ("a wrong exponent", "* 128u + 0x3f003f00u", "* 128u + 0x3f803f00u", "plain"),
        ("no larger scales", "scales & 0x80808080u) != 0", "scales & 0x80808080u) > ~0u", EVERY),
        ("129 is not larger", "+ 0x7f7f7f7fu) & scales", "+ 0x7e7e7e7eu) & scales", EVERY),
        ("255 is no NaN", "scale == 255 ? 0x7fc0u", "scale == 256 ? 0x7fc0u", EVERY),
        ("scales of another address", "packed_scales_at<c>(args, group, in_all + 8) % 4", "0 % 4", "plain"),
        ("scales of one row", "(from + 8 * kPackedScaleBytes)", "(from)", "plain"),
        ("scales of the step before", "rows[i] += c.depth() / kMxGroup;", "rows[i] += 0;", "plain"),
        ("words of one group", "static_cast<u32>(group) ^ swizzle", "static_cast<u32>(group & 2) ^ swizzle", "plain"),
        ("no swizzle", "swizzle = row / 2 % 4;", "swizzle = 0;", "plain"),
        ("x of one box", "group / 2 * (c.box_bytes() / 16)", "0", "plain"),
        ("gate rows alone", "c.apart ? apart_row(row, args.columns / 2)", "c.apart ? row / 2", "apart"),
        ("a slot is free too early", "before = place.slot;", "before = (place.slot + 1) % c.stages;", "plain"),
    )
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Units(edited(plain_gemm.write, mutant.file, mutant.old, mutant.new), "tensor_cores.h")
    monkeypatch.setattr(gemm_machine, "units", lambda: unit)
    monkeypatch.setattr(gemm_machine, "compiled", lru_cache(gemm_machine.compiled.__wrapped__))
    case = cases.test_the_kernel_has_the_bits_of_the_kernel_for_bf16
    test = cases.test_every_value_with_every_scale if mutant.caught_by == EVERY else partial(case, mutant.caught_by)
    with pytest.raises(AssertionError):
        test()
