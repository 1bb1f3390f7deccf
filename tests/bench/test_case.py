"""Sizes, routing and bytes, against counting one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moecomm.errors import BadInput
from moecomm_bench.case import RoundsCase, Traffic, model_sizes

from ..conftest import Ranks

CASE = RoundsCase(
    model="",
    hidden=256,
    topk=3,
    experts=12,
    ranks=3,
    backend="host",
    tokens=[40],
    layouts=["flat"],
    payloads=["bf16"],
    sms=[0],
    mode="eager",
)
# Beside another library, of which a stand-in is called.
OF_PEERS = dataclasses.replace(CASE, ranks=2, replays=2, ceiling=False, inputs=2, payloads=["bf16", "fp8"])


def test_models_give_their_sizes_and_numbers_replace_them() -> None:
    assert model_sizes("deepseek-v3", None, None, None) == ("deepseek-v3", 7168, 8, 256)
    assert model_sizes("qwen3-235b", None, None, None) == ("qwen3-235b", 4096, 8, 128)
    assert model_sizes("mixtral-8x7b", None, None, None) == ("mixtral-8x7b", 4096, 2, 8)
    assert model_sizes("gpt-oss-120b", None, None, None) == ("gpt-oss-120b", 2880, 4, 128)
    assert model_sizes("kimi-k2", None, None, None) == ("kimi-k2", 7168, 8, 384)
    assert model_sizes("kimi-k2", 64, None, 16) == ("", 64, 8, 16)
    with pytest.raises(BadInput, match="deepseek-v3"):
        model_sizes("gpt-5", None, None, None)


@pytest.mark.parametrize(
    ("payload", "nbytes"),
    [("bf16", 5760), ("fp8", 2972), ("fp8-column", 2972), ("fp8-ue8m0", 2903), ("fp8-ue8m0-column", 2904)],
)
def test_bytes_of_a_row(payload: str, nbytes: int) -> None:
    """2880 columns: 23 scales, the last of 64 columns; by column they come in words of four."""
    assert dataclasses.replace(CASE, hidden=2880).row_bytes(payload) == nbytes


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("ranks", {"ranks": 5}),
        ("layout", {"layouts": ["rows"]}),
        ("layout", {"layouts": []}),
        ("payload", {"payloads": ["fp4"]}),
        ("tokens", {"tokens": [4, 0]}),
        ("domain_ranks", {"domain_ranks": 2}),
        ("domain_ranks", {"domain_ranks": -1}),
        ("nic", {"nic": "50,3,0"}),
        ("nic", {"nic": "50,3,10", "domain_ranks": 1}),
        ("nic", {"nic": "50,3,10", "backend": "lsa"}),
        ("sms", {"sms": [-1]}),
        ("mode", {"mode": "graph"}),
        ("mode", {"mode": "lazy"}),
        ("skew, chain, replays", {"replays": 0}),
        ("inputs, singles", {"inputs": 0}),
        ("inputs, singles", {"singles": -1}),
    ],
)
def test_what_cannot_be_measured_is_named(argument: str, given: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        dataclasses.replace(CASE, **given).check()
    assert caught.value.argument == argument


def _traffic(rank: int, group: Any) -> tuple[list[list[int]], list[list[int]], float, float, int, float, float]:
    found = Traffic.of(group, _ids(rank), 12)
    return (
        found.rows.tolist(),
        found.entries.tolist(),
        found.wire(),
        found.wire(by_expert=True),
        found.busiest(),
        found.logical("flat"),
        found.logical("expert"),
    )


def _ids(rank: int) -> torch.Tensor:
    ids, _ = dataclasses.replace(CASE, skew=0.3).routing(20 + rank, rank)
    ids[rank, 0] = -1
    return ids


def test_traffic_is_what_counting_finds(ranks: Ranks) -> None:
    rows, entries = [[0] * 3 for _ in range(3)], [[0] * 3 for _ in range(3)]
    for rank in range(3):
        for token in _ids(rank).tolist():
            owners = [expert // 4 for expert in token if expert >= 0]
            for owner in owners:
                entries[rank][owner] += 1
            for owner in set(owners):
                rows[rank][owner] += 1
    out = [sum(rows[a][b] for b in range(3) if a != b) for a in range(3)]
    into = [sum(rows[a][b] for a in range(3) if a != b) for b in range(3)]
    remote_entries = sum(entries[a][b] for a in range(3) for b in range(3) if a != b)
    totals = [sum(map(sum, matrix)) / 3 for matrix in (rows, entries)]
    want = (rows, entries, sum(out) / 3, remote_entries / 3, max(out + into), *totals)
    assert ranks.run(3, _traffic) == [want] * 3
