"""vLLM's own modular kernel over moecomm, on two CPU ranks, where vLLM is installed and can be imported."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm, installed")
HIDDEN, EXPERTS, TOPK, MOST = 128, 4, 2, 8


def _kernel(rank: int, group: Any) -> Any:
    try:
        import vllm.model_executor.layers.fused_moe.modular_kernel as mk
        from vllm.distributed.device_communicators import all2all
        from vllm.model_executor.layers.fused_moe import all2all_utils
        from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
            TopKWeightAndReduceDelegate,
            TopKWeightAndReduceNoOP,
        )
    except ImportError as error:
        return f"vllm can't be imported: {error}"
    from moecomm.compat import deep_ep
    from moecomm.integrations.vllm import register
    from moecomm.integrations.vllm.managers import BatchedManager, OpenedBuffers, StandardManager
    from moecomm.integrations.vllm.standard import StandardPrepareAndFinalize

    register()
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_v2 import DeepEPV2PrepareAndFinalize

    assert all2all.DeepEPHTAll2AllManager is StandardManager and all2all.DeepEPLLAll2AllManager is BatchedManager
    # A platform without workspaces of its own; whether this one is CPUs depends on how vLLM was built.
    mk.current_platform = SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False, is_rocm=lambda: False)
    local = EXPERTS // group.size()
    first = rank * local

    class Experts(mk.FusedMoEExpertsModular):
        """Expert e multiplies by w1[e]; what is asked of a class before it is chosen is never asked."""

        def __init__(self, batched: bool) -> None:
            self.batched = batched
            self.moe_config = SimpleNamespace(moe_parallel_config=None)
            self.quant_config = all2all_utils.FusedMoEQuantConfig.make()

        def activation_format(self) -> Any:
            return mk.FusedMoEActivationFormat.BatchedExperts if self.batched else mk.FusedMoEActivationFormat.Standard

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceDelegate() if self.batched else TopKWeightAndReduceNoOP()

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, *more: Any) -> Any:
            return (0,), (0,), ((local, M, K) if self.batched else (M, K))

        def apply(
            self, output: Any, hidden_states: Any, w1: Any, topk_weights: Any, topk_ids: Any, **more: Any
        ) -> None:
            scale = w1[:, 0, 0]
            if self.batched:
                output.copy_(hidden_states * scale.view(-1, 1, 1))
                return
            # Theirs map ids of other ranks' experts to -1, and leave them out.
            mine = more["expert_map"][topk_ids]
            factor = torch.where(mine >= 0, scale[mine.clamp(min=0)] * topk_weights, 0.0)
            output.copy_(hidden_states * factor.sum(dim=1, keepdim=True))

        def _asked(self) -> bool:
            return True

        _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = _asked
        _supports_activation = _supports_parallel_config = _asked

    g = torch.Generator().manual_seed(rank)
    same = []
    rounds = OpenedBuffers(group)
    standard = StandardPrepareAndFinalize(
        rounds, num_dispatchers=group.size(), dp_size=group.size(), rank_expert_offset=first
    )
    batched = all2all_utils.DeepEPLLPrepareAndFinalize(rounds, max_tokens_per_rank=MOST, num_dispatchers=group.size())
    elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK)
    sizes = {"num_dispatchers": group.size(), "dp_size": group.size(), "num_experts": EXPERTS, "num_topk": TOPK}
    second = DeepEPV2PrepareAndFinalize(elastic, rank_expert_offset=first, **sizes)  # of prefill, in DeepEP's V2 names
    w1 = torch.arange(first + 1, first + local + 1).view(-1, 1, 1).float().expand(-1, 2, HIDDEN)
    expert_map = torch.full((EXPERTS,), -1)
    expert_map[first : first + local] = torch.arange(local)
    # Where as many rows arrive as there are tokens, their kernel lets experts write where the result goes.
    for both, alike in itertools.product((standard, batched, second), (False, True)):
        kernel = mk.FusedMoEKernel(both, Experts(both is batched))
        x = torch.randint(-8, 9, (3 + 2 * rank, HIDDEN), generator=g)
        x = x.bfloat16() if both is second else x.float()  # which takes nothing else
        ids = torch.rand(len(x), EXPERTS, generator=g).topk(TOPK).indices
        if alike:
            ids = torch.arange(first, first + TOPK).expand(len(x), -1).contiguous()
        weights = torch.randint(1, 5, (len(x), TOPK), generator=g).float()
        out = kernel.impl.apply(
            x, w1, w1.transpose(1, 2), ids, weights, global_num_experts=EXPERTS, expert_map=expert_map
        )
        same.append(torch.equal(out, x * ((ids + 1) * weights).sum(dim=1, keepdim=True).to(x.dtype)))
        assert kernel.can_overlap_shared_experts and kernel.output_is_reduced()
    rounds.pool.close()
    elastic.destroy()
    return same


def test_their_kernel_runs_over_ours(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_VLLM", "always")
    ranks.start(2, _kernel)
    found = ranks.results(2, timeout_s=240)
    for result in found.values():
        if isinstance(result, str):
            pytest.skip(result)
        assert not isinstance(result, BaseException), result
    assert found == {0: [True] * 6, 1: [True] * 6}
