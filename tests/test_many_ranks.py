"""Many CPU ranks in one process, in one domain and in several, against the reference."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import moecomm
from moecomm.base.protocol import MAX_HOST_RANKS, MAX_RANKS
from moecomm.testing import LocalBuffers, check_case, random_case

from .backends.conftest import run_ranks
from .few import few

LAYOUTS = {"flat", "expert", "batched"}
# (ranks, ranks of a domain): 65 is the first number for which a set of ranks does not fit a word.
SIZES = [(64, 64), (65, 65), (100, 20), (128, 128), (128, 16), (256, 256), (256, 32)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("ranks", "domain_ranks"), few(SIZES, (65, 65), (100, 20)))
def test_many_ranks_match_the_reference(ranks: int, domain_ranks: int) -> None:
    sizes: dict[str, Any] = {"ranks": ranks, "hidden": 16, "num_experts": 2 * ranks, "topk": 4, "max_tokens": 3}
    with LocalBuffers(**sizes, domain_ranks=domain_ranks, backend="host", timeout_s=60) as local:
        seen: set[str] = set()
        for number in range(20):
            case = random_case(number, **sizes, dtype=torch.bfloat16)
            if case.layout not in seen:
                check_case(local, case)
                seen.add(case.layout)
        assert seen == LAYOUTS


def test_a_token_with_experts_of_the_first_and_the_last_ranks() -> None:
    """Each has its word in the set of a token's ranks."""
    ranks = 130
    sizes: dict[str, Any] = {"hidden": 8, "num_experts": ranks, "topk": 4, "max_tokens": 1, "dtype": torch.float32}
    with LocalBuffers(ranks, **sizes, backend="host", timeout_s=60) as local:
        ids = torch.tensor([[0, 63, 64, 129]])
        calls = [{"x": torch.full((1, 8), float(rank)), "topk_idx": ids, "layout": "flat"} for rank in range(ranks)]
        routed = local.dispatch(calls)
        for rank, here in enumerate(routed):
            rows = ranks if rank in (0, 63, 64, 129) else 0
            assert torch.equal(here.x, torch.arange(float(rows)).unsqueeze(1).expand(rows, 8))
        outs = local.combine([{"y": here.x, "handle": here.handle} for here in routed])
        assert all(torch.equal(out, 4 * call["x"]) for out, call in zip(outs, calls, strict=True))


def test_a_source_rank_waits_for_a_late_rank_beyond_the_first_word() -> None:
    def body(group: Any) -> None:
        sizes: dict[str, Any] = {"hidden": 8, "num_experts": 65, "topk": 1, "max_tokens": 1, "dtype": torch.float32}
        with moecomm.Buffer(group, **sizes, backend="host", timeout_s=60) as buffer:
            x = torch.full((1, 8), 1.0 + group.rank)
            routed = buffer.dispatch(x, torch.tensor([[64]]))
            y = routed.x.clone()
            if group.rank == 64:
                time.sleep(0.2)
            assert torch.equal(buffer.combine(y, routed.handle), x)

    assert run_ranks(65, body) == [None] * 65


def test_more_ranks_than_the_host_connects_are_refused() -> None:
    assert (MAX_RANKS, MAX_HOST_RANKS) == (64, 256)
    with pytest.raises(moecomm.BadInput, match=r"ranks: got 257; want .*1 to 256"):
        moecomm.local_ranks(257)
