"""Cases of grouped GEMMs see each seeded bug of tall FP8 tiles, of a dynamic order of tiles, and of MXFP4 weights."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest

from ..native.mutants import Mutant
from . import gemm_machine, plain_gemm
from . import test_grouped_gemm as plain_cases
from . import test_mxfp4_gemm as cases
from . import test_packed_mxfp4_gemm as packed_cases
from .test_mxfp4_gemm import plain_maps as plain_maps
from .units import Units, edited

pytestmark = pytest.mark.long

FILE, PACKED, EVERY, PAIRS = "gemm/mxfp4.cuh", "gemm/packed_scaled.cuh", "every value", "256x4c2u16"
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
] + [  # `caught_by`: a case of test_packed_mxfp4_gemm.py, or EVERY
    Mutant(f"packed: {name}", PACKED, old, new, caught_by)
    for name, old, new, caught_by in (
        ("1 is 1.5", "kLowTable = 0x14100800u", "kLowTable = 0x14140800u", "plain"),
        ("half has no rise", "kLowRise = 0x08080800u", "kLowRise = 0x08080000u", "plain"),
        ("4 has no rise", "kHighRise = 0x08080808u", "kHighRise = 0x08000808u", "plain"),
        ("no sign of the fourth", "| (word & kByteSigns)", "| (word & 0x00808080u)", "plain"),
        ("no sign of the fifth", "(word << 4 & kByteSigns)", "(word << 4 & 0x80808000u)", "plain"),
        ("rises of two groups", "0x4440u | static_cast<u32>(i)", "0x4440u | static_cast<u32>(i & 2)", "plain"),
        ("rises above 7", "kLowHalves = 0x0f0f0f0fu", "kLowHalves = 0x07070707u", "plain"),
        ("small exponents", "scales >> 1 & 0x78000000u", "scales >> 1 & 0x70000000u", EVERY),
        ("odd exponents", "scales << 3 & 0x07800000u", "scales << 3 & 0x07000000u", "plain"),
        ("one row's scales", "scales + second * 8 * 4", "scales", "plain"),
        ("one row's values", "values + second * 8 * kPackedRowBytes", "values", "plain"),
        ("no swizzle", "((lane_id() % 4) ^ (row / 2 % 4))", "(lane_id() % 4)", "plain"),
        ("x of one group", "operand(rows + 2 * k)", "operand(rows)", "plain"),
        ("one scale of two rows of x", "of_rows.y * factors", "of_rows.x * factors", "plain"),
        ("scales of the first step", "step += columns;", "step += 0;", "plain"),
        ("factors of the other part", "accum[0], products, factors[0]", "accum[0], products, factors[1]", "plain"),
        ("gate rows alone", "c.apart ? apart_row(", "false ? apart_row(", "apart"),
        ("a slot is free too early", "before = place.slot;", "before = (place.slot + 1) % c.stages;", "plain"),
    )
] + [  # `caught_by`: a schedule of test_grouped_gemm.py
    Mutant(f"dynamic: {name}", f"gemm/{file}.cuh", old, new, PAIRS)
    for name, file, old, new in (
        ("the second block adds one", "tile_counter", "return s.words[place.slot];", "return s.words[place.slot] + 1;"),
        ("the second block gets nothing", "tile_counter", "send_word(&s.words", "if (false) send_word(&s.words"),
        ("each block for itself", "tile_counter", "if constexpr (c.cluster == 1) {", "if constexpr (true) {"),
        ("a role too many", "tile_counter", "barrier_init(&empty[i], 1 + (c.has", "barrier_init(&empty[i], 2 + (c.has"),
        ("no end", "gemm", "arrive(&s.queue.full[", "if (walk.find(index, tile)) arrive(&s.queue.full["),
        ("a slot that is not free", "gemm", "copy_wait(&s.queue.empty[place.slot], place.phase ^ 1);", ""),
        ("one slot for all", "gemm", "queue.indices[place.slot], tile", "queue.indices[0], tile"),
        ("all lanes are done", "gemm", "if (!warp || lane_id() == 0) arrive(&queue", "arrive(&queue"),
    )
] + [  # `caught_by`: a case of test_grouped_gemm.py
    Mutant(f"tall: {name}", "gemm/scaled_rows.cuh", old, new, "rows first, apart, cast")
    for name, old, new in (
        ("rows of the first warpgroup", "first_row * (kSlotRowBytes / 16)", "0"),
        ("scales of the first warpgroup", "first_row + warp_id() % 4 * 16", "warp_id() % 4 * 16"),
        ("columns of the first warpgroup", "+ first_part * (kRowsPart * kSlotRowBytes / 16)", ""),
        ("one scale of two rows", "slot.of_x(row + 8)", "slot.of_x(row)"),
        ("columns of one part", "w_slot + part * (kRowsPart * kSlotRowBytes / 16)", "w_slot"),
        ("scales of one part", "scales.slot(slot), first_part + part", "scales.slot(slot), first_part"),
        ("products are added to one part", "add_rows<c>(accum[part]", "add_rows<c>(accum[0]"),
        ("sums of the tile before", "accum[part][i] = 0.0f;", ""),
    )
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Units(edited(plain_gemm.write, mutant.file, mutant.old, mutant.new), "tensor_cores.h")
    monkeypatch.setattr(gemm_machine, "units", lambda: unit)
    monkeypatch.setattr(gemm_machine, "compiled", lru_cache(gemm_machine.compiled.__wrapped__))
    if mutant.name.startswith("dynamic"):
        test = partial(plain_cases.test_a_dynamic_order_has_all_tiles, PAIRS, False, monkeypatch)
    elif mutant.name.startswith("tall"):
        test = partial(plain_cases.test_the_kernel_computes_what_the_reference_does, mutant.caught_by, monkeypatch)
    elif mutant.caught_by == EVERY:
        test = (packed_cases if mutant.file == PACKED else cases).test_every_value_with_every_scale
    elif mutant.file == PACKED:
        test = partial(packed_cases.test_the_kernel_has_the_products_of_widened_weights, mutant.caught_by)
    else:
        test = partial(cases.test_the_kernel_has_the_bits_of_the_kernel_for_bf16, mutant.caught_by)
    with pytest.raises(AssertionError):
        test()
