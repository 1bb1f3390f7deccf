"""CombineArgs.bias_first: the sum of a token starts from its bias, as in DeepEP, in one domain."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import _native
from moecomm.combine import reference
from moecomm.dispatch import reference as dispatch_reference
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from ..few import few

RANKS, TOPK, TOKENS, HIDDEN, EXPERTS = 4, 3, 20, 80, 8
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}


def cancelling(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Numbers whose float32 sums depend on their order: large ones that often cancel, and small ones."""
    large = torch.tensor([-1.375, 1.375, 2.0**-27, -(2.0**-27), 1.0, -1.0])
    return large[torch.randint(0, len(large), shape, generator=g)]


def check_bias_first(
    ranks: LocalBuffers,
    layout: str,
    wire: Any,
    wide: bool,
    run_all: Callable[[list[Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    domain_ranks: int | None = None,
) -> None:
    """A round of bfloat16 rows against the reference; the last rank has no tokens, and one token has no expert."""
    g = torch.Generator().manual_seed(0)
    counts = [TOKENS - 3 * rank if rank < RANKS - 1 else 0 for rank in range(RANKS)]
    ids = [torch.rand(count, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK] for count in counts]
    ids[0][1] = -1
    xs = [torch.randn(count, HIDDEN, generator=g).bfloat16() for count in counts]
    weights = [torch.ones(count, TOPK) for count in counts]
    biases = [cancelling(tuple(x.shape), g) * (1 + 2**-20 if wide else 1) for x in xs]
    biases = [bias if wide else bias.bfloat16() for bias in biases]
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=run_all))
    calls = [
        {"x": x, "topk_idx": i, "topk_weights": w, "layout": layout} for x, i, w in zip(xs, ids, weights, strict=True)
    ]
    routed = ranks.dispatch(calls)
    arrived = dispatch_reference.dispatch(xs, ids, list(weights), num_experts=EXPERTS, layout=layout, max_tokens=TOKENS)
    ys = [cancelling(tuple(here.x.shape), g).bfloat16() for here in arrived]
    given = [torch.zeros(here.handle.y_shape).bfloat16() for here in routed]
    for rows, y in zip(given, ys, strict=True):
        rows.view(-1, HIDDEN)[: len(y)] = y
    options = {"weighted": False, "wire": wire}
    found = ranks.combine(
        [
            {"y": rows, "handle": here.handle, "bias": bias, "bias_first": True, **options}
            for rows, here, bias in zip(given, routed, biases, strict=True)
        ]
    )
    wanted = {
        first: reference.combine(
            ys, arrived, layout=layout, bias=list(biases), bias_first=first, domain_ranks=domain_ranks, **options
        )
        for first in (True, False)
    }
    assert all(torch.equal(out, right) for out, right in zip(found, wanted[True], strict=True))
    same = all(torch.equal(*pair) for pair in zip(*wanted.values(), strict=True))
    assert same == (domain_ranks is not None)  # there it makes no difference; else the data would show nothing


@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("layout", "wire"),
    [("flat", None), *few([("expert", None), ("expert", "exact"), ("batched", "exact")], ("expert", "exact"))],
)
def test_the_sum_starts_from_the_bias(layout: str, wire: Any, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalBuffers(RANKS, **SIZES, backend="host") as ranks:
        check_bias_first(ranks, layout, wire, wide, _native.host_run_all, monkeypatch)


def test_over_several_domains_the_bias_is_added_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalBuffers(RANKS, **SIZES, domain_ranks=2, backend="host") as ranks:
        check_bias_first(ranks, "flat", None, False, _native.host_run_all, monkeypatch, domain_ranks=2)
