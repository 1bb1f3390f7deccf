"""Small kernels beside rounds compile for sm_90a; what they do: tests/emulator and tests/gpu."""

from __future__ import annotations

import pytest
import torch

from moecomm import _native
from moecomm.backends.between_rounds import SET_PLACEMENT
from moecomm.backends.lsa_kernels import choice_of
from moecomm.base.protocol import BALANCED, DTYPES, REPLICATED
from moecomm.gpu import plain_kernel, quantize_rows
from moecomm.gpu.row_pass import TYPES, kernel
from moecomm.ops import swiglu
from moecomm.transfer import gpu as weights
from moecomm.transfer.casts import CASTS as OF_WEIGHTS
from moecomm.weights.copies import COPY
from moecomm.window.pace import PAUSE

from ..compiled import check_kernel
from ..few import few
from ..gpu.test_plain_kernels import SWIGLUS


def choice(ranks: int, slots: int, experts: int, placed: int) -> plain_kernel.PlainKernel:
    """Return the kernel ahead of a dispatch of so many experts in so many slots."""
    sizes = {"topk": 8, "max_tokens": 4096, "ring_tokens": 32, "staged_row_bytes": 1024, "heap_bytes": 1 << 20}
    args = _native.DispatchArgs()
    args.ctx.shape, args.ctx.placed = _native.Shape(ranks=ranks, slots=slots, named_experts=experts, **sizes), placed
    args.idx_bytes = 8
    found = choice_of(args)
    assert found is not None
    return found


WORDS, OF_IDS = ("uint4", "u32", "u8"), ("weights_at_experts", "count_entries", "keep_entries")
KERNELS = (
    {f"padding, {word}": kernel("zero_padding", word) for word in WORDS}
    | {f"copy, {word}": kernel("copy_rows", word) for word in WORDS}
    | {f"tidy, {ids}, {word}": kernel("tidy", ids, word) for ids in ("i64", "i32") for word in WORDS}
    | {f"gradients, {dtype}": kernel("combine_gradients", TYPES[dtype]) for dtype in DTYPES}
    | {f"{name}, {dtype}": swiglu.kernel(dtype, activation) for name, activation in SWIGLUS.items() for dtype in DTYPES}
    | {"ids_of_map": kernel("ids_of_map")}
    | {f"{name}<{ids}>": kernel(name, ids) for name in OF_IDS for ids in ("i64", "i32")}
    | {"table of experts": kernel("look_up_experts"), "table of a placement": SET_PLACEMENT, "pause": PAUSE}
    | {"copies of experts": COPY}
    | {
        f"choice of {'copies' if placed == REPLICATED else 'replicas'}, {counts[0]} ranks": choice(*counts, placed)
        for counts in ((2, 12, 10), (3, 9, 40), (8, 320, 256), (64, 384, 256))
        for placed in (BALANCED, REPLICATED)
    }
    | {
        f"{name} of {dtype}, {'aligned' if aligned else 'any'}": quantize_rows.kernel(name, dtype, aligned)
        for name in quantize_rows.NAMES
        for dtype in DTYPES
        for aligned in (True, False)
    }
    | {f"blocks of {dtype}": quantize_rows.blocks_kernel(dtype) for dtype in DTYPES}
    | {"copy of weights": weights.copy_kernel(), "words of readers": weights.tell_kernel()}
    | {
        f"weights in {name} of {dtype}, {'aligned' if aligned else 'any'}": weights.cast_kernel(name, dtype, aligned)
        for name in OF_WEIGHTS
        for dtype in DTYPES
        for aligned in ((True,) if name == "fp8" else (True, False))
    }
    | {
        f"largest of {dtype}, {'aligned' if aligned else 'any'}": weights.largest_kernel(dtype, aligned)
        for dtype in DTYPES
        for aligned in (True, False)
    }
)
ALWAYS = (
    "table of a placement",
    "pause",
    "copies of experts",
    "copy of weights",
    "words of readers",
    "choice of copies, 3 ranks",
    "choice of copies, 8 ranks",
    "choice of copies, 64 ranks",
)
CASTS = [f"{name} of {torch.bfloat16}, aligned" for name in ("fp8_token", "nvfp4")] + [f"blocks of {torch.bfloat16}"]
CASTS += [f"weights in {name} of {torch.bfloat16}, aligned" for name in ("fp8", "int8_token", "nvfp4")]
CASTS += [f"largest of {torch.bfloat16}, aligned"]


@pytest.mark.compiled(KERNELS)
@pytest.mark.parametrize(
    "name",
    few(KERNELS, "padding, u32", "copy, uint4", "tidy, i64, uint4", "ids_of_map", "keep_entries<i64>", *ALWAYS, *CASTS),
)
def test_compiles_without_spills(name: str) -> None:
    check_kernel(KERNELS[name])
