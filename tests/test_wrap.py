"""Tags of rounds wrap after 2^31 rounds: every kind of round before, in and after the one whose tag is the last."""

from __future__ import annotations

import pytest
import torch

from moecomm.testing import LocalBuffers, check_case, random_case

from .wrap import rounds_since_wrap, wrap_after

SIZES = {"ranks": 4, "hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": 40, "dtype": torch.bfloat16}


@pytest.mark.parametrize("domain_ranks", [4, 2])
@pytest.mark.parametrize("rounds", range(2, 8))
def test_random_cases(rounds: int, domain_ranks: int) -> None:
    with LocalBuffers(**SIZES, domain_ranks=domain_ranks, backend="host", timeout_s=20) as ranks:
        wrap_after(ranks, rounds)
        for seed in range(6):
            check_case(ranks, random_case(100 * rounds + seed, **SIZES))
        assert min(rounds_since_wrap(ranks)) > 0


@pytest.mark.parametrize("domain_ranks", [4, 2])
@pytest.mark.parametrize("rounds", range(2, 6))
def test_both_halves_of_a_dispatch(rounds: int, domain_ranks: int) -> None:
    """The second half belongs to the round of the first, whatever its tag; a combine of an earlier one lies between."""
    with LocalBuffers(**SIZES, domain_ranks=domain_ranks, backend="host", timeout_s=20) as ranks:
        wrap_after(ranks, rounds)
        g = torch.Generator().manual_seed(rounds)
        for _ in range(4):
            x = [torch.randn(20, 64, generator=g).bfloat16() for _ in ranks.buffers]
            idx = [torch.rand(20, 8, generator=g).argsort(dim=1)[:, :3].contiguous() for _ in ranks.buffers]
            calls = [{"x": rows, "topk_idx": ids} for rows, ids in zip(x, idx, strict=True)]
            earlier = ranks.dispatch(calls)
            begun = ranks.dispatch_begin(calls)
            between = ranks.combine([{"y": here.x, "handle": here.handle} for here in earlier])
            routed = ranks.dispatch_end(begun)
            outs = ranks.combine([{"y": here.x, "handle": here.handle} for here in routed])
            for rows, first, second in zip(x, between, outs, strict=True):
                assert torch.equal(first, (3 * rows.float()).bfloat16())
                assert torch.equal(second, first)
        assert min(rounds_since_wrap(ranks)) > 0


@pytest.mark.parametrize("domain_ranks", [2, 1])
def test_a_thousand_rounds(domain_ranks: int) -> None:
    """Rounds of one Buffer, of which the first ten lie before the wrap."""
    sizes = {**SIZES, "ranks": 2}
    with LocalBuffers(**sizes, domain_ranks=domain_ranks, backend="host", timeout_s=20) as ranks:
        wrap_after(ranks, 10)
        idx = torch.arange(15).view(5, 3) % 8
        for number in range(506):
            x = [torch.full((5, 64), float(1 + (number + rank) % 80)).bfloat16() for rank in range(2)]
            routed = ranks.dispatch([{"x": rows, "topk_idx": idx, "layout": "expert"} for rows in x])
            outs = ranks.combine([{"y": here.x, "handle": here.handle, "wire": "exact"} for here in routed])
            assert all(torch.equal(out, 3 * rows) for out, rows in zip(outs, x, strict=True)), number
        assert min(rounds_since_wrap(ranks)) >= 1000


def test_a_flag_that_no_round_has_raised_is_of_no_round() -> None:
    """Combines of rows in the window, whose places nobody has flagged before, around the last tag."""
    for rounds in range(2, 5):
        with LocalBuffers(**SIZES, backend="host", timeout_s=20) as ranks:
            wrap_after(ranks, rounds)
            x = [torch.full((20, 64), rank + 1.0).bfloat16() for rank in range(4)]
            idx = torch.arange(60).view(20, 3) % 8
            routed = ranks.dispatch([{"x": rows, "topk_idx": idx} for rows in x])
            for power in range(4):
                ys = [
                    b.empty(here.handle).copy_(here.x * 2.0**power)
                    for b, here in zip(ranks.buffers, routed, strict=True)
                ]
                outs = ranks.combine([{"y": y, "handle": here.handle} for y, here in zip(ys, routed, strict=True)])
                for rows, out in zip(x, outs, strict=True):
                    assert torch.equal(out, 3 * rows * 2.0**power), (rounds, power)
