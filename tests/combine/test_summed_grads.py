"""CombineArgs.sum_grads, and biases in float32: over one domain and several, direct and through forwarders."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import _native
from moecomm.backends import host
from moecomm.base.protocol import LAYOUTS
from moecomm.errors import BadInput
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": 20, "dtype": torch.bfloat16}
RANKS, TOPK = 4, 3


def check_sums(ranks: LocalBuffers, run_all: Callable[[list[Any]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat round whose combine adds up what every rank gives for a token; rows by `run_all`."""
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(-1, 8, (20 - 3 * rank, TOPK), generator=g) for rank in range(RANKS)]
    xs = [torch.randint(-9, 10, (len(i), 64), generator=g).bfloat16() for i in ids]  # whose sums are exact
    biases = [torch.randint(-99, 100, x.shape, generator=g) / 2**10 for x in xs]  # and not in bfloat16

    def run(pending: list[Any]) -> None:
        for args in pending:
            if isinstance(args, _native.CombineArgs):
                args.sum_grads = 1
        run_all(pending)

    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=run))
    routed = ranks.dispatch([{"x": x, "topk_idx": i, "layout": "flat"} for x, i in zip(xs, ids, strict=True)])
    grads = [torch.randint(-9, 10, (len(here.x), TOPK), generator=g).float() for here in routed]
    found = ranks.combine(
        [
            {"y": here.x, "handle": here.handle, "bias": bias, "weight_grads": grad}
            for here, bias, grad in zip(routed, biases, grads, strict=True)
        ]
    )
    for source, (out, got) in enumerate(found):
        at_source, copies = torch.zeros(len(xs[source]), TOPK), torch.zeros(len(xs[source]), 1)
        for here, grad in zip(routed, grads, strict=True):
            rows = (here.src[:, 0] == source).nonzero().flatten()
            at_source.index_add_(0, here.src[rows, 1].long(), grad[rows])
            copies.index_add_(0, here.src[rows, 1].long(), torch.ones(len(rows), 1))
        assert torch.equal(got, at_source)
        assert torch.equal(out, (xs[source].float() * copies + biases[source]).bfloat16())


@pytest.mark.parametrize(("domain_ranks", "direct"), [(4, True), (2, True), (2, False), (1, True), (1, False)])
def test_what_every_rank_gives_is_added(domain_ranks: int, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    with LocalBuffers(RANKS, **SIZES, domain_ranks=domain_ranks, backend="host") as ranks:
        check_sums(ranks, _native.host_run_all, monkeypatch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "domain_ranks"), [(torch.bfloat16, 4), (torch.float16, 2), (torch.float32, 4)])
def test_a_bias_in_float32_is_added_before_the_rounding(layout: str, dtype: torch.dtype, domain_ranks: int) -> None:
    """Rows and weights are whole numbers, whose sums are exact in every dtype; biases are not."""
    g = torch.Generator().manual_seed(1)
    ids = [torch.rand(20 - 6 * rank, 8, generator=g).argsort(dim=1)[:, :TOPK] for rank in range(RANKS)]
    xs = [torch.randint(-4, 5, (len(i), 64), generator=g).to(dtype) for i in ids]
    weights = [torch.randint(1, 4, i.shape, generator=g).float() for i in ids]
    sizes = {**SIZES, "dtype": dtype}
    with LocalBuffers(RANKS, **sizes, domain_ranks=domain_ranks, backend="host") as ranks:
        names = ("x", "topk_idx", "topk_weights", "layout")
        calls = [dict(zip(names, (*call, layout), strict=True)) for call in zip(xs, ids, weights, strict=True)]
        routed = ranks.dispatch(calls)
        plain = ranks.combine([{"y": here.x, "handle": here.handle} for here in routed])
        for one_row, wire in ((True, None), (False, None), (False, "exact")):
            biases = [torch.randn(out.shape[1:] if one_row else out.shape, generator=g) for out in plain]
            found = ranks.combine(
                [
                    {"y": here.x, "handle": here.handle, "bias": bias, "wire": wire}
                    for here, bias in zip(routed, biases, strict=True)
                ]
            )
            for out, want, bias in zip(found, plain, biases, strict=True):
                assert out.dtype is dtype and torch.equal(out, (want.float() + bias).to(dtype))
        for wrong in {torch.float64, torch.bfloat16, torch.float16, torch.int32} - {dtype}:
            with pytest.raises(BadInput, match=f"bias: got {wrong}; want {dtype} or torch.float32"):
                ranks.combine(
                    [{"y": here.x, "handle": here.handle, "bias": torch.ones(64).to(wrong)} for here in routed]
                )
