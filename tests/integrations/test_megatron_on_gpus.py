"""Megatron-core's MoE layer on GPUs: moecomm's dispatcher beside the all-to-all one, over NCCL groups; in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("tests.integrations.megatron_core", reason="needs megatron-core: pip install megatron-core")

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tests.integrations.megatron_on_cpu import config_of, parallel, without_transformer_engine
from tests.integrations.test_megatron import drawn, pair, results
from tests.integrations.test_megatron_padded import padded

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"params_dtype": torch.bfloat16, "bf16": True, "moe_router_dtype": "fp32"},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "dropped": {"moe_expert_capacity_factor": 0.5},
    "top 3": {"moe_router_topk": 3},
}
PADDED: dict[str, dict[str, Any]] = {
    "float32": {"moe_expert_capacity_factor": 0.5},
    "bfloat16": {**CASES["bfloat16"], "moe_expert_capacity_factor": 1.0},
    "top 3": {"moe_router_topk": 3, "moe_expert_capacity_factor": 1.25},
}
TOKENS, REPLAYS = 96, 4  # of two sequences; of the graph


def _over_nccl(rank: int, group: Any, store: str) -> int:
    """Megatron-core's groups on the GPU of this rank; how many ranks."""
    ranks: int = group.size()
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    parallel(ranks)
    without_transformer_engine()
    torch._dynamo.config.disable = True  # compiling what it wants compiled takes longer than the rest
    model_parallel_cuda_manual_seed(1)
    return ranks


def errors_of(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    """Largest difference of each tensor, relative to its largest value."""
    return [
        float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-6))
        for a, b in zip(got, want, strict=True)
    ]


def _layers(rank: int, group: Any, store: str) -> dict[str, list[float]]:
    ranks = _over_nccl(rank, group, store)
    found = {}
    for name, settings in CASES.items():
        dtype = settings.get("params_dtype", torch.float32)
        theirs, mine = pair(settings, ranks)
        theirs, mine = theirs.cuda(), mine.cuda()
        errors = []
        for tokens in (64, 256 + 32 * rank):
            want, got = (results(layer, rank, tokens, dtype) for layer in (theirs, mine))
            errors += errors_of(got, want)
        found[name] = errors
    return found


def _captured(layer: Any, x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of both passes, and what it writes: what results() gives."""

    def step() -> torch.Tensor:
        out: torch.Tensor = layer(x)[0]
        (out * seen).sum().backward()
        return out.detach()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    layer.zero_grad(set_to_none=True)  # the backward pass in the graph makes those that it writes
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    # On the stream of the passes before: an AccumulateGrad node that one of them keeps alive is of that stream.  NCCL's
    # watchdog asks for events of its own meanwhile, in a thread of its own.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        out = step()
    return graph, [out, x.grad, *(p.grad for p in layer.parameters())]


def _graphs(rank: int, group: Any, store: str) -> dict[str, list[float]]:
    """Experts padded to their capacity: eager passes, and a graph that is replayed with other inputs."""
    ranks = _over_nccl(rank, group, store)
    found = {}
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one can't be captured
    for name, settings in PADDED.items():
        dtype = settings.get("params_dtype", torch.float32)
        theirs, mine = (layer.cuda() for layer in pair(padded(settings), ranks))
        errors = []
        for tokens in (32, TOKENS):  # the second time there is no room for them
            want, got = (results(layer, rank, tokens, dtype) for layer in (theirs, mine))
            errors += errors_of(got, want)
        x, seen = drawn(mine, rank, TOKENS, dtype)
        graph, written = _captured(mine, x.requires_grad_(), seen)
        for seed in range(REPLAYS):
            with torch.no_grad():
                for static, new in zip((x, seen), drawn(mine, rank, TOKENS, dtype, seed), strict=True):
                    static.copy_(new)
            for tensor in written:
                tensor.fill_(torch.nan)
            graph.replay()
            got = [t.clone() for t in written]
            errors += errors_of(got, results(theirs, rank, TOKENS, dtype, seed=seed))
        for buffer, _ in mine.token_dispatcher._comm_manager._exchange._buffers.values():
            buffer.check()
        found[name] = errors
    return found


@pytest.mark.gpu2
@pytest.mark.parametrize("body", [_layers, _graphs])
def test_the_layer_on_gpus(gpu_ranks: Any, tmp_path: Path, body: Any) -> None:
    """Sums over rows go through other kernels' orders there: a few roundings of the longest sum, 2000 rows."""
    count = min(4, torch.cuda.device_count())
    gpu_ranks.start(count, body, str(tmp_path / "nccl"))
    for found in gpu_ranks.results(count, timeout_s=280).values():
        assert not isinstance(found, BaseException), found
        for name, errors in found.items():
            bound = 8 * 2.0**-8 if name == "bfloat16" else 64 * 2.0**-24
            assert errors and all(error <= bound for error in errors), (name, errors)


def test_cases_are_configurations_that_exist() -> None:
    for settings in CASES.values():
        config_of(4, **settings)
    for settings in PADDED.values():
        config_of(4, **{name: value for name, value in padded(settings).items() if name != "ours"})
