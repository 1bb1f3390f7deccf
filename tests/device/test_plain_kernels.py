"""Small kernels beside rounds compile for sm_90a; what they do: tests/emulator and tests/gpu."""

from __future__ import annotations

import pytest
import torch

from moecomm import _native
from moecomm.backends.between_rounds import SET_PLACEMENT
from moecomm.backends.lsa_kernels import choice_of
from moecomm.base.protocol import BALANCED, DTYPES, REPLICATED
from moecomm.fused.copies import COPY
from moecomm.gpu import budgets, expert_table, padding, plain_kernel, quantize_rows, routing_map, used_rows
from moecomm.ops import combine_gradients, swiglu, tidy
from moecomm.window.pace import PAUSE

from ..compiled import check_kernel
from ..few import few


def choice(ranks: int, slots: int, experts: int, placed: int) -> plain_kernel.PlainKernel:
    """Return the kernel ahead of a dispatch of so many experts in so many slots."""
    sizes = {"topk": 8, "max_tokens": 4096, "ring_tokens": 32, "staged_row_bytes": 1024, "heap_bytes": 1 << 20}
    args = _native.DispatchArgs()
    args.ctx.shape, args.ctx.placed = _native.Shape(ranks=ranks, slots=slots, named_experts=experts, **sizes), placed
    args.idx_bytes = 8
    found = choice_of(args)
    assert found is not None
    return found


MAPS = ("ids_of_map", "weights_at_experts<i64>", "weights_at_experts<i32>")
BUDGETS = ("count_entries<i64>", "keep_entries<i64>", "count_entries<i32>", "keep_entries<i32>")
KERNELS = (
    {f"padding, {word}": padding.kernel(word) for word in ("uint4", "u32", "u8")}
    | {f"copy, {word}": used_rows.kernel(word) for word in ("uint4", "u32", "u8")}
    | {f"tidy, {ids}, {word}": tidy.kernel(ids, word) for ids in ("i64", "i32") for word in ("uint4", "u32", "u8")}
    | {f"gradients, {dtype}": combine_gradients.kernel(dtype) for dtype in DTYPES}
    | {f"SwiGLU, {dtype}": swiglu.kernel(dtype) for dtype in DTYPES}
    | {entry: routing_map.kernel(entry) for entry in MAPS}
    | {entry: budgets.kernel(entry) for entry in BUDGETS}
    | {"table of experts": expert_table.kernel(), "table of a placement": SET_PLACEMENT, "pause": PAUSE}
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
)
ALWAYS = (
    "table of a placement",
    "pause",
    "copies of experts",
    "choice of copies, 3 ranks",
    "choice of copies, 8 ranks",
    "choice of copies, 64 ranks",
)
CASTS = [f"{name} of {torch.bfloat16}, aligned" for name in ("fp8_token", "nvfp4")]


@pytest.mark.compiled(KERNELS)
@pytest.mark.parametrize(
    "name",
    few(KERNELS, "padding, u32", "copy, uint4", "tidy, i64, uint4", "ids_of_map", "keep_entries<i64>", *ALWAYS, *CASTS),
)
def test_compiles_without_spills(name: str) -> None:
    check_kernel(KERNELS[name])
