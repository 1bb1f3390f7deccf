"""Combines whose sums are cast, on GPU ranks: the bits of CPU ranks, which are those of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm.testing import LocalBuffers

pytestmark = [pytest.mark.gpu1, pytest.mark.timeout(300)]
RANKS, EXPERTS, TOPK = 4, 12, 4
PLACES: dict[str, dict[str, Any]] = {
    "packets": {"tokens": 40},
    "pulled": {"tokens": 700},
    "domains": {"tokens": 300, "domain_ranks": 2},
    "verified": {"tokens": 60, "verify_every": 1},
}


def tokens(rank: int, count: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Make tokens of any magnitude, with a group of zeros, a NaN and an infinity; some without experts."""
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(count, hidden, generator=g) * 10.0 ** torch.randint(-6, 6, (count, 1), generator=g)
    x[2, :128], x[3, ::2], x[4, 0], x[5, -1] = 0.0, x[3, ::2] * 2**-8, torch.nan, torch.inf
    ids = torch.rand(count, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    ids[0, 1:], ids[1] = -1, -1
    return {"x": x.to(dtype), "topk_idx": ids, "topk_weights": torch.rand(count, TOPK, generator=g)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("layout", "hidden", "dtype"),
    [("flat", 7168, torch.bfloat16), ("expert", 7168, torch.bfloat16), ("expert", 1040, torch.float32)],
)
def test_the_bits_are_those_of_cpu_ranks(layout: Any, hidden: int, dtype: torch.dtype, place: str) -> None:
    how = dict(PLACES[place])
    count = how.pop("tokens")
    sizes: dict[str, Any] = {"hidden": hidden, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": count}
    calls = [{**tokens(rank, count - rank, hidden, dtype), "layout": layout} for rank in range(RANKS)]
    found = []
    for where in ({"backend": "host"}, {"backend": "lsa", "device": 0, "timeout_s": 20}):
        moved = [
            {name: value.to("cuda" if "device" in where else "cpu") if torch.is_tensor(value) else value}
            for call in calls
            for name, value in call.items()
        ]
        given = [{} for _ in calls]
        for number, one in enumerate(moved):
            given[number // len(calls[0])].update(one)
        with LocalBuffers(RANKS, **sizes, dtype=dtype, **how, **where) as ranks:
            arrived = ranks.dispatch(given)
            outs = []
            for wire in ("fp8", "int8", "fp8"):
                ys = [{"y": here.x, "handle": here.handle, "wire": wire} for here in arrived]
                outs.append([out.cpu() for out in ranks.combine(ys)])
                ranks.check()
            found.append(outs)
    for of_cpu, of_gpu in zip(*found, strict=True):
        for want, out in zip(of_cpu, of_gpu, strict=True):
            assert torch.equal(out.isnan(), want.isnan())
            assert torch.equal(out.nan_to_num(), want.nan_to_num())
