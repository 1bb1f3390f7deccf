"""torchtitan's own RoutedExperts over moecomm, against the same module with its all-to-all dispatcher, on CPU ranks."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="needs torchtitan, installed: python -m tests.integrations.versions torchtitan",
)
HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 32, 48, 8, 2, 13
OVERRIDE = "moecomm.integrations.torchtitan.use_moecomm"
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"capacity_factor": math.inf}, {"dtype": "float32"}, {"wire": "rows"})


def _same(rank: int, group: Any) -> list[list[bool]] | str:
    """Return whether outputs and gradients equal those without moecomm, by option."""
    from tests.integrations.torchtitan_stub import without_triton

    without_triton()
    try:
        from torchtitan.config.configurable import Configurable
        from torchtitan.config.override import OverrideConfig, apply_overrides
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    except ImportError as error:
        return f"torchtitan can't be imported: {error}"
    from torch.distributed.device_mesh import init_device_mesh

    set_spmd_backend("default")  # the other one takes groups from meshes that only its trainer registers

    class Model(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            experts: RoutedExperts.Config

    ranks = group.size()
    mesh = init_device_mesh("cpu", (ranks,))
    config = Model.Config(
        experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=EXPERTS // ranks),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK),
        )
    )
    found = []
    for options in (None, *OPTIONS):
        chosen = copy.deepcopy(config)
        if options is not None:
            assert len(apply_overrides(OverrideConfig(imports=[(OVERRIDE, options)]), chosen)) == 1
        layer = chosen.experts.build()
        kind = type(layer.token_dispatcher)
        assert (kind is AllToAllTokenDispatcher) == (options is None), kind
        layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
        g = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(std=0.2, generator=g)
        x = torch.randn(TOKENS, HIDDEN, generator=g).requires_grad_()
        scores, ids = torch.rand(TOKENS, EXPERTS, generator=g).topk(TOPK)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        given = [x, scores.requires_grad_(), ids]
        if "x_BLD" in inspect.signature(layer.forward).parameters:  # 0.3.0; later ones have no batch
            given = [tensor.unsqueeze(0) for tensor in given]
        out = layer(*given, counts)
        (out * torch.randn(TOKENS, HIDDEN, generator=g)).sum().backward()
        found.append([out.detach(), x.grad, scores.grad, *(parameter.grad for parameter in layer.parameters())])
    theirs, *ours = found
    assert all(value.any() for value in theirs)
    return [[torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)] for mine in ours]


def test_their_experts_give_the_same_bits_over_ours(ranks: Any) -> None:
    """In float32 with two experts a token: sums of two terms are the same in either order."""
    ranks.start(2, _same)
    for result in ranks.results(2, timeout_s=240).values():
        if isinstance(result, str):
            pytest.skip(result)
        assert result == [[True] * 6] * len(OPTIONS), result
