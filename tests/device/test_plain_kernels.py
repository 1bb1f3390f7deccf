"""Small kernels beside rounds compile for sm_90a; what they do: tests/emulator and tests/gpu."""

from __future__ import annotations

import pytest
import torch

from moecomm.base.protocol import DTYPES
from moecomm.fused import quantized
from moecomm.gpu import budgets, expert_table, padding, routing_map, used_rows
from moecomm.ops import combine_gradients, swiglu, tidy

from ..compiled import check_kernel
from ..few import few

MAPS = ("ids_of_map", "weights_at_experts<i64>", "weights_at_experts<i32>")
BUDGETS = ("count_entries<i64>", "keep_entries<i64>", "count_entries<i32>", "keep_entries<i32>")
KERNELS = (
    {f"padding, {word}": padding.kernel(word) for word in ("uint4", "u32", "u8")}
    | {f"copy, {word}": used_rows.kernel(word) for word in ("uint4", "u32", "u8")}
    | {f"tidy, {ids}": tidy.kernel(ids) for ids in ("i64", "i32")}
    | {f"gradients, {dtype}": combine_gradients.kernel(dtype) for dtype in DTYPES}
    | {f"SwiGLU, {dtype}": swiglu.kernel(dtype) for dtype in DTYPES}
    | {f"rows, {one} to {to}": quantized.kernel(one, to) for one in DTYPES for to in (quantized.FP8, torch.int8)}
    | {entry: routing_map.kernel(entry) for entry in MAPS}
    | {entry: budgets.kernel(entry) for entry in BUDGETS}
    | {"table of experts": expert_table.kernel()}
)


@pytest.mark.compiled(KERNELS)
@pytest.mark.parametrize(
    "name", few(KERNELS, "padding, u32", "copy, uint4", "tidy, i64", "ids_of_map", "keep_entries<i64>")
)
def test_compiles_without_spills(name: str) -> None:
    check_kernel(KERNELS[name])
