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

FILE, EVERY, PAIRS = "gemm/mxfp4.cuh", "every value", "256x4c2u16"
MANY, AT_NAN, LINE = "many steps", "low_magnitudes(i32 rise) {\n    if (", "\n        "
FREE = f"copy_wait(&s.queue.empty[place.slot], place.phase ^ 1);{LINE}"
STEP = f"MOECOMM_FN void step() {{{LINE}if constexpr (warp) __syncwarp();{LINE}"
STEP_OF_INDICES, STEP_OF_TILES = (
    f"{end}\n    {STEP}" for end in ("Positions relies on it.", "queue.tiles[place.slot]; }")
)
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
    Mutant(f"packed: {name}", f"gemm/{file}.cuh", old, new, caught_by)
    for name, file, old, new, caught_by in (
        ("1 is 1.5", "widen", ": 0x14100800u", ": 0x14140800u", "plain"),
        ("4 has no rise", "widen", "0x08080808u * static", "0x08000808u * static", "plain"),
        ("subnormal halves", "widen", "rise < 3 ?", "rise < 2 ?", EVERY),
        ("subnormal twos", "widen", "rise < 1 ?", "rise < 0 ?", EVERY),
        ("no NaN", "widen", f"{AT_NAN}rise == kRises", f"{AT_NAN}rise == 2 * kRises", EVERY),
        ("no sign of the fourth", "widen", "| (word & kSigns)", "| (word & 0x00808080u)", "plain"),
        ("no sign of the fifth", "widen", "(word << 4 & kSigns)", "(word << 4 & 0x80808000u)", "plain"),
        ("rises of another group", "widen", "(4 * group - 3)", "(4 * (group ^ 1) - 3)", "plain"),
        ("rises above 7", "widen", "(kRises - 1) * 8)", "(kRises / 2 - 1) * 8)", "plain"),
        ("no swizzle", "widen", "((2 * group) ^ (lane / 4)) * 16", "(2 * group) * 16", "plain"),
        ("halves of 32 columns side by side", "widen", "at ^ 16", "at + 16", "plain"),
        ("rows of one warp", "widen", "row = warp * kRows + lane / 4;", "row = lane / 4;", "plain"),
        ("scales of one row of 8", "widen", ": nth * kWoven;", ": 0;", "plain"),
        ("scales of gate rows alone", "widen", "nth % 2 * Widening<c>::kHalf", "0", "apart"),
        ("scales of gate rows twice", "widen", "of_rows + kRows, scales + half", "of_rows + kRows, scales", "apart"),
        ("factors of gate rows alone", "widen", "lane * Widening<c>::kHalf", "0", "apart"),
        ("factors of the first rows", "widen", ": warp * Lane::kRows;", ": 0;", "plain"),
        ("scales of the first step", "widen", "scales += args.columns,", "scales += 0,", "plain"),
        ("weights of the first block", "widen", "block * (c.block_columns() / (2 * kWoven))", "0", "apart, cast"),
        ("a packed slot that is not full", "widen", "copy_wait(&packed.full[from.slot], from.phase);", "", MANY),
        ("a packed slot that is taken", "widen", "copy_wait(&packed.empty[place.slot], place.phase ^ 1);", "", MANY),
        ("a slot that is not free", "widen", "copy_wait(&barriers.empty[place.slot], place.phase ^ 1);", "", MANY),
        ("weights without their scales", "widen", "barrier_init(&full[s], 2);", "barrier_init(&full[s], 1);", MANY),
        ("free after one warp", "widen", "&empty[s], kWideningWarps", "&empty[s], 1", MANY),
        ("a packed slot is kept", "widen", "arrive(&packed.empty[from.slot]);", "", "plain"),
        ("full after one warp", "ring", "c.widens() ? kWarpgroup / kWarp : 0", "c.widens() ? 1 : 0", MANY),
        ("rows of one unit", "gemm", "[place.slot], tile.padded * kSlot", "[place.slot], 16 * kSlot", "plain"),
        ("no end of tiles", "gemm", f"= tile;{LINE}arrive(", f"= tile;{LINE}if (found) arrive(", "plain"),
        ("a tile that is taken", "gemm", f"{FREE}if constexpr", "if constexpr", "plain"),
        ("all lanes are done", "gemm", f"{STEP_OF_TILES}if (!warp || lane_id() == 0)", STEP_OF_TILES, "plain"),
        ("a tile is forgotten", "gemm", "if (!found) tile.rows = 0;", "if (index % 2 == 1) tile.rows = 0;", "plain"),
    )
] + [  # `caught_by`: a schedule of test_grouped_gemm.py
    Mutant(f"dynamic: {name}", f"gemm/{file}.cuh", old, new, PAIRS)
    for name, file, old, new in (
        ("the second block adds one", "tile_counter", "return s.words[place.slot];", "return s.words[place.slot] + 1;"),
        ("the second block gets nothing", "tile_counter", "send_word(&s.words", "if (false) send_word(&s.words"),
        ("each block for itself", "tile_counter", "if constexpr (c.cluster == 1) {", "if constexpr (true) {"),
        ("a role too many", "tile_counter", "barrier_init(&empty[i], 1 + (c.has", "barrier_init(&empty[i], 2 + (c.has"),
        ("no end", "gemm", f"= index;{LINE}arrive(", f"= index;{LINE}if (walk.find(index, tile)) arrive("),
        ("a slot that is not free", "gemm", f"{FREE}const i32 index", "const i32 index"),
        ("one slot for all", "gemm", "queue.indices[place.slot], tile", "queue.indices[0], tile"),
        ("all lanes are done", "gemm", f"{STEP_OF_INDICES}if (!warp || lane_id() == 0)", STEP_OF_INDICES),
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
    elif mutant.name.startswith("packed") and mutant.caught_by == EVERY:
        test = partial(packed_cases.test_every_value_with_every_scale, "64x3c1", packed_cases.every_value)
    elif mutant.name.startswith("packed"):
        test = partial(packed_cases.test_the_kernel_has_the_bits_of_the_kernel_for_fp8, mutant.caught_by)
    elif mutant.caught_by == EVERY:
        test = cases.test_every_value_with_every_scale
    else:
        test = partial(cases.test_the_kernel_has_the_bits_of_the_kernel_for_bf16, mutant.caught_by)
    with pytest.raises(AssertionError):
        test()
