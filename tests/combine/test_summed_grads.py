"""CombineArgs.sum_grads, and biases in float32: over one domain and several, straight and by relays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import _native
from moecomm.backends import host
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
        home, copies = torch.zeros(len(xs[source]), TOPK), torch.zeros(len(xs[source]), 1)
        for here, grad in zip(routed, grads, strict=True):
            rows = (here.src[:, 0] == source).nonzero().flatten()
            home.index_add_(0, here.src[rows, 1].long(), grad[rows])
            copies.index_add_(0, here.src[rows, 1].long(), torch.ones(len(rows), 1))
        assert torch.equal(got, home)
        assert torch.equal(out, (xs[source].float() * copies + biases[source]).bfloat16())


@pytest.mark.parametrize(("domain_ranks", "direct"), [(4, True), (2, True), (2, False), (1, True), (1, False)])
def test_what_every_rank_gives_is_added(domain_ranks: int, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    with LocalBuffers(RANKS, **SIZES, domain_ranks=domain_ranks, backend="host") as ranks:
        check_sums(ranks, _native.host_run_all, monkeypatch)
