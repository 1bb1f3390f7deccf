"""How many puts rounds over several domains take: runs of tokens and of sums leave together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from .machine import Machine
from .test_kernels import pytestmark as pytestmark

RANKS, NEAR, EXPERTS, TOKENS, HIDDEN = 4, 2, 8, 64, 512


@pytest.mark.parametrize("layout", ["flat", "expert"])
@pytest.mark.parametrize("every", [1, 2])
def test_consecutive_tokens_of_a_chunk_leave_as_one_put(
    layout: str, every: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank puts its header and counts to the ranks of the other domain, and then runs of rows, or of sums."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": 2, "max_tokens": TOKENS}
    with LocalBuffers(RANKS, **sizes, domain_ranks=NEAR, backend="host") as ranks:
        calls = []
        for rank in range(RANKS):
            away = EXPERTS // 2 * (1 - rank // NEAR)  # the first expert of the other domain
            ids = torch.where(torch.arange(TOKENS)[:, None] % every == 0, torch.tensor([[away, away + 3]]), -1)
            calls.append({"x": torch.randn(TOKENS, HIDDEN).bfloat16(), "topk_idx": ids, "layout": layout})
        machine.puts()
        try:
            routed = ranks.dispatch(calls)
            dispatched = machine.puts()
            ranks.combine([{"y": here.x, "handle": here.handle} for here in routed])
            combined = machine.puts()
        finally:
            machine.forget()
        chunk = routed[0].args.chunk_tokens
        assert 1 < chunk < TOKENS
        runs = TOKENS // chunk if every == 1 else TOKENS // every
        assert dispatched == combined == RANKS * (RANKS - NEAR + runs)
