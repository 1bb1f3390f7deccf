"""Where a Buffer has several plans for the same options, the one that fits is the only one that is tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm import combine, dispatch
from moecomm.testing import LocalBuffers
from moecomm.testing.prepare import prepare_combine, prepare_dispatch

TOKENS, HIDDEN = 6, 256


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans whose start() has been called."""
    plans: list[Any] = []
    for of in (combine.Plan, dispatch.Plan):
        start = of.start
        monkeypatch.setattr(of, "start", lambda plan, *given, start=start: plans.append(plan) or start(plan, *given))
    return plans


def test_by_where_rows_are_and_what_is_given(tried: list[Any]) -> None:
    with LocalBuffers(1, hidden=HIDDEN, num_experts=4, topk=2, max_tokens=TOKENS, backend="host") as ranks:
        (buffer,) = ranks.buffers
        x, ids = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.arange(2 * TOKENS).view(TOKENS, 2) % 4
        here = buffer.dispatch(x, ids, layout="flat")
        inside, outside = buffer.empty(here.handle), here.x.clone()
        kinds: list[tuple[torch.Tensor, dict[str, Any]]] = [
            (inside, {}),
            (outside, {}),
            (inside, {"bias": x}),
            (outside, {"weight_grads": torch.ones(len(outside), 2)}),
        ]
        for y, options in kinds:
            prepare_combine(buffer, y, here.handle, **options)
        plans = [plan for of_key in buffer.rounds.plans.table.values() for plan in of_key]
        assert len({plan.kind for plan in plans if isinstance(plan, combine.Plan)}) == len(kinds)
        for y, options in kinds:
            tried.clear()
            made = prepare_combine(buffer, y, here.handle, **options)
            assert tried == [made.plan]


def test_by_the_type_of_x(tried: list[Any]) -> None:
    with LocalBuffers(1, hidden=HIDDEN, num_experts=4, topk=2, max_tokens=TOKENS, backend="host") as ranks:
        (buffer,) = ranks.buffers
        x, ids = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.arange(2 * TOKENS).view(TOKENS, 2) % 4
        kinds = [(x, None), (x.to(torch.float8_e4m3fn), torch.ones(TOKENS, HIDDEN // 128))]
        for _ in range(2):
            tried.clear()
            made = [prepare_dispatch(buffer, rows, ids, scales=scales, layout="flat") for rows, scales in kinds]
        assert tried == [routed.plan for routed in made] and tried[0] is not tried[1]
