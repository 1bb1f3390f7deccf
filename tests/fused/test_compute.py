"""The launch of a fused layer, without a GPU: the order of its tiles, that its kernel compiles."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from moecomm.fused import FP8_SCHEDULES, PACKED_SCHEDULES, SCHEDULES
from moecomm.fused.compute import layer_kernel, row_tiles_per_turn
from moecomm.fused.kernels import FP8, Epilogue
from moecomm.fused.schedules import schedule_of_both
from moecomm.gpu import loader
from moecomm.router import MODELS
from moecomm.testing.layers import activations

from ..compiled import check_compiled, check_kernel, looked_at
from ..few import few

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("name", ["at-work-h200-4", "at-work-fp8-h200-4"])
def test_row_tiles_per_turns_are_about_the_best_that_were_measured(name: str) -> None:
    """Measured with 8192 tokens on 4 GPUs: one by one and at work, together."""
    text = (Path(__file__).parents[2] / "bench" / "results" / f"{name}.json").read_text()
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in json.loads(text)["rows"]:
        if row["tokens"] == 8192 and (turns := re.fullmatch(r"turns of (\d+)", row["what"])):
            found[row["model"]][int(turns[1])] = row["us"] * row["at_work_us"]
    assert set(found) == {"deepseek-v3", "qwen3-235b", "qwen3-30b-a3b"}
    for model, took in found.items():
        sizes, dtype = MODELS[model], FP8 if "fp8" in name else BF16
        rows = 8192 * sizes.topk * 4 // sizes.num_experts
        step = row_tiles_per_turn(
            schedule_of_both(dtype, rows, sizes.intermediate), sizes.intermediate * dtype.itemsize
        )
        assert took[step] <= 1.01 * min(took.values()), (model, took)


# Large and small tiles, with some type, activation and length of rows.
KINDS = {
    "256x4c2u16": (BF16, True, 7168, BF16),
    "256x4c1": (FP16, False, 2880, FP16),
    "128x6c2": (BF16, True, 16384, BF16),
    "64x8c1": (FP16, True, 8, FP16),
    "128x4c1": (FP8, True, 7168, BF16),
    "64x5c1": (FP8, False, 2880, FP16),
    "128x4c1r": (FP8, True, 7168, BF16),
    "64x5c2": (FP8, False, 16, BF16),
}
# Kernels from which the compiler has left something out.
LACKED = {f"64x8c1, {hidden} columns": layer_kernel(BF16, True, SCHEDULES["64x8c1"], hidden) for hidden in (2880, 7168)}
KERNELS = {
    name: layer_kernel(dtype, apart, (SCHEDULES | FP8_SCHEDULES)[name], hidden, out)
    for name, (dtype, apart, hidden, out) in KINDS.items()
} | LACKED
KERNELS |= {
    f"{name}, {epilogue.activation}": layer_kernel(
        dtype, apart, (SCHEDULES | FP8_SCHEDULES)[name], hidden, out, epilogue=epilogue
    )
    for (name, (dtype, apart, hidden, out)), epilogue in zip(
        KINDS.items(), itertools.cycle(Epilogue(kernel, True) for kernel in activations(7.0)), strict=False
    )
}
# The loops of FP8 with fewer registers.
KERNELS |= {
    f"packed, {name}, {epilogue.activation}": layer_kernel(FP8, apart, schedule, hidden, out, counted, epilogue)
    for name, schedule in PACKED_SCHEDULES.items()
    for apart, hidden, out, counted, epilogue in (
        (True, 7168, BF16, 128, Epilogue("swigluoai", True)),
        (True, 7168, BF16, 128, Epilogue("swiglu_limited")),
        (False, 2880, FP16, 32, Epilogue()),
    )
    if not schedule.dynamic
}
CHANNELS = {"256x4c2u16": (FP8, True, 7168), "64x8c1": (torch.int8, False, 2880), "128x6c1": (FP8, False, 16)}
KERNELS |= {
    f"{name}, scales of channels": layer_kernel(
        dtype, apart, SCHEDULES[name], hidden, BF16, 128, Epilogue("swiglu", hidden == 2880, True)
    )
    for name, (dtype, apart, hidden) in CHANNELS.items()
}


@pytest.mark.compiled(KERNELS)
@pytest.mark.parametrize("name", few(KERNELS, "64x5c2", "128x6c1, scales of channels"))
def test_compiles_without_spills_and_fits(name: str) -> None:
    check_kernel(KERNELS[name], awaits="first")


def test_fetching_may_be_called() -> None:
    """As it is where the compiler leaves something out otherwise."""
    pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")
    core = loader._core()
    kernel = layer_kernel(BF16, True, SCHEDULES["64x8c1"], 7168)
    made = loader._compile(core, loader._CALLS + kernel.source, "sm_90a")
    check_compiled(looked_at(*made), kernel.threads)
