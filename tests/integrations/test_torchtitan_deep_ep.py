"""torchtitan's own `deepep` and `hybridep` dispatchers over moecomm's copy of deep_ep, on CPU ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch._library import opaque_object

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="needs torchtitan, installed: python -m tests.integrations.versions torchtitan",
)
HIDDEN, EXPERTS, TOPK, TOKENS = 32, 4, 2, 12


def _operators_of_cpus() -> None:
    """In a process of its own.  torchtitan registers its operators for CUDA alone, and takes the base class of objects
    that operators pass on by the name that later versions of torch have.
    """
    if not hasattr(opaque_object, "CustomClassBase"):
        opaque_object.CustomClassBase = opaque_object.OpaqueBase  # type: ignore[attr-defined]
    impl, custom_op = torch.library.impl, torch.library.custom_op
    torch.library.impl = lambda lib, name, key: impl(lib, name, "CPU" if key == "CUDA" else key)  # type: ignore[assignment]

    def for_cpus(name: str, **settings: Any) -> Any:
        return custom_op(name, **{**settings, "device_types": "cpu"})

    torch.library.custom_op = for_cpus  # type: ignore[assignment]


def _layer(rank: int, group: Any, name: str) -> list[bool] | str:
    """Return whether the output and the gradients of tokens, scores and experts are those of the formula."""
    from tests.integrations.torchtitan_stub import without_triton

    without_triton()
    from moecomm.compat import install_as_deep_ep

    install_as_deep_ep()
    try:
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common import token_dispatcher
    except ImportError as error:
        return f"torchtitan can't be imported: {error}"
    from torch.distributed.device_mesh import init_device_mesh

    set_spmd_backend("default")  # the other one takes groups from meshes that only its trainer registers
    kind = getattr(token_dispatcher, name)
    _operators_of_cpus()  # before a dispatcher imports them
    config = kind.Config(num_experts=EXPERTS, top_k=TOPK, hidden_dim=HIDDEN, num_max_tokens_per_rank=TOKENS)
    dispatcher = kind(config)
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (group.size(),)))
    dispatcher.init_buffer()
    g = torch.Generator().manual_seed(rank)
    local = EXPERTS // group.size()
    first = rank * local
    # Small integers and halves: everything is exact in bfloat16, in whatever order.
    x = torch.randint(-3, 4, (TOKENS, HIDDEN), generator=g).bfloat16().requires_grad_()
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK]
    scores = (torch.randint(1, 3, (TOKENS, TOPK), generator=g) / 2).requires_grad_()
    found = []
    for _ in range(2):
        x.grad = scores.grad = None
        rows, counts, state = dispatcher.dispatch(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
        scale = torch.arange(first + 1, first + local + 1).repeat_interleave(counts.long())
        y = rows * scale.unsqueeze(1).to(rows.dtype)
        out = dispatcher.combine(y, state, x)
        out.backward(torch.ones_like(out))
        weight = (scores * (ids + 1)).sum(dim=1, keepdim=True).detach()
        of_scores = (ids + 1) * x.detach().float().sum(dim=1, keepdim=True)
        assert x.grad is not None and scores.grad is not None
        found.append(torch.equal(out.detach().float(), x.detach().float() * weight))
        found.append(torch.equal(x.grad.float(), weight.expand_as(x)))
        found.append(torch.equal(scores.grad.float(), of_scores))
    return found


@pytest.mark.parametrize("name", ["DeepEPTokenDispatcher", "HybridEPTokenDispatcher"])
def test_their_dispatcher_runs_over_ours(name: str, ranks: Any) -> None:
    ranks.start(2, _layer, name)
    for result in ranks.results(2, timeout_s=240).values():
        if isinstance(result, str):
            pytest.skip(result)
        assert result == [True] * 6, result
