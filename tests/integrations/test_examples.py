"""The examples of frameworks, on CPU ranks."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from tests.integrations import vllm_stub as stub

sys.path.append(str(Path(__file__).parent.parent.parent / "examples"))


def test_the_layer_in_vllm_is_the_sum_over_experts(batches: Any) -> None:
    import vllm_layer as example

    def on_rank(rank: Any) -> bool:
        generator = torch.Generator().manual_seed(rank.rank)
        x = torch.randint(-8, 9, (rank.rank + 3, example.HIDDEN), generator=generator).float()  # sums are exact
        ids = torch.rand(len(x), example.EXPERTS, generator=generator).topk(example.TOPK).indices
        weights = torch.randint(1, 5, ids.shape, generator=generator).float()
        out = example.layer(rank, x, ids, weights, stub.quant_config())
        return torch.equal(out, x * ((ids + 1) * weights).sum(dim=1, keepdim=True))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(on_rank, moecomm.local_ranks(2))) == [True, True]


def _megatron(rank: int, group: Any) -> tuple[str, bool]:
    from tests.integrations import megatron_core  # noqa: F401 - ahead of whatever imports Megatron
    from tests.integrations.megatron_on_cpu import parallel, without_cuda

    example = importlib.import_module("megatron_layer")
    without_cuda()
    parallel(2)
    on_cpu = {"use_cpu_initialization": True, "bias_activation_fusion": False, "moe_token_dispatcher_type": "alltoall"}
    mine = example.build(2, **on_cpu)
    example.use_moecomm = lambda spec: spec
    theirs = example.build(2, **on_cpu)
    theirs.load_state_dict(mine.state_dict())
    gradients = []
    for layer in (mine, theirs):
        torch.manual_seed(rank)
        gradients.append(example.step(layer, "cpu"))
    return type(mine.token_dispatcher).__module__.split(".")[0], torch.equal(*gradients)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_the_layer_in_megatron_is_the_one_with_all_to_all(ranks: Any) -> None:
    assert ranks.run(2, _megatron) == [("moecomm", True)] * 2
