"""Megatron-core's MoE layer on GPUs: moecomm's dispatcher beside the all-to-all one, over NCCL groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install megatron-core")

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tests.integrations.megatron_on_cpu import config_of, parallel, without_transformer_engine
from tests.integrations.test_megatron import pair, results

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"params_dtype": torch.bfloat16, "bf16": True, "moe_router_dtype": "fp32"},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "dropped": {"moe_expert_capacity_factor": 0.5},
    "top 3": {"moe_router_topk": 3},
}


def _layers(rank: int, group: Any, store: str) -> dict[str, list[float]]:
    """Largest difference of each tensor, relative to its largest value."""
    ranks = group.size()
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    parallel(ranks)
    without_transformer_engine()
    torch._dynamo.config.disable = True  # compiling what it wants compiled takes longer than the rest
    model_parallel_cuda_manual_seed(1)
    found = {}
    for name, settings in CASES.items():
        dtype = settings.get("params_dtype", torch.float32)
        theirs, mine = pair(settings, ranks)
        theirs, mine = theirs.cuda(), mine.cuda()
        errors = []
        for tokens in (64, 256 + 32 * rank):
            want, got = (results(layer, rank, tokens, dtype) for layer in (theirs, mine))
            pairs = zip(want, got, strict=True)
            errors += [
                float((a.float() - b.float()).abs().max() / a.float().abs().max().clamp(min=1e-6)) for a, b in pairs
            ]
        found[name] = errors
    return found


@pytest.mark.gpu4
def test_the_layer_on_four_gpus(gpu_ranks: Any, tmp_path: Path) -> None:
    """Sums over rows go through other kernels' orders there: a few roundings of the longest sum, 2000 rows."""
    gpu_ranks.start(4, _layers, str(tmp_path / "nccl"))
    for found in gpu_ranks.results(4, timeout_s=280).values():
        assert not isinstance(found, BaseException), found
        for name, errors in found.items():
            assert max(errors) <= (8 * 2.0**-8 if name == "bfloat16" else 64 * 2.0**-24), (name, errors)


def test_cases_are_configurations_that_exist() -> None:
    for settings in CASES.values():
        config_of(4, **settings)
