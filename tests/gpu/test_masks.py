"""Masked ranks on GPUs: rows, sums and layers have the bits of ids of -1, and captured graphs follow a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ..masks import LAYOUTS, Twins, refuses_earlier_handles

pytestmark = [pytest.mark.gpu1, pytest.mark.timeout(200)]
SIZES: list[dict[str, Any]] = [
    {"ranks": 4, "hidden": 1024, "num_experts": 14, "topk": 4, "max_tokens": 64},
    {"ranks": 4, "hidden": 1024, "num_experts": 16, "topk": 4, "max_tokens": 3000},
]


@pytest.fixture(params=range(len(SIZES)), ids=["few tokens", "many tokens"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    found = Twins({**SIZES[request.param], "dtype": torch.bfloat16, "timeout_s": 20.0})
    yield found
    found.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounds_without_masked_ranks(twins: Twins, layout: str) -> None:
    tokens = twins.masked.buffers[0].max_tokens
    twins.rounds(0, tokens, layout=layout)
    twins.mask([2])
    twins.rounds(1, tokens, layout=layout)
    twins.mask([0], {0: 12, 1: 13, 2: 4})
    twins.rounds(2, tokens, layout=layout)
    twins.masked.unmask([0, 2])
    twins.rounds(3, tokens, layout=layout)


def test_layers_without_masked_ranks(twins: Twins) -> None:
    tokens = twins.masked.buffers[0].max_tokens
    twins.layers(0, tokens)
    twins.mask([1])
    twins.layers(1, tokens)
    twins.masked.unmask([1])
    twins.layers(2, tokens)


def test_handles_end_with_a_mask(twins: Twins) -> None:
    refuses_earlier_handles(twins, [3])
