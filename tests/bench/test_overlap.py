"""A matmul between the halves of a dispatch, on CPUs: what is called, and in which order."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from moecomm_bench.case import RoundsCase
from moecomm_bench.ours import Ours, TimedOperation

from ..conftest import Ranks

CASE = RoundsCase("", 64, 2, 4, 2, "host", [8], ["flat"], ["bf16"], [0], "eager", replays=3)


def _halves(rank: int, group: Any) -> tuple[dict[str, int], list[str]]:
    made: list[str] = []

    def noted(name: str, call: Any) -> Any:
        return lambda *args, **options: (made.append(name), call(*args, **options))[1]

    with Ours(CASE, group, torch.device("cpu"), 8) as ours:
        buffer = ours.buffer
        begin, end = noted("begin", buffer.dispatch_begin), noted("end", buffer.dispatch_end)
        with (
            patch.object(buffer, "dispatch_begin", begin),
            patch.object(buffer, "dispatch_end", end),
            patch.object(torch, "matmul", noted("matmul", torch.matmul)),
        ):
            found = ours.halves(TimedOperation("dispatch", "flat", "bf16", "", 0), 10.0)
    return {name: len(times) for name, times in found.items()}, made


def test_halves(ranks: Ranks) -> None:
    for counts, made in ranks.run(2, _halves):
        assert counts == {"halves": 3, "gemm": 3, "together": 3}
        text = " ".join(made)  # one of a kind more than is counted, in turns
        alone, together = text.count("begin end"), text.count("begin matmul end")
        assert alone == together == text.count("matmul") - together >= 4
