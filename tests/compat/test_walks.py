"""Repeated low-latency calls pass few functions of Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm.compat.deep_ep import Buffer

from ..backends.conftest import all_ranks
from ..test_walks import walk_of

CALLS, FILES = 12, 6  # of moecomm, entered by a call


@pytest.mark.parametrize(("given", "files"), [({"use_fp8": False}, FILES), ({}, FILES + 1)], ids=["bf16", "fp8"])
def test_a_repeated_low_latency_call_passes_few_functions(given: dict[str, Any], files: int) -> None:
    """Rows in FP8 bring scales, whose tensor another file makes."""
    x, ids, weights = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0], [1]]), torch.ones(2, 1)

    def body(group: Any) -> None:
        buffer = Buffer(group)
        y, handles = torch.ones(2, 4, 128, dtype=torch.bfloat16)[:1], []

        def dispatch() -> None:
            handles.append(buffer.low_latency_dispatch(x, ids, 2, 2, **given)[2])

        def combine() -> None:
            buffer.low_latency_combine(y, ids, weights, handles[-1])

        for call, most in ((dispatch, files), (combine, FILES)):
            for _ in range(2):
                call()
            walk = walk_of(call)
            assert len(walk) <= CALLS, walk
            assert len({file for file, _ in walk}) <= most, walk
        buffer.destroy()

    all_ranks(2, body)
